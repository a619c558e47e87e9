"""What a request will ask of each device, learned from what others asked: a linear regression on token counts.

A request is known by its uncached prompt tokens, counted in hashed rows. Its load is predicted as
tokens x mean + counts x W, and W learns from each report by a diagonal Kalman filter: every row keeps one variance, so
that rare tokens learn fast and common ones slowly. One small aggregate for each request teaches it; it never needs to
know which token went where. Token weights so become evidence of the domain, which is why this beats the tables of
token -> expert frequencies (docs/experts.md has the numbers).

Two guards against a tenant whose load is not in its tokens: one whose surprises are larger than usual is odd, is
predicted by its own mean instead, and teaches the shared rows little; and no report may teach more than is usual. Two
against a model that changes in silence: where most reports surprise, all is learned anew on top of what is known; where
the mean predicts better than what is known (devices have changed places), that is forgotten.

Memory is bounded by MEMORY_BYTES_MAX, whatever arrives. Not safe for threads: the caller owns a lock or a thread.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.policies.experts.arrays import Floats, Loads

ROWS = 32768  # ids below this never share a row (the multiplier is odd); 8192 cost 0.005 of R2
MULTIPLIER = 2654435761  # Knuth's, of 2**32
MEMORY_BYTES_MAX = 64 << 20  # of one predictor; rows are halved until they fit
TENANTS_MAX = 4096
VARIANCE_START, VARIANCE_MIN, VARIANCE_GROWTH = 1.0, 1e-4, 5e-4
NOISE = 1.0  # observation noise for each token
MEAN_RATE_MIN = 0.005
TENANT_RATE = 0.1
TENANT_KNOWN, NEW_TENANT_WEIGHT = 8, 0.5  # so many reports until a tenant teaches the shared rows in full
ODD_FROM, ODD_FULLY = 1.3, 2.0  # a tenant's surprise over the usual: from here it is its own, and teaches less
ODD_TEACHES = 0.2  # a newcomer of another language is odd at first: with nothing it would stay so for ever
CLIP = 0.5  # most of a report's total that may go into the shared rows as surprise
STRANGE = 2.0  # a report's surprise over the usual: no more of it is learned
STRANGE_RATE = 0.02  # when more than half of about the last 50 reports are strange, the model has changed
WORSE_RATE, WORSE_MAX = 0.02, 0.4  # when so many of about the last 50 are predicted worse than by the mean, start anew
PROVEN = 0.5  # R2 that was reached before: what never predicted anything does not end being worth anything
USUAL_RATE = 0.02
SETTLED = 20  # reports before tenants are told apart and quality is measured
QUALITY_RATE = 0.02


class Prompt(NamedTuple):
    """A prompt as a predictor with `space` rows knows it: distinct `rows`, how often each (`counts`), and their sum."""

    rows: npt.NDArray[np.uint32]
    counts: Floats
    tokens: int
    space: int


def prompt_of(ids: Sequence[int] | npt.NDArray[np.integer[Any]], rows: int = ROWS) -> Prompt:
    """Count token `ids` in `rows` (a power of two) hashed rows."""
    hashed = (np.asarray(ids, np.uint64) * np.uint64(MULTIPLIER)).astype(np.uint32) & np.uint32(rows - 1)
    distinct, counts = np.unique(hashed, return_counts=True)
    return Prompt(distinct, counts.astype(np.float32), len(ids), rows)


class Tenant:
    """What is particular to a tenant: its mean load of a token, and how much larger its surprises are than usual."""

    __slots__ = ("mean", "ratio", "reports")

    def __init__(self, mean: Floats) -> None:
        self.mean = mean
        self.ratio = 1.0
        self.reports = 0

    @property
    def odd(self) -> float:
        """0: like all others; 1: its load is not in its tokens."""
        return min(1.0, max(0.0, (self.ratio - ODD_FROM) / (ODD_FULLY - ODD_FROM)))

    def observe(self, load: Floats, ratio: float) -> None:
        """One report's `load` of a token, and its surprise over the usual."""
        self.reports += 1
        rate = max(TENANT_RATE, 1.0 / (self.reports + 1))
        self.mean += rate * (load - self.mean)
        self.ratio += rate * (ratio - self.ratio)

    def forget(self) -> None:
        self.reports = 0
        self.ratio = 1.0


class Predictor:
    """Loads [layers, groups] of prompts, learned online.

    `rows`: most rows; fewer are kept if MEMORY_BYTES_MAX demands it, and `rows` then says how many.
    """

    def __init__(self, layers: int, groups: int, *, rows: int = ROWS) -> None:
        if layers < 1 or groups < 1:
            raise ValueError(f"a predictor needs layers and groups, not {layers} x {groups}")
        if rows < 1 or rows & (rows - 1):
            raise ValueError(f"rows must be a power of two, not {rows}")
        self.layers, self.groups = layers, groups
        self._width = layers * groups
        while rows > 1 and rows * (self._width + 1) * 4 > MEMORY_BYTES_MAX * 3 // 4:
            rows //= 2
        self.rows = rows
        self._tenants_max = max(16, min(TENANTS_MAX, MEMORY_BYTES_MAX // 4 // (self._width * 4)))
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()  # least recently heard first
        self.reports = 0
        self.changes = 0  # times that reports said the model had changed
        self._begin()

    def _begin(self) -> None:
        """Nothing is known."""
        self._weights = np.zeros((self.rows, self._width), np.float32)
        self._mean = np.zeros(self._width, np.float32)  # what a token asks for whatever it is
        self._demand = np.zeros(self._width, np.float32)  # what tokens asked for on average: the bar for the rest
        self._missed = self._spread = 0.0  # decayed squares: of errors, of deviations from the mean
        self._worse = 0.0  # share of the last reports that the mean had predicted better
        self._proven = False  # that predictions are worth something
        self._variance = np.full(self.rows, VARIANCE_START, np.float32)
        self.renew()

    def __repr__(self) -> str:
        return f"<Predictor {self.layers} x {self.groups}, {self.reports} reports, R2 {self.r2:.2f}>"

    @property
    def r2(self) -> float:
        """Share of the requests' deviations from the mean that was predicted one step ahead, lately; 0 at first."""
        return 1.0 - self._missed / self._spread if self._spread > 0 else 0.0

    @property
    def surprise(self) -> float:
        """|error| / load of a report before it was learned from, lately."""
        return self._usual

    @property
    def rows_used(self) -> int:
        """Rows that some token has reached."""
        return int(np.count_nonzero(self._weights.any(1)))

    @property
    def memory_bytes(self) -> int:
        """What the arrays hold, tenants' included."""
        own = self._weights.nbytes + self._variance.nbytes + self._mean.nbytes
        return own + len(self._tenants) * self._width * 4

    def prompt(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Prompt:
        """Token `ids` as this predictor knows them."""
        return prompt_of(ids, self.rows)

    def predict(self, prompt: Prompt, tenant: str = "") -> Loads:
        """The load of `prompt` [layers, groups], never negative. Raises ValueError if it was counted in other rows."""
        self._check(prompt)
        shared = prompt.counts @ self._weights[prompt.rows] + np.float32(prompt.tokens) * self._mean
        load: Loads = np.maximum(self._with_own(shared, prompt, tenant), 0.0)
        return load.reshape(self.layers, self.groups)

    def uncertainty(self, prompt: Prompt) -> float:
        """Grows with what is unknown of the prompt's tokens: variance of a token's prediction, between 0 and 1."""
        squares = float(np.square(prompt.counts) @ self._variance[prompt.rows])
        return squares / max(1, prompt.tokens) ** 2

    def learn(self, prompt: Prompt, observed: Loads, tenant: str = "") -> None:
        """A report: `prompt` had the load `observed` [layers, groups]. Raises ValueError for another shape."""
        if observed.shape != (self.layers, self.groups):
            raise ValueError(f"a report has {self.layers} x {self.groups} counts, not {observed.shape}")
        self._check(prompt)
        if not prompt.tokens:
            return
        self.reports += 1
        self._since += 1
        load = observed.reshape(-1)
        rows, counts, tokens = prompt.rows, prompt.counts, np.float32(prompt.tokens)
        weights, variance = self._weights[rows], self._variance[rows]
        shared = counts @ weights + tokens * self._mean  # what the tokens alone say
        error: Floats = load - shared
        weight = 1.0
        if self._since > SETTLED:
            self._judge(self._with_own(shared, prompt, tenant), prompt.tokens, load)
            error, weight = self._told_apart(error, load, prompt, tenant)
        rate = np.float32(max(1.0 / max(1, self._since), MEAN_RATE_MIN))
        self._mean += np.float32(weight) * rate / tokens * error
        self._demand += rate * (load / tokens - self._demand)
        spread = variance * counts
        gain = np.float32(weight / (float(spread @ counts) + NOISE * prompt.tokens)) * spread
        weights += gain[:, None] * error
        self._weights[rows] = weights
        self._variance[rows] = np.maximum(variance - gain * spread, VARIANCE_MIN) + VARIANCE_GROWTH
        if self._proven and self._worse > WORSE_MAX:
            self.changes += 1
            self._begin()

    def renew(self) -> None:
        """The model has changed (another revision, an adapter): what was learned is kept, but is learned anew."""
        self._variance[:] = VARIANCE_START
        self._strange = 0.0  # share of the last reports that were strange
        self._usual = 1.0  # |error| / load of a report, lately
        self._since = 0  # reports since the last change
        for known in self._tenants.values():
            known.forget()

    def _check(self, prompt: Prompt) -> None:
        if prompt.space != self.rows:
            raise ValueError(f"the prompt was counted in {prompt.space} rows, the predictor has {self.rows}")

    def _with_own(self, shared: Floats, prompt: Prompt, tenant: str) -> Floats:
        """What the tokens say; of a tenant that is odd, what is usual for itself."""
        known = self._tenants.get(tenant)
        if known is None or not known.odd:
            return shared
        return (1.0 - known.odd) * shared + np.float32(prompt.tokens * known.odd) * known.mean

    def _told_apart(self, error: Floats, load: Floats, prompt: Prompt, tenant: str) -> tuple[Floats, float]:
        """What of an error the shared rows may learn, and with which weight: less of a tenant that is odd, or new."""
        total = max(float(np.abs(load).sum()), 1e-9)
        surprise = float(np.abs(error).sum()) / total
        known = self._tenants.pop(tenant, None) or Tenant(np.array(self._demand))
        self._tenants[tenant] = known
        while len(self._tenants) > self._tenants_max:
            self._tenants.popitem(last=False)
        weight = max(ODD_TEACHES, 1.0 - known.odd) * (1.0 if known.reports >= TENANT_KNOWN else NEW_TENANT_WEIGHT)
        known.observe(load / np.float32(prompt.tokens), surprise / self._usual)
        limit = min(CLIP, STRANGE * self._usual)
        if surprise > limit:
            error = error * np.float32(limit / surprise)
        self._expect(surprise)
        return error, weight

    def _expect(self, surprise: float) -> None:
        """Follow the usual surprise; when most reports are strange, it is the model that has changed."""
        strange = surprise > STRANGE * self._usual
        self._strange += STRANGE_RATE * (strange - self._strange)
        rate = max(USUAL_RATE, 1.0 / (self._since - SETTLED))
        self._usual += rate * (min(surprise, STRANGE * self._usual) - self._usual)
        if self._strange > 0.5:
            self.changes += 1
            self.renew()

    def _judge(self, raw: Floats, tokens: int, load: Floats) -> None:
        """How good was the prediction of this report, before it is learned from, against that of the mean?"""
        error, deviation = np.maximum(raw, 0.0) - load, np.float32(tokens) * self._demand - load
        kept = 1.0 - QUALITY_RATE
        missed, spread = float(error @ error), float(deviation @ deviation)
        self._missed = kept * self._missed + missed
        self._spread = kept * self._spread + spread
        self._worse += WORSE_RATE * ((missed > spread) - self._worse)
        self._proven = self._proven or (self._since > 2 * SETTLED and self.r2 >= PROVEN)
