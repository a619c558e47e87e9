"""Everything the core can ask of its shell. The shell performs them in order, after `step` has returned."""

from msgspec import Struct


class Dispatch(Struct, frozen=True, tag=True, gc=False, repr_omit_defaults=True):
    """Send these requests to the worker as one batch. `reason`: why now; `placed`: why there; `waited_ns`: how long the
    oldest of the lane waited; `composed`: why these (experts' load), or why as they came; empty without experts."""

    worker: int
    batch: int
    rids: tuple[int, ...]
    model: str
    kind: str
    lane: str
    reason: str
    placed: str
    waited_ns: int
    running: int  # requests on the worker, these included
    composed: str = ""


class Forward(Struct, frozen=True, tag=True, gc=False):
    """The new tokens that the step just reported for these (batch, rid) are current: pass them on."""

    rows: tuple[tuple[int, int], ...]


class Drop(Struct, frozen=True, tag=True, gc=False):
    """Tell the worker to stop working on these requests of this batch."""

    worker: int
    batch: int
    rids: tuple[int, ...]


class Hold(Struct, frozen=True, tag=True, gc=False):
    """Nothing to be done: the first of a lane is not running, for a reason, until this time (None: until something
    happens). Said when the waiting begins and when its reason changes."""

    model: str
    kind: str
    lane: str
    reason: str
    until_ns: int | None


class Refuse(Struct, frozen=True, tag=True, gc=False):
    """The request was not taken in, for the reason. Its one ending."""

    rid: int
    code: str
    message: str
    retry_after_ms: int | None = None
    reason: str = ""


class End(Struct, frozen=True, tag=True, gc=False):
    """The request's one ending: good (`code` empty; `finish` for generation) or bad. `batch`: where it ran, or 0."""

    rid: int
    batch: int = 0
    code: str = ""
    message: str = ""
    finish: str = ""
    retry_after_ms: int | None = None


class Restart(Struct, frozen=True, tag=True, gc=False):
    """The core has given this worker up (silent, or stuck): end the process if it is ours, and start another."""

    worker: int
    reason: str


class Drained(Struct, frozen=True, tag=True, gc=False):
    """Draining, and nothing is left to do."""


Action = Dispatch | Hold | Forward | Drop | Refuse | End | Restart | Drained
