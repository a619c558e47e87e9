"""The last 128 intervals between arrivals of one lane: what the window rule looks at.

Kept twice, in order of time (to forget the oldest) and in order of size (to read quantiles), so that an observation
costs a bisection in 128 numbers and a quantile costs nothing. Intervals are kept whole; which of them count as idle
gaps is decided by the reader, because the limit moves with the learned cost.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque

KEPT = 128  # insensitive between 32 and 1024 in simulation; fewer forget a change of load faster


class Intervals:
    """Inter-arrival intervals in nanoseconds. Never negative: a clock that steps back counts as no time."""

    __slots__ = ("_by_size", "_by_time", "_last_ns", "total_ns")

    def __init__(self) -> None:
        self._by_time: deque[int] = deque()
        self._by_size: list[int] = []
        self._last_ns: int | None = None
        self.total_ns = 0

    def __len__(self) -> int:
        return len(self._by_size)

    def __repr__(self) -> str:
        p95 = self.p95_ns(None)
        return f"<Intervals {len(self)} kept, p95 {'none' if p95 is None else f'{p95 / 1e6:.3f} ms'}>"

    def observe(self, now_ns: int) -> None:
        """An arrival at `now_ns`."""
        last, self._last_ns = self._last_ns, now_ns
        if last is None:
            return
        gap = max(0, now_ns - last)
        if len(self._by_time) == KEPT:
            old = self._by_time.popleft()
            del self._by_size[bisect_left(self._by_size, old)]
            self.total_ns -= old
        self._by_time.append(gap)
        insort(self._by_size, gap)
        self.total_ns += gap

    def count_upto(self, limit_ns: float) -> int:
        """How many intervals are at most `limit_ns`."""
        return bisect_right(self._by_size, limit_ns)

    def sum_upto(self, limit_ns: float) -> int:
        """Sum of the intervals that are at most `limit_ns`."""
        return sum(self._by_size[: self.count_upto(limit_ns)])

    def above(self, limit_ns: float) -> list[int]:
        """The intervals longer than `limit_ns`, shortest first."""
        return self._by_size[self.count_upto(limit_ns) :]

    def p95_ns(self, limit_ns: float | None) -> int | None:
        """95th percentile (nearest rank) of the intervals up to `limit_ns`; None where there is none."""
        count = len(self._by_size) if limit_ns is None else self.count_upto(limit_ns)
        return self._by_size[(95 * count + 99) // 100 - 1] if count else None
