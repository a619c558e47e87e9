"""What is sent when: a load made into shots, one for each request, all drawn before the first is fired.

Everything that may be done to a load before it is sent is here: faster or slower, a part of it, other lengths, other
arrivals, who cancels, who reads slowly. All random choices come from one seed, so that two replays send the same. Never
here: a socket or a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from headway.bench.sim import recording, sources
from headway.bench.sim.arrivals import NS_PER_MS, NS_PER_S, Arrivals, TraceError
from headway.bench.sim.recording import Record
from headway.bench.sim.synthetic import ClosedLoop
from headway.scheduler import link

Pattern = Literal["trace", "fixed", "poisson"]


class Shot(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to be sent `at_ns` after the start. `deadline_ms`, `cancel_ms`: after that time, 0 for none. `slow`:
    its answer is read slowly. `ids`, `payload`: what was recorded, if it is to be sent again."""

    index: int
    at_ns: int
    tokens: int
    max_new: int
    kind: str
    deadline_ms: int = 0
    priority: int = 0
    tenant: str = ""
    cancel_ms: float = 0.0
    slow: bool = False
    ids: list[int] | None = None
    payload: bytes | None = None


@dataclass(frozen=True)
class Shaping:
    """What is done to a load. `sample`: the share of requests that is kept, each at its own time. `tenants`: so many
    made-up ones, where the load names none."""

    speed: float = 1.0
    rate_rps: float | None = None
    pattern: Pattern = "trace"
    sample: float = 1.0
    input_scale: float = 1.0
    output_scale: float = 1.0
    input_max: int = 0
    output_max: int = 0
    deadline_ms: int = 0
    priority: int | None = None
    tenants: int = 0
    cancel_share: float = 0.0
    cancel_ms: float = 0.0
    slow_share: float = 0.0
    seed: int = 0

    def rng(self, purpose: int) -> np.random.Generator:
        """Each choice has random numbers of its own, so that one option does not change what another draws."""
        return np.random.default_rng([self.seed, 7, purpose])


@dataclass(frozen=True)
class Load:
    """A load ready to be sent. `clients`: of a closed loop, 0 for an open one."""

    load: Arrivals | ClosedLoop
    how: Shaping
    records: list[Record] | None = None
    clients: int = 0
    think_ns: int = 0

    @property
    def name(self) -> str:
        """What it is called."""
        return self.load.name

    @property
    def mode(self) -> str:
        """How it is sent, in words."""
        if self.clients:
            return f"closed loop, {self.clients} clients, thinking {self.think_ns / NS_PER_MS:g} ms"
        return {"trace": "open loop", "fixed": "open loop, fixed rate", "poisson": "open loop, Poisson"}[
            self.how.pattern
        ]

    @property
    def rate_rps(self) -> float | None:
        """Requests a second; None where that means nothing."""
        return self.load.rate_rps if isinstance(self.load, Arrivals) and not self.clients else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found when it was read."""
        return self.load.notes

    def shots(self, kind: str) -> list[Shot]:
        """One for each request. `kind`: of those that do not say it themselves."""
        return shots_of(self.load, self.how, kind=kind, records=self.records)


def opened(
    source: str,
    how: Shaping,
    *,
    start_s: float | None = None,
    span_s: float = 0.0,
    limit: int = 0,
    lengths: Path | None = None,
    clients: int = 0,
    think_ms: float = 0.0,
) -> Load:
    """The load called `source`, cut and shaped. `clients`: play it as a closed loop. Raises TraceError."""
    found = sources.open_source(source, seed=how.seed, start_s=start_s, span_s=span_s, limit=limit, lengths=lengths)
    if isinstance(found, ClosedLoop):
        if clients or how.rate_rps or how.pattern != "trace" or how.speed != 1.0 or how.sample != 1.0:
            raise TraceError("a closed loop sets its own speed: closed:clients=8,think_ms=2,n=500 says how it goes")
        sized = replace(
            found,
            tokens=_scaled(found.tokens, how.input_scale, how.input_max, 1),
            max_new=_scaled(found.max_new, how.output_scale, how.output_max, 0),
        )
        return Load(sized, how, None, found.clients, found.think_ns)
    records = recording.records(Path(source))[0] if found.row is not None else None
    return Load(shaped(found, how), how, records, clients, int(think_ms * NS_PER_MS))


def shaped(load: Arrivals, how: Shaping) -> Arrivals:
    """The load as it will be sent. Raises TraceError."""
    if how.sample < 1.0:
        keep = how.rng(1).random(len(load)) < how.sample
        load = load.where(keep, f"a share of {how.sample:g}")
    if how.pattern != "trace":
        load = _again(load, how)
    elif how.rate_rps is not None:
        load = load.at_rate(how.rate_rps)
    if how.speed != 1.0:
        load = replace(load, at_ns=np.rint(load.at_ns / how.speed).astype(np.int64))
    return replace(
        load,
        tokens=_scaled(load.tokens, how.input_scale, how.input_max, 1),
        max_new=_scaled(load.max_new, how.output_scale, how.output_max, 0),
    )


def _again(load: Arrivals, how: Shaping) -> Arrivals:
    """The same requests in the same order, at times of a law's own."""
    rate = how.rate_rps or load.rate_rps
    if rate is None:
        raise TraceError(f"{load.name}: its requests come at one time; say at which --rate they are to be sent")
    count = len(load)
    if how.pattern == "fixed":
        at = np.arange(count) * (NS_PER_S / rate)
    else:
        at = np.cumsum(how.rng(2).exponential(NS_PER_S / rate, count))
        at -= at[0]
    return replace(load, at_ns=np.rint(at).astype(np.int64))


def _scaled(
    sizes: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", by: float, most: int, least: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Lengths times a factor; what was something does not become nothing."""
    if by != 1.0:
        sizes = np.where(sizes > 0, np.maximum(1, np.rint(sizes * by)), sizes).astype(np.int64)
    return np.clip(sizes, least, most or None).astype(np.int64)


def shots_of(
    load: Arrivals | ClosedLoop, how: Shaping, *, kind: str, records: Sequence[Record] | None = None
) -> list[Shot]:
    """A shot for each request, in order. `kind`: of all that do not say themselves. `records`: what `load.row` points
    into; their kinds, and their prompts if they have any, are sent again."""
    count = len(load)
    cancels = how.rng(3).random(count) < how.cancel_share
    slow = how.rng(4).random(count) < how.slow_share
    made_up = how.rng(5).integers(0, how.tenants, count).tolist() if how.tenants else None
    names: tuple[str, ...] = ("",)
    if isinstance(load, ClosedLoop):
        sizes = [0] * count, load.tokens.tolist(), load.max_new.tolist()
        deadlines = priorities = whose = [0] * count
    else:
        sizes = load.at_ns.tolist(), load.tokens.tolist(), load.max_new.tolist()
        deadlines, priorities = (load.deadline_ns // NS_PER_MS).tolist(), load.priority.tolist()
        names, whose = load.tenants, load.tenant.tolist()
    rows = load.row.tolist() if records is not None and isinstance(load, Arrivals) and load.row is not None else None
    shots = []
    for index, (at_ns, tokens, max_new) in enumerate(zip(*sizes, strict=True)):
        record = records[rows[index]] if records is not None and rows is not None else None
        shots.append(
            Shot(
                index=index,
                at_ns=at_ns,
                tokens=tokens,
                max_new=max_new,
                kind=(record.kind if record is not None else "") or kind,
                deadline_ms=how.deadline_ms or deadlines[index],
                priority=priorities[index] if how.priority is None else how.priority,
                tenant=names[whose[index]] or (f"t{made_up[index]}" if made_up else ""),
                cancel_ms=how.cancel_ms if cancels[index] else 0.0,
                slow=bool(slow[index]),
                ids=_ids(record, tokens),
                payload=record.payload if record is not None and record.tokens == tokens else None,
            )
        )
    return shots


def _ids(record: Record | None, tokens: int) -> list[int] | None:
    """The token ids that were recorded, if the length is still theirs."""
    if record is None or record.ids is None or record.tokens != tokens:
        return None
    return list(link.unpack_ids(record.ids))
