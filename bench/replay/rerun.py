"""A flight record run again: the same events at the same times, to a core with other policies or of another version.

As long as both decide the same, what the recorded workers answered is what they would have answered, and the comparison
is exact. At the first decision that differs the two histories part, and everything after it would be made up: so that
decision is the result, with the events before it and what both made of it. To decide the same is to do the same, and to
wake by itself at the same times; the reasons that are given count only if asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from headway import __version__
from headway.scheduler import actions as act
from headway.scheduler import clock
from headway.scheduler import events as ev
from headway.scheduler.blackbox import VERSION, Header, Step
from headway.scheduler.chosen import policies_of
from headway.scheduler.config import ConfigError
from headway.scheduler.core import Core
from headway.scheduler.spec import ModelSpec, PolicySpec
from headway.scheduler.tape import ends

BEFORE_MAX = 6  # steps shown before the one that differs


@dataclass(frozen=True)
class Parting:
    """The first step where they part. `before`: the steps that led to it. `core`: the second's, before this step."""

    step: int
    at_ns: int
    event: str
    first: list[act.Action]
    second: list[act.Action]
    before: list[str]
    core: str


@dataclass(frozen=True)
class Rerun:
    """Two histories of one record. `names`: of the first and the second. `parting`: None if they never part."""

    names: tuple[str, str]
    steps: int
    batches: int
    span_s: float
    recorded_by: str
    parting: Parting | None


def sessions(path: Path) -> int:
    """How many cores a record holds, one after the other."""
    return sum(isinstance(value, Header) for value in read(path))


def read(path: Path) -> Iterator[Header | Step]:
    """All whole values of a record. Raises ConfigError."""
    header, step = msgspec.msgpack.Decoder(Header).decode, msgspec.msgpack.Decoder(Step).decode
    try:
        data = path.read_bytes()  # once: a server may be adding to it
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    begin = 0
    view = memoryview(data)
    for end in ends(BytesIO(data), str(path)):
        try:
            value = step(view[begin:end]) if data[begin] == STEP else header(view[begin:end])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, byte {begin}: not of a flight record: {error}") from None
        if isinstance(value, Header) and value.v != VERSION:
            raise ConfigError(f"{path}, byte {begin}: version {value.v}; this headway reads {VERSION}")
        if not begin and not isinstance(value, Header):
            raise ConfigError(f"{path}: not a flight record; key flight_record of a server writes one")
        yield value
        begin = end


STEP = 0x93  # a list of three


def core_of(header: Header, changes: Mapping[str, Any]) -> Core:
    """A core as the record's, with some keys of its policy changed. Raises ConfigError."""
    try:
        policy = PolicySpec.model_validate(header.policy | dict(changes))
        models = [ModelSpec.model_validate(model) for model in header.models]
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"the policy recorded by headway {header.headway} cannot be used here: {said}") from None
    return Core(
        policies_of(policy, models),
        lost_after_ns=header.lost_after_ms * clock.NS_PER_MS,
        stuck_after_ns=header.stuck_after_ms * clock.NS_PER_MS,
    )


def rerun(path: Path, changes: Mapping[str, Any], *, session: int = 0, reasons: bool = False) -> Rerun:
    """With `changes` to its policy: this version as recorded against this version with them. Without: what was recorded
    against this version. `session`: counted from 1; 0: the last. `reasons`: they are compared, too. Raises ConfigError.
    """
    wanted = session or sessions(path)
    steps, header = _session(path, wanted)
    second = core_of(header, changes)
    first = core_of(header, {}) if changes else None
    changed = ", ".join(f"{key}={value}" for key, value in changes.items())
    names = ("as recorded", changed) if changes else (f"headway {header.headway}", f"headway {__version__}")
    before: list[str] = []
    count = batches = 0
    began_ns = last_ns = 0
    for step in steps if first is None else _woken(first, second, steps):
        began_ns, last_ns = began_ns or step.now_ns, step.now_ns
        count += 1
        state = repr(second)
        of_first = step.actions if first is None else first.step(step.event, step.now_ns)
        of_second = second.step(step.event, step.now_ns)
        if _deeds(of_first, reasons) != _deeds(of_second, reasons):
            at_ns = step.now_ns - began_ns
            parting = Parting(count, at_ns, repr(step.event), of_first, of_second, before, state)
            return Rerun(names, count, batches, at_ns / clock.NS_PER_S, header.headway, parting)
        batches += sum(type(action) is act.Dispatch for action in of_second)
        before = [*before[1 - BEFORE_MAX :], f"{(step.now_ns - began_ns) / clock.NS_PER_MS:,.3f} ms: {step.event!r}"]
    return Rerun(names, count, batches, (last_ns - began_ns) / clock.NS_PER_S, header.headway, None)


def _woken(first: Core, second: Core, steps: Iterator[Step]) -> Iterator[Step]:
    """The steps, and before each the wake-ups that only one of the two had asked for: there they part, if anything is
    done then."""
    for step in steps:
        last_ns = 0
        while True:
            one, other = (min(core.wakeup_ns, step.now_ns) for core in (first, second))
            if one == other or min(one, other) <= last_ns:
                break
            last_ns = min(one, other)
            yield Step(last_ns, ev.Tick(), [])
        yield step


def _deeds(actions: list[act.Action], reasons: bool) -> list[object]:
    """What is compared of them."""
    if reasons:
        return list(actions)
    return [_bare(action) for action in actions if type(action) is not act.Hold]


def _bare(action: act.Action) -> object:
    """Without words."""
    if isinstance(action, act.Dispatch):
        return msgspec.structs.replace(action, reason="", placed="")
    if isinstance(action, act.Refuse):
        return msgspec.structs.replace(action, reason="", message="")
    return msgspec.structs.replace(action, message="") if isinstance(action, act.End) else action


def _session(path: Path, wanted: int) -> tuple[Iterator[Step], Header]:
    """The steps of one core, and what it was made with."""
    values = read(path)
    number = 0
    for value in values:
        number += isinstance(value, Header)
        if number == wanted and isinstance(value, Header):
            return _until_next(values), value
    raise ConfigError(f"{path}: there is no session {wanted}; it has {number}")


def _until_next(values: Iterator[Header | Step]) -> Iterator[Step]:
    for value in values:
        if isinstance(value, Header):
            return
        yield value
