"""What a batch costs: time = a + b x tokens + m x requests, learned from the workers' reports. Never below zero.

Weighted least squares on exponentially forgotten sums, one model for each served model and kind. A report weighs one
over its predicted time squared: a batch of ten times the length errs by ten times as much, and must not drown the
others.

- **Never negative.** Non-negative least squares: if a coefficient would come out below zero it is held at zero and the
  others are fitted again (for three of them, all subsets can be tried, which is exact). Clipping only what is reported
  would leave the others wrong.
- **a is underestimated rather than over.** A window that believes in a fixed cost that is not there waits for nothing;
  one that believes in half of it is nearly as good. So a is taken half a standard error lower, and the others are
  fitted again around it. Where a cannot be told from the rest (all batches alike), its error is large and it goes to
  zero; the prediction for such batches stays right, and a ridge of one millionth keeps all of it finite.
- **Robust.** A report further than a few typical errors from the prediction (a straggler, a compilation, a first run)
  counts as if it were at that distance. The first report of a service is not looked at, and the next seven weigh by
  their own time, so that a long one says little.
- **Change.** The sums count half after about 1 400 reports: little noise, but a slow mind. So the signed errors are
  averaged over 16 reports; if they agree in sign by more than chance explains, the cost has changed, and all that was
  known counts as little as 8 reports from then on.

A prior, the worker's own guess of (a, b, m), enters as four made-up reports, and is forgotten like all others.

Source: Ljung, System Identification (forgetting); Huber's clipping; Lawson and Hanson, Solving Least Squares Problems
(non-negative); Page's cumulated sums for the change.
"""

from math import sqrt

from headway.policies.views import Cost

SEEN_MIN = 8  # reports before the estimate is trusted
WARM_UP = 1  # first reports of a service that are not looked at: allocation, caches, lazy initialisation
FORGET = 0.9995
CLIP = 4.0  # times the typical error
CLIP_MIN = 0.05  # a report is never clipped nearer than this share of the prediction
ALIKE = 1.0 / 16  # the average of signed errors goes back over so many reports
CHANGED = 1.5  # that average in typical errors: about six deviations of chance
OPEN = 16  # reports after a change that are hardly clipped, so that it is seen whole
KEPT_AFTER_CHANGE = 8.0  # reports that what was known still counts
RIDGE = 1e-6
BELOW = 0.5 * 1.25  # half a standard error; one is 1.25 mean errors
FLOOR_MS = 1e-3  # no report is taken for shorter, when it is weighed
EACH, EACH_UNTIL = 4, 64  # solved at each report until so many were seen, then at each fourth
PRIOR_POINTS = ((1, 16), (1, 256), (8, 128), (8, 2048))  # requests, tokens

Sums = tuple[float, float, float]


class CostModel:
    """One learned (a, b, m), nanoseconds. `cost` has a taken low, for windows; `central` is the fit as it comes out,
    for what would err as much by too little as by too much. `changes`: how often the cost was found to have changed."""

    __slots__ = ("_drift", "_gram", "_known_by", "_moment", "_open", "_typical", "central", "changes", "cost", "seen")

    def __init__(self, prior_ns: tuple[float, ...] = ()) -> None:
        guess = tuple(max(0.0, value) for value in prior_ns) if len(prior_ns) == 3 else (0.0, 0.0, 0.0)
        self.cost = Cost(guess[0], guess[1], guess[2], known=False)
        self.central = self.cost
        self._gram = [0.0] * 6  # of (1, tokens, requests): aa, ab, am, bb, bm, mm
        self._moment = [0.0] * 3
        self._known_by = 0.0  # reports that the sums stand for
        self._typical = 0.0  # mean size of an error, as a share of the prediction
        self._drift = 0.0
        self._open = 0
        self.seen = 0
        self.changes = 0
        if any(guess):
            for requests, tokens in PRIOR_POINTS:
                took_ms = self.cost.batch_ns(requests, tokens) / 1e6
                self._add(requests, tokens, took_ms, max(took_ms, FLOOR_MS))

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
        took_ms = took_ns / 1e6
        if self.seen <= SEEN_MIN:
            self._add(requests, tokens, took_ms, max(took_ms, FLOOR_MS))
            self._solve()
            expected_ms = max(self.cost.batch_ns(requests, tokens) / 1e6, FLOOR_MS)
            self._typical += (min(1.0, abs(took_ms / expected_ms - 1.0)) - self._typical) / (self.seen - WARM_UP)
            return
        expected_ms = max(self.cost.batch_ns(requests, tokens) / 1e6, FLOOR_MS)
        error = self._clipped((took_ms - expected_ms) / expected_ms)
        self._add(requests, tokens, expected_ms * (1.0 + error), expected_ms)
        if self.seen < EACH_UNTIL or self._open or not self.seen % EACH:
            self._solve()

    def _add(self, requests: int, tokens: int, took_ms: float, scale_ms: float) -> None:
        one, t, n = 1.0 / scale_ms, tokens / scale_ms, requests / scale_ms
        y = took_ms / scale_ms
        g, v = self._gram, self._moment
        self._gram = [
            FORGET * g[0] + one * one,
            FORGET * g[1] + one * t,
            FORGET * g[2] + one * n,
            FORGET * g[3] + t * t,
            FORGET * g[4] + t * n,
            FORGET * g[5] + n * n,
        ]
        self._moment = [FORGET * v[0] + one * y, FORGET * v[1] + t * y, FORGET * v[2] + n * y]
        self._known_by = FORGET * self._known_by + 1.0

    def _clipped(self, error: float) -> float:
        """The error, at most a few typical ones; notices when errors lean to one side."""
        typical = self._typical
        if self._open:
            self._open -= 1
            return max(-1.0, min(10.0, error))
        limit = max(CLIP * typical, CLIP_MIN)
        clipped = max(-limit, min(limit, error))
        unit = max(typical, CLIP_MIN / CLIP)
        self._drift += ALIKE * (clipped / unit - self._drift)
        if abs(self._drift) > CHANGED:
            self._changed()
            return max(-1.0, min(10.0, error))
        self._typical += 0.02 * (abs(clipped) - typical)
        return clipped

    def _changed(self) -> None:
        keep = min(1.0, KEPT_AFTER_CHANGE / self._known_by)
        self._gram = [keep * value for value in self._gram]
        self._moment = [keep * value for value in self._moment]
        self._known_by *= keep
        self._drift = 0.0
        self._open = OPEN
        self.changes += 1

    def _solve(self) -> None:
        """From the sums to the cost."""
        aa, ab, am, bb, bm, mm = self._gram
        # scaled to a correlation matrix, so that one ridge fits all units
        da, db, dm = sqrt(aa) or 1.0, sqrt(bb) or 1.0, sqrt(mm) or 1.0
        p, q, r = ab / (da * db), am / (da * dm), bm / (db * dm)
        va, vb, vm = self._moment[0] / da, self._moment[1] / db, self._moment[2] / dm
        x, y, z = _non_negative(p, q, r, (va, vb, vm))
        known = self.seen >= SEEN_MIN
        self.central = Cost(x / da * 1e6, y / db * 1e6, z / dm * 1e6, known)
        if x > 0.0:
            x = max(0.0, x - BELOW * self._typical * sqrt(_inverse_corner(p, q, r)))
            y, z = _non_negative_pair(r, vb - p * x, vm - q * x)
        self.cost = Cost(x / da * 1e6, y / db * 1e6, z / dm * 1e6, known)


K = 1.0 + RIDGE  # the diagonal


def _determinant(p: float, q: float, r: float) -> float:
    return max(K * (K * K - r * r) - p * (p * K - q * r) + q * (p * r - K * q), RIDGE**2)


def _inverse_corner(p: float, q: float, r: float) -> float:
    """The first diagonal element of the inverse of [[K, p, q], [p, K, r], [q, r, K]]: the variance of a."""
    return max(0.0, K * K - r * r) / _determinant(p, q, r)


def _non_negative(p: float, q: float, r: float, v: Sums) -> Sums:
    """The non-negative least squares of three: as they come out, or the best of those with one held at zero."""
    va, vb, vm = v
    d = _determinant(p, q, r)
    x = ((K * K - r * r) * va + (q * r - p * K) * vb + (p * r - q * K) * vm) / d
    y = ((q * r - p * K) * va + (K * K - q * q) * vb + (p * q - K * r) * vm) / d
    z = ((p * r - q * K) * va + (p * q - K * r) * vb + (K * K - p * p) * vm) / d
    if x >= 0.0 and y >= 0.0 and z >= 0.0:
        return x, y, z
    fits: list[tuple[float, Sums]] = []
    y, z = _non_negative_pair(r, vb, vm)
    fits.append((y * vb + z * vm, (0.0, y, z)))
    x, z = _non_negative_pair(q, va, vm)
    fits.append((x * va + z * vm, (x, 0.0, z)))
    x, y = _non_negative_pair(p, va, vb)
    fits.append((x * va + y * vb, (x, y, 0.0)))
    return max(fits)[1]


def _non_negative_pair(p: float, va: float, vb: float) -> tuple[float, float]:
    """The same of two. If both would be negative, both are zero."""
    d = K * K - p * p
    x, y = (K * va - p * vb) / d, (K * vb - p * va) / d
    if x >= 0.0 and y >= 0.0:
        return x, y
    alone_x, alone_y = max(0.0, va) / K, max(0.0, vb) / K
    return (alone_x, 0.0) if alone_x * va >= alone_y * vb else (0.0, alone_y)
