"""Everything that can happen to the core. Ids, sizes, deadlines and outcomes; never a payload byte.

`rid` is a request's number, `worker` a worker process's, `batch` a batch's: all given once and never used again, so
that whatever arrives late can be told from what is current.
"""

from msgspec import Struct

from headway.policies.forecast import ExpertFacts, LoadForecast, LoadReport


class Submit(Struct, frozen=True, tag=True, gc=False):
    """A request is at the door. With this event it is the core's; the core owes it exactly one Refuse or End.

    `tokens`: input length. `max_new`: most output tokens. `deadline_ns`: on the clock of `now_ns`. `forecast`: what it
    will ask of the devices of a mixture of experts; the core only hands it on.
    """

    rid: int
    client: int
    model: str
    kind: str
    tokens: int
    max_new: int = 0
    deadline_ns: int | None = None
    priority: int = 0
    tenant: str = ""
    forecast: LoadForecast | None = None


class Cancel(Struct, frozen=True, tag=True, gc=False):
    """Somebody wants the request ended: its client (cancelled), or the shell (slow_reader)."""

    rid: int
    code: str = "cancelled"
    message: str = "cancelled by the client"


class ClientGone(Struct, frozen=True, tag=True, gc=False):
    """A client's connection is gone: its work is pointless."""

    client: int


class Satisfied(Struct, frozen=True, tag=True, gc=False):
    """The shell found the answer complete (a stop string): a good ending before the engine's own."""

    rid: int


class WorkerReady(Struct, frozen=True, tag=True, gc=False, repr_omit_defaults=True):
    """A worker registered. `prior_ns`: its own guess of (a, b, m), or empty. `padded`: its batches are padded to their
    longest input. `kv_tokens`: what its cache holds (0: no cache, or not said). `experts`: how its service is
    to be scheduled by the load of experts; None where no tokens are routed."""

    worker: int
    name: str
    model: str
    kind: str
    iteration: bool
    max_batch: int
    max_num_seqs: int
    prior_ns: tuple[float, ...] = ()
    padded: bool = False
    kv_tokens: int = 0
    experts: ExpertFacts | None = None


class Beat(Struct, frozen=True, tag=True, gc=False):
    """A worker is alive; `progress` grows while it works."""

    worker: int
    progress: int
    busy: bool


class BatchDone(Struct, frozen=True, tag=True, gc=False):
    """A one-shot batch ended. `failed`: (rid, code, message) of those that ended badly; all others ended well."""

    worker: int
    batch: int
    compute_ns: int
    tokens: int
    failed: tuple[tuple[int, str, str], ...] = ()


class BatchFailed(Struct, frozen=True, tag=True, gc=False):
    """A batch, or the named part of it, failed together and the culprit is not known."""

    worker: int
    batch: int
    code: str
    message: str
    rids: tuple[int, ...] = ()


class RowDone(Struct, frozen=True, gc=False):
    """One request in one step: `new` tokens, and its ending if it has one ("", stop, length, dropped, error)."""

    batch: int
    rid: int
    new: int
    finish: str = ""
    code: str = ""
    message: str = ""


class StepDone(Struct, frozen=True, tag=True, gc=False, repr_omit_defaults=True):
    """A step of an iteration-level engine. `tokens`: computed in it; `running`: requests in it; `kv_used` of `kv_total`
    tokens of its cache are taken (0 of 0: it has none)."""

    worker: int
    compute_ns: int
    tokens: int
    running: int
    rows: tuple[RowDone, ...]
    kv_used: int = 0
    kv_total: int = 0


class Routed(Struct, frozen=True, tag=True, gc=False):
    """A worker has said where tokens went, and what a step of so many `tokens` took: `critical` of them on the hottest
    devices, `active` experts used, both summed over layers. `r2`, `learned`: how good forecasts now are, and from how
    many reports."""

    model: str
    kind: str
    reports: tuple[LoadReport, ...] = ()
    r2: float = 0.0
    learned: int = 0
    tokens: int = 0
    critical: int = 0
    active: int = 0
    spent_ns: int = 0


class WorkerLost(Struct, frozen=True, tag=True, gc=False):
    """A worker process ended or cannot be reached. `orderly`: it left as it should, so nobody is to blame."""

    worker: int
    reason: str
    orderly: bool = False


class ServiceDown(Struct, frozen=True, tag=True, gc=False):
    """No worker will come for this model and kind any more: whoever waits for one must be told."""

    model: str
    kind: str
    reason: str


class Drain(Struct, frozen=True, tag=True, gc=False):
    """Take no new work; what is here may finish until `deadline_ns`."""

    deadline_ns: int


class Tick(Struct, frozen=True, tag=True, gc=False):
    """Only time has passed."""


class Together(Struct, frozen=True, tag=True):
    """Things noticed at one time: all are taken in first, then it is decided once. So a burst becomes one batch."""

    events: list["Event"]


Event = (
    Submit
    | Cancel
    | ClientGone
    | Satisfied
    | WorkerReady
    | Beat
    | BatchDone
    | BatchFailed
    | StepDone
    | Routed
    | WorkerLost
    | ServiceDown
    | Drain
    | Tick
    | Together
)
