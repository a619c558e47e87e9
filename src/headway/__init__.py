"""headway: an adaptive dynamic-batching scheduler for Hugging Face Transformers models."""

__version__ = "0.1.0"
