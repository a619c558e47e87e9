"""What a policy may see, and what it may say. Nothing here can be changed by a policy, nothing here reads a clock.

The core fills these from its own books before it asks. A policy of your own is any callable of the same shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

from headway.policies.forecast import ExpertFacts
from headway.policies.intervals import Intervals


class Cost(NamedTuple):
    """Learned cost of one batch (one step, in iteration mode): time = a + b x tokens + m x requests, nanoseconds.

    `known` is false until enough batches have been seen; the numbers are then only a prior, or zero.
    """

    a_ns: float = 0.0
    b_ns: float = 0.0
    m_ns: float = 0.0
    known: bool = False

    def batch_ns(self, requests: int, tokens: int) -> float:
        """Predicted time of one batch."""
        return self.a_ns + self.b_ns * tokens + self.m_ns * requests


class LaneView(NamedTuple):
    """A lane with at least one request waiting, at a moment when an idle worker could take a batch from it."""

    waiting: int
    oldest_arrival_ns: int
    last_arrival_ns: int
    arrivals_sum_ns: int  # waiting x now less this is how long all of them together have waited
    tightest_deadline_ns: int | None
    max_batch: int
    other_idle: bool  # another worker that could serve this lane is idle too
    cost: Cost
    intervals: Intervals


class Launch(NamedTuple):
    """Close a batch now, with at most `most` requests; 0: as many as the worker takes.

    `reason` is one of a few fixed words: each becomes a counter, `launched.<reason>`.
    """

    reason: str
    most: int = 0


class Wait(NamedTuple):
    """Leave the batch open until `until_ns`, which lies after now, or until the next event."""

    until_ns: int
    reason: str


class Window(Protocol):
    """Launch now, or wait? Asked only when a worker is idle: a batch is never closed earlier (late binding), and what
    arrives while an iteration-level engine runs joins it at its next step.

    It may have a method `observe(requests: int, compute_ns: int)`, which is told of each batch of short inputs that ran
    to its end on a one-shot engine. Answer and state follow from the arguments alone.
    """

    def __call__(self, view: LaneView, now_ns: int) -> Launch | Wait: ...


class WindowChoice(NamedTuple):
    """A window, what people call it, and its bound: the core never waits longer from the oldest arrival."""

    name: str
    window: Window
    bound_ns: int
    kappa: float = 1.0

    def longest_ns(self, cost: Cost) -> float:
        """C: the longest wait that can pay, kappa x the fixed cost of a batch. A longer interval is an idle gap."""
        return min(self.bound_ns, self.kappa * cost.a_ns)


class WindowOf(Protocol):
    """Which window? Asked once for each model and kind, so that what a window learns stays apart."""

    def __call__(self, model: str, kind: str) -> WindowChoice: ...


class Arrival(Protocol):
    """A request at the door. The core hands in its own Submit event; only this much of it is a policy's to see."""

    @property
    def tokens(self) -> int: ...

    @property
    def max_new(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def deadline_ns(self) -> int | None: ...

    @property
    def tenant(self) -> str: ...


class DoorView(Protocol):
    """What waits already, and how fast it goes. `workers`: how many serve it; `max_batch`: the largest of theirs.

    Of iteration-level engines also: `rows_max`, the requests that may run at once (0 for others), how many run, how
    many tokens an answer has on average, and how many three of four answers have at least (0 while unknown).
    """

    @property
    def waiting(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    @property
    def workers(self) -> int: ...

    @property
    def max_batch(self) -> int: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def rows_max(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def answer_mean(self) -> float: ...

    @property
    def answer_least(self) -> float: ...


class Refusal(NamedTuple):
    """Not admitted: an error code, a sentence, when trying again makes sense, and in one word why, to be counted."""

    code: str
    message: str
    retry_after_ms: int | None = None
    reason: str = "policy"


class Admit(Protocol):
    """May this request in?"""

    def __call__(self, arrival: Arrival, door: DoorView, now_ns: int) -> Refusal | None: ...


class Order(Protocol):
    """Which next? The lowest key; equal keys go in order of arrival. Asked once, when the request is queued."""

    def __call__(self, arrival: Arrival, arrived_ns: int) -> int: ...


class Seat(NamedTuple):
    """A worker that could take the batch."""

    worker: int
    running: int  # requests on it
    failures: int  # batches that failed on it in a row
    last_used: int  # a counter: lower was used longer ago


class Placed(NamedTuple):
    """The chosen seat by its place in the list, and why it is this one."""

    seat: int
    reason: str


class Place(Protocol):
    """Where? `seats` is never empty."""

    def __call__(self, seats: list[Seat], cost: Cost) -> Placed: ...


class BatchView(NamedTuple):
    """A one-shot batch about to be closed. `most`: what the worker takes; `turnaround_ns`: what a batch costs beyond
    its computing; `arrivals_per_ns`: the rate of the lane, 0 while unknown."""

    waiting: int
    mean_tokens: float
    most: int
    workers: int
    arrivals_per_ns: float
    turnaround_ns: float
    cost: Cost


class Size(Protocol):
    """How many? At least 1, and no more than `most` or `waiting`."""

    def __call__(self, view: BatchView) -> int: ...


BYPASS_AUTO = -1  # bypass_tokens: where batching stops to pay, by the learned cost
BYPASS_TOKENS = 1024  # and while that is not known
BYPASS_TIMES = 4.0  # an input whose own time is 4 times the fixed cost of a batch gains under a fifth by company


@dataclass(frozen=True, slots=True)
class Policies:
    """One answer to each of the five questions, and the limits that are numbers."""

    admit: Admit
    order: Order
    window_of: WindowOf
    place: Place
    size: Size
    bypass_tokens: int = BYPASS_TOKENS
    batch_tokens_max: int = 0  # input tokens of one batch, padding included; 0: no limit
    experts: Callable[[ExpertFacts], Any] | None = None  # makes an ExpertAware; None: experts are not looked at
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    long_concurrency: int = 0  # 0: half of the workers, at least one
    in_flight_fraction: float = 0.7
    poison_after: int = 2

    def bypass(self, cost: Cost) -> float:
        """Inputs longer than this go in the long lane."""
        if self.bypass_tokens != BYPASS_AUTO:
            return self.bypass_tokens
        if not cost.known:
            return BYPASS_TOKENS
        return BYPASS_TIMES * cost.a_ns / cost.b_ns if cost.b_ns > 0 else inf

    def in_flight_max(self, max_num_seqs: int) -> int:
        """How many of the requests that a generating worker could hold it gets, and clients are told to keep to."""
        return max(1, int(self.in_flight_fraction * max_num_seqs))
