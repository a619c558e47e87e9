"""What is handed to the policy and what it hands back, as arrays: forecasts, candidates, choices, reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from headway.policies.experts.arrays import Loads
from headway.policies.experts.cost import Work
from headway.policies.forecast import LoadReport


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What a request is expected to ask for: `load` [layers, groups] of its `tokens` input tokens, `decode` more."""

    load: Loads
    tokens: int
    decode: float = 0.0

    @property
    def demand(self) -> Loads:
        """The load of one token."""
        demand: Loads = self.load / max(1, self.tokens)
        return demand

    @property
    def whole(self) -> Loads:
        """The prompt and what it decodes: what waits in it."""
        whole: Loads = self.load * np.float32(1.0 + self.decode / max(1, self.tokens))
        return whole


class Candidate(Protocol):
    """A waiting request, as far as it matters here. `forecast`: a Forecast, or None where nobody could make one.

    `deadline_ns`: NEVER_NS or more if it has none. `passed`: younger requests that overtook it.
    """

    @property
    def rid(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def forecast(self) -> object | None: ...

    @property
    def arrived_ns(self) -> int: ...

    @property
    def deadline_ns(self) -> int: ...

    passed: int


class Choice(NamedTuple):
    """Indices into the window, in the order they go, and why: composed, grouped, or why they stay as they came."""

    taken: list[int]
    reason: str


class Learned(NamedTuple):
    """What has been reported: of requests, how good the predictor now is (R2, of so many reports), of a step's work."""

    reports: Sequence["Observed"] = ()
    r2: float | None = None
    learned: int = 0
    work: Work | None = None
    spent_ns: int = 0


class Told(Protocol):
    """Reports as they travel: the core's event."""

    @property
    def reports(self) -> Sequence[LoadReport]: ...

    @property
    def r2(self) -> float: ...

    @property
    def learned(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def critical(self) -> int: ...

    @property
    def active(self) -> int: ...

    @property
    def spent_ns(self) -> int: ...


class Observed(NamedTuple):
    """A report: `counts` [layers, groups] of `tokens` tokens of a request: of its `prompt`, or decoded."""

    batch: int
    rid: int
    prompt: bool
    tokens: int
    counts: Loads


@dataclass(slots=True)
class Launched:
    """A batch whose truth is awaited."""

    reason: str
    worker: int
    awaited: set[int]
    full: bool
    load: Loads
    seen: int = 0
