"""headway's own recordings: what arrived and how it ended, written down as it came, to be run again.

A file is a plain msgpack stream, one map after the other and nothing between, so that any language reads it. What a
server writes is in `scheduler/recorder.py`; of it all but these may be left out, and unknown keys are skipped:

    {"v": 1, "at_ns": 12345, "tokens": 310}

`at_ns` is on any clock. A map with `end` is the ending of the last request before it with this `rid`. A process that
dies may leave half a map at the end: it is left out, with a note. Anything wrong before that is a TraceError with the
byte where it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from headway.bench.sim.arrivals import NS_PER_MS, Arrivals, TraceError, ints, ordered, plain
from headway.scheduler.config import ConfigError
from headway.scheduler.recorder import VERSION, Came, Went
from headway.scheduler.tape import ends

Record = Came


class _Kind(msgspec.Struct):
    """Which of the two it is."""

    end: int | None = None


@dataclass(eq=False)
class Entry:
    """A request, and how it ended; None: nothing was written of that."""

    came: Record
    went: Went | None = None

    @property
    def record(self) -> Record:
        """The arrival, with the answer as long as it was in the end."""
        if self.went is None or not self.came.max_new or self.went.outcome != "ok":
            return self.came
        return msgspec.structs.replace(self.came, max_new=self.went.output)


class Writer:
    """Appends records to a file that its caller opened, and closes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.msgpack.Encoder().encode

    def write(self, record: Record) -> None:
        """One more."""
        self._file.write(self._encode(record))


def write(path: Path, records: Iterable[Record]) -> None:
    """A whole recording."""
    with path.open("wb") as file:
        writer = Writer(file)
        for record in records:
            writer.write(record)


def entries(path: Path) -> tuple[list[Entry], bool]:
    """All whole requests in the order of their writing, and whether half a map follows. Raises TraceError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    came, went = msgspec.msgpack.Decoder(Record).decode, msgspec.msgpack.Decoder(Went).decode
    kind = msgspec.msgpack.Decoder(_Kind).decode
    view = memoryview(data)
    found: list[Entry] = []
    last: dict[int, Entry] = {}
    begin = 0
    try:
        for end in ends(BytesIO(data), str(path)):
            part = view[begin:end]
            if kind(part).end is not None:
                ending = went(part)
                if ending.end in last:
                    last[ending.end].went = ending
            else:
                found.append(Entry(_checked(came(part))))
                last[found[-1].came.rid] = found[-1]
            begin = end
    except (msgspec.MsgspecError, ValueError) as error:
        text = str(error) if isinstance(error, ConfigError) else f"{path}, byte {begin}: not a record: {error}"
        raise TraceError(text) from None
    return found, begin < len(data)


def _checked(record: Record) -> Record:
    """Raises ValueError for what its types cannot say."""
    if record.v != VERSION:
        raise ValueError(f"a record of version {record.v}; this headway reads {VERSION}")
    if record.tokens < 0 or record.max_new < 0:
        raise ValueError("fewer than 0 tokens")
    return record


def records(path: Path) -> tuple[list[Record], bool]:
    """The arrivals of all whole requests, and whether half a map follows. Raises TraceError."""
    found, torn = entries(path)
    return [entry.record for entry in found], torn


def read(path: Path) -> Arrivals:
    """A recording as arrivals; their `row` says which of `records(path)` each was. Raises TraceError."""
    found, torn = records(path)
    if not found:
        raise TraceError(f"{path}: there is no whole record in it")
    order = np.argsort(ints([record.at_ns for record in found]), kind="stable")
    found = [found[index] for index in order.tolist()]  # a text is written down once it is tokenised, and so later
    tenants: dict[str, int] = {}
    who = ints([tenants.setdefault(record.tenant, len(tenants)) for record in found])
    at, tokens, output = (ints([getattr(one, key) for one in found]) for key in ("at_ns", "tokens", "max_new"))
    arrivals = replace(
        plain(path.name, at, tokens, output),
        deadline_ns=ints([(record.deadline_ms or 0) * NS_PER_MS for record in found]),
        priority=ints([record.priority for record in found]),
        tenant=who,
        tenants=tuple(tenants),
        row=ints(order),
    )
    if torn:
        arrivals = arrivals.noted("the last record is cut off; left out")
    return ordered(arrivals, absolute=True)
