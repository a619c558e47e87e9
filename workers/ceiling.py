"""How much may be computed at once, as learned from running out of memory.

One number: tokens in a step, or requests in a batch. Each shortage halves it, below what did not fit; each run of good
ones near it adds a little, so that a passing shortage (a neighbour on the device) costs a while, and a lasting one a
step now and then. Lives here: that number and giving cached memory back. Never here: what is computed.
"""

import gc
import sys

PATIENCE = 16  # good ones near the ceiling before it rises
STRIKES = 2  # of one that does not fit alone, before it is told so: once may be a neighbour's doing
RISES = 32  # from nothing to where it began


class Ceiling:
    """`limit` is what may be computed at once, `most` where it began. `shortages` counts them."""

    __slots__ = ("_good", "limit", "most", "shortages")

    def __init__(self, most: int) -> None:
        assert most >= 1
        self.most = self.limit = most
        self.shortages = 0
        self._good = 0

    def __repr__(self) -> str:
        return f"<Ceiling {self.limit}/{self.most}, {self.shortages} shortages>"

    def short(self, size: int) -> int:
        """`size` did not fit: the new limit, at least 1."""
        self.shortages += 1
        self._good = 0
        self.limit = max(1, min(size, self.limit) // 2)
        return self.limit

    def held(self, size: int) -> bool:
        """`size` fitted. Whether the limit has come back to `most` with this one; small ones say nothing about it."""
        if self.limit == self.most or 2 * size < self.limit:
            return False
        self._good += 1
        if self._good < PATIENCE:
            return False
        self._good = 0
        self.limit = min(self.most, self.limit + max(1, self.most // RISES))
        return self.limit == self.most


def free_caches() -> None:
    """Give back memory that nobody uses but an allocator keeps. Call it when the exception that told is gone: its
    frames hold the tensors of the computation that failed."""
    gc.collect(1)  # the young: a whole collection beside a model takes most of a second
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
