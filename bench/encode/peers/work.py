"""The work every server but headway and infinity does, so that only the serving layer differs: MiniLM as one writes it.

Texts are tokenised together, padded to the longest, run in one forward, pooled by the mean and normalised. Imports
nothing of headway: this file runs in the peers' environments, and under their names for it.

Settings come from the environment: MODEL (a folder), THREADS, MAX_BATCH, MAX_WAIT_MS, PORT.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

TOKENS_MAX = 256

MAX_BATCH = int(os.environ.get("MAX_BATCH", "32"))
MAX_WAIT_MS = float(os.environ.get("MAX_WAIT_MS", "5"))
PORT = int(os.environ.get("PORT", "8100"))


class MiniLM:
    """Texts in, vectors out: lists of floats."""

    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ.get("THREADS", "1")))
        folder = os.environ["MODEL"]
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder).float().eval()
        self(["warm up " * words for words in (1, 20, 60)])

    def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        with torch.inference_mode():
            batch = self._tokenizer(
                list(texts), padding=True, truncation=True, max_length=TOKENS_MAX, return_tensors="pt"
            )
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            vectors = (hidden * mask).sum(1) / mask.sum(1)
            found: list[list[float]] = torch.nn.functional.normalize(vectors, dim=1).tolist()
        return found
