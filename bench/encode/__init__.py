"""Sentence embeddings through headway and other servers, alternating in one run: `python -m headway.bench.encode`."""
