"""Processes that own a model."""
