"""Iteration-level generation with unmodified Transformers models.

`pages` holds keys and values, `plan` lays out one step, `attention` keeps requests apart in it, `runner` runs it on a
model that has passed the `probe`, `sampling` chooses tokens, `engine` decides who runs. Models which cannot be run so
have an engine of the same kind in `padded`, over the ways of `rows`. `make` is the door, and imports torch; this file
imports nothing, so that the rules that need no torch (`pace`) are there for the simulator, too.
"""
