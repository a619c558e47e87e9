"""What a step of an iteration-level engine costs, beyond a line: what is in it, and a curve fitted to measured ones.

A step computes a token for each decoding row and some of prompts, all in one forward. Its time over its tokens is no
straight line: up to some tokens a product is bound by reading the weights, then by arithmetic. So the cost is a line
between each two of KNOTS, never falling, and beside it each row, each slot of the cache that is read, and each pair of
a prompt's token and a slot before it have a price. Between two steps a worker reports and looks into its socket. All
numbers come from `bench/ab/steps.py`, which fits them to a flight record; here they are only used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # tokens of a step; past the last the line goes on


class Shape(NamedTuple):
    """What is in a step. `rows`: that decode; `read`: tokens of prompts, of `chunks` requests; `slots`: of the cache
    that are read; `pairs`: of a prompt's token and a slot before it."""

    rows: int
    read: int = 0
    chunks: int = 0
    slots: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, rows: int, read: int, slots: int, pieces: Sequence[tuple[int, int]]) -> Self:
        """`rows` that read `slots`, and `pieces` of prompts: (tokens before it, tokens), `read` in all."""
        slots += sum([start + count for start, count in pieces])
        pairs = sum([count * (2 * start + count) // 2 for start, count in pieces])
        return cls(rows, read, len(pieces), slots, pairs)


def columns(shape: Shape) -> list[float]:
    """What each number of a StepCost is multiplied with: 1, tokens between knots, rows and chunks, slots, pairs."""
    tokens = shape.rows + shape.read
    parts = [float(max(0, min(tokens, high) - low)) for low, high in zip(KNOTS, (*KNOTS[1:], tokens), strict=True)]
    return [1.0, *parts, float(shape.rows + shape.chunks), float(shape.slots), float(shape.pairs)]


@dataclass(frozen=True)
class StepCost:
    """`ms`: a number for each of `columns`. `gap_ms`: from the end of a step to the beginning of the next; `wake_ms`:
    from the core's decision to an idle worker's beginning, and back. `ratios`: measured times over these, in the order
    in which they were measured."""

    ms: tuple[float, ...]
    gap_ms: float = 0.0
    wake_ms: float = 0.0
    ratios: tuple[float, ...] = ()

    def step_ms(self, shape: Shape) -> float:
        """One step, without noise."""
        return sum([price * count for price, count in zip(self.ms, columns(shape), strict=True)])
