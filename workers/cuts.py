"""Where to cut a batch that was sorted by length: which texts are padded together.

A group of texts is one rectangle, as wide as its longest text, and costs about a + b x cells. Few texts in a group cost
more launches (a), many cost more padding (b x empty cells). Where padding is the cost, as on a CPU, the best cut makes
many small groups; where a launch is, as on a GPU, one large one. So nothing is set: a and b are learned from every
group that was run, and the cut is the exact optimum for them. Lives here: that optimum, a pure function, and what was
learned. Never here: a tensor, a clock.
"""

from collections.abc import Sequence

from headway.scheduler.latency import CostModel

CELLS_MAX = 1 << 16  # padded tokens in one rectangle: past it a device is full, and only memory is used up
ROOM_STEPS = 64  # after memory ran out, so many groups without a fault double the rectangle that is dared


def best_cut(lengths: Sequence[int], fixed: float, per_cell: float, cells_max: int = CELLS_MAX) -> list[int]:
    """How many of `lengths` (ascending) go into each group, in order, so that the sum of their costs is least.

    A group of n texts, the longest of w tokens, costs `fixed` + `per_cell` x n x w, and n x w is at most `cells_max`
    (but for one text that is longer). Dynamic programme over the distinct lengths: texts of one length are never better
    apart.
    """
    ends = [at + 1 for at, width in enumerate(lengths) if at + 1 == len(lengths) or lengths[at + 1] != width]
    starts = [0, *ends]
    best = [0.0]
    cut_at = [0]
    for last, end in enumerate(ends):
        column = per_cell * lengths[end - 1]
        costs = [best[first] + column * (end - starts[first]) for first in range(last + 1)]
        first = min(range(last + 1), key=costs.__getitem__)
        best.append(costs[first] + fixed)
        cut_at.append(first)
    groups: list[int] = []
    at = len(ends)
    while at:
        first = cut_at[at]
        groups[:0] = _slices(starts[at] - starts[first], max(1, cells_max // lengths[starts[at] - 1]))
        at = first
    return groups


def equal_cut(lengths: Sequence[int], cells_max: int = CELLS_MAX) -> list[int]:
    """The cut without any padding: each length is a group of its own."""
    return best_cut(lengths, 0.0, 1.0, cells_max)


def _slices(count: int, most: int) -> list[int]:
    """`count` in parts of at most `most`, as equal as can be."""
    parts = -(-count // most)
    return [count // parts + (part < count % parts) for part in range(parts)]


class Cutter:
    """What has been learned about the cost and size of rectangles. `padding`: False forbids it altogether."""

    def __init__(self, prior_ns: tuple[float, ...] = (), *, padding: bool = True) -> None:
        self.padding = padding
        self.cells_max = CELLS_MAX
        self._cost = CostModel(prior_ns)

    def __repr__(self) -> str:
        cost = self._cost.cost
        learned = f"{cost.a_ns / 1e6:.2f} ms + {cost.b_ns / 1e3:.2f} us x cells + {cost.m_ns / 1e6:.2f} ms x rows"
        return f"<Cutter {learned}, {'at most ' if self.padding else 'no padding, at most '}{self.cells_max} cells>"

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """The places of `lengths` in groups, shortest first; the last of each group is its longest."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)  # stable: of equals, the first
        ascending = [lengths[place] for place in order]
        if self.padding:
            cost = self._cost.cost
            sizes = best_cut(ascending, cost.a_ns, cost.b_ns, self.cells_max)
        else:
            sizes = equal_cut(ascending, self.cells_max)
        groups, at = [], 0
        for size in sizes:
            groups.append(order[at : at + size])
            at += size
        return groups

    def observe(self, rows: int, width: int, took_ns: int) -> None:
        """A rectangle of `rows` x `width` tokens took `took_ns`."""
        self._cost.observe(rows, rows * width, took_ns)
        if self.cells_max < CELLS_MAX:
            self.cells_max = min(CELLS_MAX, self.cells_max + max(1, self.cells_max // ROOM_STEPS))

    def out_of_memory(self, rows: int, width: int) -> None:
        """A rectangle of this size did not fit."""
        self.cells_max = max(1, min(self.cells_max, rows * width // 2))
