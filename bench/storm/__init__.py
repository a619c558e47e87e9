"""Fault storms: the real core, unruly workers and clients, every fault drawn from one seed, and a referee."""
