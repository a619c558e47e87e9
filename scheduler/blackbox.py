"""The flight recorder: every (time, event) that the core was given, and what it decided then.

The core reads no clock and no socket, so this is all there is to know: given again to a core of the same policies, it
decides the same; given to another policy or another version, it shows where they part. A file is a plain msgpack
stream, a header and then a step each:

    {"v": 1, "headway": "0.1.0", "policy": {...}, "models": [...], "lost_after_ms": 5000, "stuck_after_ms": 300000}
    [now_ns, {"type": "Submit", "rid": 1, ...}, [{"type": "Dispatch", ...}, ...]]

A server that is started again adds another header. Ids, sizes, times and tenants are in it, contents never.
`bench/replay/rerun.py` runs it again.
"""

from typing import Any

from msgspec import Struct

from headway import __version__
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.spec import ModelSpec, ServerSpec
from headway.scheduler.tape import Tape

VERSION = 1


class Header(Struct, frozen=True):
    """What the core was made with. `policy`, `models`: as in a settings file."""

    v: int
    headway: str
    policy: dict[str, Any]
    models: list[dict[str, Any]]
    lost_after_ms: int
    stuck_after_ms: int


class Step(Struct, frozen=True, array_like=True):
    """One call of `Core.step`, and what it returned."""

    now_ns: int
    event: ev.Event
    actions: list[act.Action]


class BlackBox:
    """Writes the steps of one core down."""

    def __init__(self, path: str, spec: ServerSpec) -> None:
        self.tape = Tape(path)
        self.tape.put(
            Header(
                VERSION,
                __version__,
                spec.policy.model_dump(mode="json"),
                [_entry(model) for model in spec.models],
                spec.lost_after_ms,
                spec.stuck_after_ms,
            )
        )

    def __repr__(self) -> str:
        return f"<BlackBox {self.tape!r}>"

    def note(self, event: ev.Event, now_ns: int, actions: list[act.Action]) -> None:
        """One step."""
        self.tape.put(Step(now_ns, event, actions))


def _entry(model: ModelSpec) -> dict[str, Any]:
    """A model without the options of its factory, which may be anybody's secrets; echo's say what it serves."""
    return model.model_dump(mode="json", exclude=None if model.engine == "echo" else {"options"})
