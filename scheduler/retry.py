"""Whether and when to try again: a pure decision, made from the error, the count, and the caller's own time left.

Only errors that say `retryable` are tried again, after a capped exponential back-off with full jitter, never sooner
than the server's `retry_after_ms`, and never past the caller's deadline: a retry nobody waits for is load for nothing.
"""

import random
from dataclasses import dataclass, field

from headway.scheduler.errors import HeadwayError

RETRIES_MAX = 4  # with the default back-off about 1.5 s of patience
BASE_MS = 100
CAP_MS = 5_000


@dataclass(slots=True)
class Retry:
    """`retries_max` bounds the tries of a call without a deadline; 0 means never to try again, deadline or not."""

    retries_max: int = RETRIES_MAX
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        if self.retries_max < 0:
            raise ValueError(f"max_retries is {self.retries_max}; it must be 0 or more")

    def delay_ms(self, error: HeadwayError, tries: int, left_ms: float | None) -> float | None:
        """How long to wait before try number `tries` + 1; None: give up and raise `error`.

        `tries`: how many were made. `left_ms`: until the caller's deadline, or None if there is none.
        """
        if not error.retryable or self.retries_max == 0:
            return None
        if left_ms is None and tries > self.retries_max:
            return None
        ceiling = min(CAP_MS, BASE_MS * 2 ** min(tries - 1, 16))
        delay = (error.retry_after_ms or 0) + self.rng.uniform(0, ceiling)
        return None if left_ms is not None and delay >= left_ms else delay
