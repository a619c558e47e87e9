"""Live replays: a load sent to a running server at its own times, and what came of it, in numbers to trust."""
