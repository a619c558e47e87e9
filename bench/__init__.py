"""Demonstrations and measurements, each a command that a user can run."""
