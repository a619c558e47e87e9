"""The simulator: the real core under a virtual clock, made-up engines, and the traffic of real traces."""
