"""Is any of it worth doing here? Measured all the time, by what is not done.

One in twenty of the batches that could have been composed stays first come, first served, chosen by a hash of its
number, so that nobody can tell which. Their true imbalance is what there would be without a composer: where that is
small (flat routers) or the loads cannot be predicted (an untrained model), composing is off, and looks again with every
batch.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

EXPLORED = 13  # of 256: 5% of the eligible batches
IMBALANCE_MIN, R2_MIN = 1.05, 0.3
REPORTS_MIN = 50  # of a predictor, before it is believed
BATCHES_MIN = 3  # first come, first served, before their imbalance is believed
RATE = 0.05
EDGES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 1.75, 2.0, 3.0)  # of an imbalance, as it is shown


@dataclass(slots=True)
class Mean:
    """A running mean: of all at first, of the last 1 / RATE later."""

    value: float = 1.0
    count: int = 0

    @property
    def shown(self) -> float:
        """The mean; 0 while there is none."""
        return self.value if self.count else 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(RATE, 1.0 / self.count) * (value - self.value)


@dataclass(slots=True)
class Spread:
    """How often what was observed was at most each of EDGES, and above the one before."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(EDGES, value)] += 1
        self.total += value

    def report(self) -> dict[str, Any]:
        """By stable names."""
        counts = dict(zip([*map(str, EDGES), "more"], self.counts, strict=True))
        return {"counts": counts, "sum": round(self.total, 4)}


class Worth:
    """Whether to compose the next batch, and what composing has brought."""

    def __init__(self) -> None:
        self.fifo, self.composed = Mean(), Mean()
        self.spread = {"fifo": Spread(), "composed": Spread()}
        self.r2 = 0.0
        self.reports = 0

    def __repr__(self) -> str:
        return f"<Worth fifo {self.fifo.value:.3f}, composed {self.composed.value:.3f}, R2 {self.r2:.2f}>"

    @property
    def predictable(self) -> bool:
        return self.reports >= REPORTS_MIN and self.r2 >= R2_MIN

    @property
    def gain(self) -> float:
        """How much less the expert part of a step takes in composed batches; 0 while either kind is missing."""
        if not self.fifo.count or not self.composed.count:
            return 0.0
        return 1.0 - self.composed.value / self.fifo.value

    def skipped(self, waiting: int, take: int, batch: int) -> str:
        """Why batch number `batch` stays first come, first served; "" if it is to be composed."""
        if waiting <= take:
            return "shallow"
        if not self.predictable:
            return "unpredictable"
        if self.fifo.count < BATCHES_MIN:
            return "unmeasured"
        if self.fifo.value < IMBALANCE_MIN:
            return "flat"
        return "explored" if (batch * 2654435761 >> 8) & 255 < EXPLORED else ""

    def observe(self, imbalance: float, *, composed: bool) -> None:
        """The true imbalance of a full batch."""
        (self.composed if composed else self.fifo).add(imbalance)
        self.spread["composed" if composed else "fifo"].add(imbalance)

    def learned(self, r2: float, reports: int) -> None:
        """What the predictor says of itself."""
        self.r2, self.reports = r2, reports
