"""What to do next, and nothing else: pure functions and small state objects, no clock, no I/O."""
