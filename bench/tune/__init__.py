"""Measures a model on this machine and says how to serve it: `headway tune`."""
