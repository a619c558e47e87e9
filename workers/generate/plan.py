"""The plan of one step: which tokens run, where their keys and values go, and what each may look at.

All tokens of a step lie in one row [1, T]: first one token for each decoding request, then the chunks of requests
whose prompt is being read. Decode rows read rectangles of slots, each as wide as the longest of its rows; a shorter row
is padded with its own first slot and masked there, so that no row ever touches a slot of another. Rows of much
different lengths, which the engine puts in order, read different rectangles: one long text must not make all others
read as much as it does. Everything that is the same in all layers is computed here, once for each step, as tensors on
the device.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """One request's share of a step: `ids` run at positions `start`, `start + 1`, ...; `pages` hold its whole text.

    `last`: whether these are all the tokens the request has so far, so that the next one can be chosen.
    """

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


# Slots of padding that are worth a rectangle more: what its calls cost in each layer, over the time to read a slot.
SPLIT_SLOTS = {"cpu": 192, "cuda": 16384}


class Rectangle(NamedTuple):
    """Decode rows [start, end) read `width` slots each, from `key_start` on of what the cache returns."""

    start: int
    end: int
    key_start: int
    width: int

    @property
    def key_end(self) -> int:
        return self.key_start + (self.end - self.start) * self.width


class Chunk(NamedTuple):
    """Where a chunk lies: tokens [start, end) of the row, read slots [key_start, key_end) of what the cache returns."""

    start: int
    end: int
    key_start: int
    key_end: int

    @property
    def whole(self) -> bool:
        """Nothing of this request came before: a plain causal prompt."""
        return self.end - self.start == self.key_end - self.key_start


class Plan:
    """One step, ready for the model. Made from the decoding spans (one token each) and the prefilling ones, in order.

    `exact`: read slots exactly, request after request, with cumulative lengths, as FlashAttention's varlen form wants
    them, instead of padded rectangles. `in_place`: exactly, and by whoever computes attention, not by the cache.
    """

    def __init__(
        self,
        decode: Sequence[Span],
        prefill: Sequence[Span],
        page_tokens: int,
        device: Any,
        *,
        exact: bool = False,
        in_place: bool = False,
    ) -> None:
        exact = exact or in_place
        self.rows = len(decode)
        self.in_place = in_place
        self.device = device
        self.layers = 0  # attention calls seen: proof of what ran
        self.cache: Any = None  # of the step that runs
        self.tables: Any = None  # in place: what the kernel makes of this
        self.reached: tuple[Any, Any, Any] = (None, None, None)  # in place: the keys given last, and where all lie
        spans = [*decode, *prefill]
        self.tokens = sum(len(span.ids) for span in spans)
        self._ends = [span.end for span in decode]
        self.rectangles = _rectangles(self._ends, SPLIT_SLOTS["cpu" if torch.device(device).type == "cpu" else "cuda"])
        write: list[Any] = []
        read: list[Any] = []
        for block in self.rectangles:
            _fill(block, decode[block.start : block.end], page_tokens, write, read, exact=exact)
        self.chunks = self._add_chunks(prefill, page_tokens, write, read)
        self.ids = torch.tensor([[token for span in spans for token in span.ids]], device=device)
        positions = [position for span in spans for position in range(span.start, span.end)]
        self.positions = torch.tensor([positions], device=device)
        self.write = torch.cat(write).to(device)
        needs_read = in_place or bool(decode) or any(span.start for span in prefill)
        self.read = torch.cat(read).to(device) if needs_read else None
        self.lasts = torch.tensor(_lasts(spans), device=device)
        self._masks: dict[tuple[int, int], Any] = {}
        self.lengths = [(len(span.ids), span.end) for span in spans]  # of each: tokens here, tokens in all
        if exact and not in_place:
            self._add_lengths()

    def _add_chunks(self, prefill: Sequence[Span], page_tokens: int, write: list[Any], read: list[Any]) -> list[Chunk]:
        chunks = []
        at, key_at = self.rows, sum(len(part) for part in read)
        for span in prefill:
            slots = _slots(span, page_tokens)
            write.append(slots[span.start :])
            read.append(slots)
            chunks.append(Chunk(at, at + len(span.ids), key_at, key_at + span.end))
            at, key_at = at + len(span.ids), key_at + span.end
        return chunks

    def _add_lengths(self) -> None:
        queries, keys = zip(*self.lengths, strict=True)
        self.queries_max, self.keys_max = max(queries), max(keys)
        as_tensor = lambda counts: torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(self.device)  # noqa: E731
        self.queries_at, self.keys_at = as_tensor(queries), as_tensor(keys)

    def row_mask(self, index: int, window: int, dtype: Any) -> Any:
        """What the rows of rectangle `index` may see of it: [rows, 1, 1, width], 0 or -inf. `window` 0: everything."""
        key = (-1 - index, window)
        if key not in self._masks:
            block = self.rectangles[index]
            ends = torch.tensor(self._ends[block.start : block.end], device=self.device)[:, None, None, None]
            column = torch.arange(block.width, device=self.device)
            seen = column < ends
            self._masks[key] = _additive(seen & (column >= ends - window) if window else seen, dtype)
        return self._masks[key]

    def chunk_mask(self, index: int, window: int, dtype: Any) -> Any:
        """What the tokens of chunk `index` may see of its request: [tokens, positions], 0 or -inf."""
        key = (index, window)
        if key not in self._masks:
            chunk = self.chunks[index]
            end = chunk.key_end - chunk.key_start
            query = torch.arange(end - (chunk.end - chunk.start), end, device=self.device)[:, None]
            column = torch.arange(end, device=self.device)
            seen = column <= query
            self._masks[key] = _additive(seen & (column > query - window) if window else seen, dtype)
        return self._masks[key]


def _slots(span: Span, page_tokens: int) -> Any:
    """The slots of positions [0, end) of one request."""
    pages = torch.tensor(span.pages)
    return (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()[: span.end]


def _rectangles(ends: Sequence[int], split_slots: int) -> list[Rectangle]:
    """Rows of lengths `ends` cut into rectangles, where a cut saves `split_slots` slots of padding or more."""
    found: list[Rectangle] = []
    pending = [(0, len(ends))] if ends else []
    key_start = 0
    while pending:
        start, end = pending.pop()
        lengths = ends[start:end]
        before = list(accumulate(lengths, max))  # how wide rows [start, start + i] are together
        after = list(accumulate(reversed(lengths), max))[::-1]
        count, width = len(lengths), before[-1]
        saved, cut = max(
            ((count * width - at * before[at - 1] - (count - at) * after[at], at) for at in range(1, count)),
            default=(0, 0),
        )
        if cut and saved >= split_slots:
            pending += [(start + cut, end), (start, start + cut)]
            continue
        found.append(Rectangle(start, end, key_start, width))
        key_start = found[-1].key_end
    return found


def _fill(
    block: Rectangle, decode: Sequence[Span], page_tokens: int, write: list[Any], read: list[Any], *, exact: bool
) -> None:
    """Add the slots that the rows of `block` write (one each) and read (all of it; or, `exact`, without padding)."""
    across = -(-block.width // page_tokens)
    table = torch.tensor([[*span.pages[:across], *([span.pages[0]] * (across - len(span.pages)))] for span in decode])
    slots = (table[:, :, None] * page_tokens + torch.arange(page_tokens)).flatten(1)[:, : block.width]
    position = torch.tensor([[span.start] for span in decode])
    live = torch.arange(block.width) <= position
    write.append(slots.gather(1, position)[:, 0])
    read.append(slots[live] if exact else torch.where(live, slots, slots[:, :1]).flatten())


def _lasts(spans: Sequence[Span]) -> list[int]:
    """Indices into the row of the tokens after which a next one is chosen."""
    lasts, at = [], 0
    for span in spans:
        at += len(span.ids)
        if span.last:
            lasts.append(at - 1)
    return lasts


def _additive(seen: Any, dtype: Any) -> Any:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
