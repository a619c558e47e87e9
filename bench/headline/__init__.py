"""What headway is for, in one command: `python -m headway.bench.headline`."""
