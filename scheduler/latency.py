"""What a batch costs: time = a + b x tokens + m x requests, learned from the workers' reports.

Recursive least squares with forgetting, one model for each served model and kind. Robust by clipping: a report further
than a few typical errors from the prediction (a straggler, a compilation, a first run) moves the estimate only as far
as the clip. Never negative: what comes out below zero is reported as zero. Until `SEEN_MIN` reports the worker's own
prior stands, and `known` is false.

Source: Ljung, System Identification (recursive least squares with exponential forgetting); Huber's clipping.
"""

from headway.policies.views import Cost

SEEN_MIN = 8  # reports before the estimate is trusted
FORGET = 0.995  # a report counts half after about 140 more
CLIP = 4.0  # times the typical error
WARM_UP = 1  # first reports of a service that are not looked at: allocation, caches, lazy initialisation
SCALE = (1.0, 1e-3, 1e-1)  # features are scaled to about 1, so that one prior variance fits all
VARIANCE = 1e4
VARIANCE_MAX = 1e6  # forgetting without news must not let the filter explode


class CostModel:
    """One learned (a, b, m), nanoseconds."""

    __slots__ = ("_error_ms", "_p", "_w", "cost", "seen")

    def __init__(self, prior_ns: tuple[float, ...] = ()) -> None:
        guess = tuple(max(0.0, value) for value in prior_ns) if len(prior_ns) == 3 else (0.0, 0.0, 0.0)
        self.cost = Cost(guess[0], guess[1], guess[2], known=False)
        self._w = [guess[i] / 1e6 / SCALE[i] for i in range(3)]
        self._p = [[VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._error_ms = 0.0
        self.seen = 0

    def __repr__(self) -> str:
        a, b, m, known = self.cost
        state = "" if known else ", not yet known"
        return f"<CostModel {a / 1e6:.3f} ms + {b / 1e6:.4f} x tokens + {m / 1e6:.4f} x requests{state}>"

    def observe(self, requests: int, tokens: int, took_ns: int) -> None:
        """A batch of `requests` with `tokens` tokens took `took_ns` in the engine."""
        if took_ns <= 0:  # nothing was computed
            return
        self.seen += 1
        if self.seen <= WARM_UP:
            return
        x = (1.0, tokens * SCALE[1], requests * SCALE[2])
        w, p = self._w, self._p
        error = took_ns / 1e6 - (w[0] * x[0] + w[1] * x[1] + w[2] * x[2])
        error = self._clipped(error)
        px = [row[0] * x[0] + row[1] * x[1] + row[2] * x[2] for row in p]
        gain = 1.0 / (FORGET + x[0] * px[0] + x[1] * px[1] + x[2] * px[2])
        for i in range(3):
            w[i] += px[i] * gain * error
        for i in range(3):
            for j in range(3):
                p[i][j] = (p[i][j] - px[i] * px[j] * gain) / FORGET
        if max(p[0][0], p[1][1], p[2][2]) > VARIANCE_MAX:
            self._p = [[VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]
        a, b, m = (max(0.0, w[i]) * 1e6 * SCALE[i] for i in range(3))
        self.cost = Cost(a, b, m, known=self.seen >= SEEN_MIN)

    def _clipped(self, error_ms: float) -> float:
        size = abs(error_ms)
        if self.seen <= SEEN_MIN:
            self._error_ms = max(self._error_ms, size) if self.seen < 4 else 0.7 * self._error_ms + 0.3 * size
            return error_ms
        limit = CLIP * self._error_ms + 1e-3
        self._error_ms += 0.05 * (min(size, limit) - self._error_ms)
        return max(-limit, min(limit, error_ms))
