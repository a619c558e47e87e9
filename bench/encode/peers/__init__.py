"""What runs in the peers' own environments, where headway is not installed: plain scripts and the work they do."""
