"""Canaries in the pages that nobody holds: proof, while serving, that no request reads or writes another's.

Every free slot is full of a value that no model writes (NaN; in int8 the one number that is never stored, with a scale
of NaN). Whoever reads one computes NaN and fails by itself; whoever writes one leaves a mark that is found before the
page is used again, and now and then by looking at free pages. A mark means that the books or a kernel are wrong: the
worker ends, because no answer of it can be trusted.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from headway.workers.generate.pages import PagedCache

SAMPLE = 8  # free pages looked at each time
NEVER_STORED = -128  # of int8: the codec stops at -127


class IsolationError(AssertionError):
    """A page that nobody held was written. Nothing that this worker says can be trusted."""


class Canary:
    """Watches the pages of `cache`, `page_tokens` slots each; all are free now. A Guard for `Pages`."""

    def __init__(self, cache: PagedCache, page_tokens: int, rng: random.Random) -> None:
        self._rng = rng
        total = cache.slots // page_tokens
        self._stores = [store[: total * page_tokens].unflatten(0, (total, page_tokens)) for store in cache.stores]
        self._free = set(range(total))
        self.checked = 0
        for store in self._stores:
            store.fill_(_mark(store))

    def __repr__(self) -> str:
        return f"<Canary {len(self._free)} free pages, {self.checked} checked>"

    def freed(self, pages: Sequence[int]) -> None:
        """Nobody holds these any more: mark them."""
        for store in self._stores:
            store.index_fill_(0, torch.tensor(pages, device=store.device), _mark(store))
        self._free.update(pages)

    def taken(self, pages: Sequence[int]) -> None:
        """Somebody gets these: they must be as they were left. Raises IsolationError."""
        self._check(pages)
        self._free.difference_update(pages)

    def look(self) -> None:
        """Check a few free pages. Raises IsolationError."""
        if self._free:
            self._check(self._rng.sample(sorted(self._free), min(SAMPLE, len(self._free))))

    def _check(self, pages: Sequence[int]) -> None:
        self.checked += len(pages)
        changed = torch.zeros(len(pages), dtype=torch.bool, device=self._stores[0].device)
        for store in self._stores:
            found = store.index_select(0, torch.tensor(pages, device=store.device)).flatten(1)
            changed |= ((found != NEVER_STORED) if found.dtype == torch.int8 else ~found.isnan()).any(1)
        if wrong := [page for page, is_wrong in zip(pages, changed.tolist(), strict=True) if is_wrong]:
            raise IsolationError(f"KV pages {wrong} were written while nobody held them")


def _mark(store: Any) -> float:
    return NEVER_STORED if store.dtype == torch.int8 else float("nan")
