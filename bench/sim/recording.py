"""headway's own recordings: what arrived and how it ended, written down as it came, to be run again.

A file is a plain msgpack stream, one map after the other and nothing between, so that any language reads it. What a
server writes is in `scheduler/recorder.py`; of it all but these may be left out, and unknown keys are skipped:

    {"v": 1, "at_ns": 12345, "tokens": 310}

`at_ns` is on any clock. A map with `end` is the ending of the last request before it with this `rid`. A process that
dies may leave half a map at the end: it is left out, with a note. Anything wrong before that is a TraceError with the
byte where it is.

Source: the msgpack specification, format table.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from headway.bench.sim.arrivals import NS_PER_MS, Arrivals, TraceError, ints, ordered, plain
from headway.scheduler.recorder import VERSION, Came, Went

Record = Came
_MAP16, _MAP32 = 0xDE, 0xDF
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}
_LISTS = {0xDC: 2, 0xDD: 4}


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


def split(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each value of the stream begins and ends; the last ends past the data if it is not all there."""
    at = 0
    while at < len(data):
        begin = at
        owed = 1
        while owed:
            if at >= len(data):
                at += 1
                break
            size, children = _one(data, at)
            at += size
            owed += children - 1
        yield begin, at


def _one(data: bytes, at: int) -> tuple[int, int]:
    """Bytes of the value at `at` itself, and how many values it holds."""
    byte = data[at]
    if byte <= 0x7F or byte >= 0xE0:
        return 1, 0
    if byte <= 0x8F:
        return 1, 2 * (byte & 15)
    if byte <= 0x9F:
        return 1, byte & 15
    if byte <= 0xBF:
        return 1 + (byte & 31), 0
    if byte in _FIXED:
        return 1 + _FIXED[byte], 0
    if byte in _SIZED:
        width = _SIZED[byte]
        return 1 + width + int.from_bytes(data[at + 1 : at + 1 + width]), 0
    if byte in (_MAP16, _MAP32):
        width = 2 if byte == _MAP16 else 4
        return 1 + width, 2 * int.from_bytes(data[at + 1 : at + 1 + width])
    if byte in _LISTS:
        width = _LISTS[byte]
        return 1 + width, int.from_bytes(data[at + 1 : at + 1 + width])
    raise TraceError(f"byte {at}: {byte:#x} begins no plain msgpack value")


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
    try:
        for begin, end in split(data):
            if end > len(data):
                return found, True
            part = view[begin:end]
            if kind(part).end is not None:
                ending = went(part)
                if ending.end in last:
                    last[ending.end].went = ending
                continue
            record = came(part)
            if record.v != VERSION:
                raise TraceError(f"byte {begin}: a record of version {record.v}; this headway reads {VERSION}")
            if record.tokens < 0 or record.max_new < 0:
                raise TraceError(f"byte {begin}: fewer than 0 tokens")
            found.append(Entry(record))
            if record.rid:
                last[record.rid] = found[-1]
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from None
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}, byte {begin}: not a record: {error}") from None
    return found, False


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
