"""Pages of the KV cache: who holds them, and the storage behind them.

A page is `page_tokens` consecutive slots and belongs to one request or to the free list. Storage is allocated once, so
its size is a hard cap. `PagedCache` is a Transformers cache: for each layer it writes the keys and values of a step's
tokens into the slots the plan names, and hands back exactly the slots the plan reads. Nothing is cleared when a page
changes hands: a plan never reads a slot its own request has not written, and tests prove it with pages full of NaN.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from headway.workers.generate.lowered import SCALE_DTYPE, decode, encode
from headway.workers.generate.plan import Plan


class Guard(Protocol):
    """Who watches pages that nobody holds."""

    def freed(self, pages: Sequence[int]) -> None: ...

    def taken(self, pages: Sequence[int]) -> None: ...


class Pages:
    """The free list. `total` pages; `take` and `give` move them; `used` and `free` count them.

    A page may have several holders (`hold`), and is free when the last has given it back. `guard` is told of pages as
    they become free, and before they are used again.
    """

    def __init__(self, total: int, guard: Guard | None = None) -> None:
        self.total = total
        self.guard = guard
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    def __repr__(self) -> str:
        return f"<Pages {self.used}/{self.total} used>"

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, count: int) -> list[int]:
        """`count` pages that are now the caller's. There must be that many free."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        cut = len(self._free) - count
        taken, self._free[cut:] = self._free[cut:], []
        if taken and self.guard is not None:
            self.guard.taken(taken)
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """These pages, held by somebody, are now also the caller's."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Return pages that `take` or `hold` handed out, each once."""
        for page in pages:
            assert self._holders[page], f"page {page} returned twice"
            self._holders[page] -= 1
        freed = [page for page in pages if not self._holders[page]]
        if freed and self.guard is not None:
            self.guard.freed(freed)
        self._free.extend(freed)


class PagedCache(Cache):
    """Keys and values of all layers, [slots, heads, width] each, reached through the plan of the current step.

    Shapes come from the model's first `update` (grouped heads and latent attention need no case of their own). `dtype`:
    what they are stored as; None: as the model computes them. A lower one is read back by everybody, also by the step
    that writes it, so that an answer does not depend on how its prompt was cut into steps.
    """

    def __init__(self, slots: int, dtype: Any = None) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.dtype = dtype
        self.plan: Plan | None = None
        self.keys: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        self.key_scales: dict[int, Any] = {}  # of int8 only
        self.value_scales: dict[int, Any] = {}

    @property
    def stores(self) -> list[Any]:
        """Every tensor behind the pages; each has the slots as its first dimension."""
        return [
            store for part in (self.keys, self.values, self.key_scales, self.value_scales) for store in part.values()
        ]

    @property
    def bytes_per_token(self) -> int:
        """What one token costs in all layers that have been seen."""
        return sum(store.element_size() * store[0].numel() for store in self.stores)

    def like(self, slots: int, dtype: Any = None) -> "PagedCache":
        """An empty cache of `slots` slots with this one's layers, allocated now so that it cannot fail later.

        This one must store what the model computes; the new one may store less (`dtype`).
        """
        other = PagedCache(slots, dtype)
        for layer, store in self.keys.items():
            other._allocate(store, self.values[layer], layer)
        return other

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **_kwargs: Any) -> tuple[Any, Any]:
        """Write one layer's states [1, heads, tokens, width] and return what the plan reads, in the same layout."""
        plan = self.plan
        assert plan is not None, "no step is planned"
        if layer_idx not in self.keys:
            self._allocate(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), layer_idx)
        if self.dtype is not None:
            return (
                self._through(key_states, self.keys, self.key_scales, layer_idx, plan),
                self._through(value_states, self.values, self.value_scales, layer_idx, plan),
            )
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(0, plan.write, key_states[0].transpose(0, 1))
        values.index_copy_(0, plan.write, value_states[0].transpose(0, 1))
        if plan.in_place:
            plan.reached = (key_states, keys, values)
            return key_states, value_states
        if plan.read is None:  # only whole prompts: nothing older to read
            return key_states, value_states
        read_keys = keys.index_select(0, plan.read).transpose(0, 1)[None]
        return read_keys, values.index_select(0, plan.read).transpose(0, 1)[None]

    def _through(self, states: Any, stores: dict[int, Any], scales: dict[int, Any], layer: int, plan: Plan) -> Any:
        """Store `states` in fewer bits, and read what the plan reads as it is stored."""
        stored, scale = encode(states[0].transpose(0, 1), self.dtype)
        stores[layer].index_copy_(0, plan.write, stored)
        if scale is not None:
            scales[layer].index_copy_(0, plan.write, scale)
        if plan.read is not None:
            stored = stores[layer].index_select(0, plan.read)
            scale = None if scale is None else scales[layer].index_select(0, plan.read)
        return decode(stored, scale, states.dtype).transpose(0, 1)[None]

    def _allocate(self, keys: Any, values: Any, layer: int) -> None:
        """Room for a layer like `keys` and `values` [any, heads, width]."""
        for like, stores, scales in ((keys, self.keys, self.key_scales), (values, self.values, self.value_scales)):
            shape = (self.slots, *like.shape[1:])
            stores[layer] = _held(like, shape, self.dtype or like.dtype)
            if self.dtype is torch.int8:
                scales[layer] = _held(like, (*shape[:2], 1), SCALE_DTYPE)

    # What a model asks of its cache before the first layer: positions are given by the plan, and no mask is built.

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0


def _held(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Memory that is really there. A CPU's would come only when it is first written to: in the midst of an answer,
    which then waits (a third of a second on a virtual machine, for one huge page in each layer), or not at all."""
    made = like.new_empty(tuple(shape), dtype=dtype)
    return made.zero_() if made.device.type == "cpu" else made
