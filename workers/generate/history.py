"""The distinct tokens of one request's text and how often it put each out: what penalties look at.

Kept as the text grows, so that a step costs one look-up for each penalised request, not its length; and kept as packed
arrays, which become a tensor in one copy. It only ever follows the request's tokens, so preemption and work done
elsewhere need no care.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Self

import torch

assert array("q").itemsize == 8


class History:
    """One request's. Reading the same text twice changes nothing."""

    __slots__ = ("_counts", "_ids", "_place", "_read")

    def __init__(self) -> None:
        self._place: dict[int, int] = {}  # token -> where it is in the arrays
        self._ids = array("q")
        self._counts = array("f")
        self._read = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<History {len(self)} of {self._read} tokens>"

    def read(self, tokens: Sequence[int], input_tokens: int, *, whole: bool) -> Self:
        """Take in what of `tokens` is new; those of the input (only if `whole`) are known but not counted."""
        if not self._read:
            if whole:
                self._add(dict.fromkeys(tokens[:input_tokens]))
            self._read = input_tokens
        for token in tokens[self._read :]:
            if token not in self._place:
                self._add([token])
            self._counts[self._place[token]] += 1
        self._read = len(tokens)
        return self

    def _add(self, tokens: Any) -> None:
        start = len(self._ids)
        self._ids.extend(tokens)
        self._counts.extend([0.0] * (len(self._ids) - start))
        self._place.update((token, start + at) for at, token in enumerate(tokens))

    @staticmethod
    def joined(histories: Sequence["History"]) -> tuple[Any, Any]:
        """All ids (int64) and counts (float32), one history after the other."""
        ids, counts = array("q"), array("f")
        for history in histories:
            ids.extend(history._ids)
            counts.extend(history._counts)
        if not ids:
            return torch.empty(0, dtype=torch.long), torch.empty(0)
        return torch.frombuffer(ids, dtype=torch.long), torch.frombuffer(counts, dtype=torch.float32)
