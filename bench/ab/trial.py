"""A trial of B on live traffic: who goes where, what came of it, and when it is over. Pure: no socket, no clock.

A request goes to B by a draw of its own, `share` of them, until the trial is decided. It is rolled back as soon as B is
known to be slower (the sequential test) or has failed more often than chance allows; from then on all go to A. What
fails or is not answered in time counts as if it had taken `limit_ms`. B known to be faster ends the trial, too, but
moves nothing: that is for a person to do.
"""

import random
from math import log
from typing import Literal

from headway.bench.ab.sequential import Effect

Arm = Literal["a", "b"]
ROLLED_BACK, FASTER, UNDECIDED = "rolled back", "B is faster", "undecided"


class Trial:
    """`slower_max`: B may be slower by this factor. `requests_max`: undecided by then, all go back to A."""

    def __init__(
        self,
        *,
        share: float = 0.1,
        slower_max: float = 1.0,
        limit_ms: float = 60_000.0,
        requests_max: int = 100_000,
        alpha: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.share, self.limit_ms, self.requests_max = share, limit_ms, requests_max
        self._slower_max = slower_max
        self._rng = random.Random(f"trial {seed}")
        # Two questions, each with half of alpha: is it slower, does it fail more.
        self.time, self.failures = Effect(share, alpha / 2), Effect(share, alpha / 2)
        self.counts = {"a": 0, "b": 0}
        self.failed = {"a": 0, "b": 0}
        self.verdict = ""

    def __repr__(self) -> str:
        return f"<Trial {self.verdict or 'running'}: {self.words()}>"

    @property
    def over(self) -> bool:
        """Whether nothing more goes to B."""
        return bool(self.verdict)

    def arm(self) -> Arm:
        """Where the next request goes."""
        return "b" if not self.over and self._rng.random() < self.share else "a"

    def observe(self, arm: Arm, took_ms: float, ok: bool) -> None:
        """How a request ended that came while the trial ran; later ones are not looked at."""
        if self.over:
            return
        self.counts[arm] += 1
        self.failed[arm] += not ok
        in_b = arm == "b"
        self.time.observe(in_b, log(max(0.01, took_ms if ok else self.limit_ms)))
        self.failures.observe(in_b, 0.0 if ok else 1.0)
        self.verdict = self._judged()

    def _judged(self) -> str:
        times, failures = self.time.interval, self.failures.interval
        if times is None or failures is None:
            return ""
        if times[0] > log(self._slower_max) or failures[0] > 0.0:
            return ROLLED_BACK
        if times[1] < 0.0 and failures[1] <= 0.0:
            return FASTER
        return UNDECIDED if self.time.count >= self.requests_max else ""

    def words(self) -> str:
        """All of it in one line."""
        a, b = (f"{self.counts[arm]} requests to {arm.upper()} ({self.failed[arm]} failed)" for arm in ("a", "b"))
        text = f"{a}, {b}"
        ratio = self.time.ratio
        if ratio is None:
            return f"{text}; too few to say anything"
        return f"{text}; time of B / A {ratio[0]:.3f}, surely between {ratio[1]:.3f} and {ratio[2]:.3f}"
