"""Trace files as they are published: Azure, BurstGPT, vidur (CSV), Mooncake, Bailian (JSON lines).

Which one a file is, is told from its columns, never from its name. Real files come with byte order marks, CRLF, blank
lines, semicolons, quoted numbers, extra columns and rows out of order: all of these are read. What cannot be read is a
TraceError that names the file, the line and the value, or all missing columns beside those that were found.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.sim.arrivals import NS_PER_MS, NS_PER_S, Arrivals, TraceError, ints, ordered, plain

BYTES_MAX = 1 << 30  # one file; past it, cut it first
DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?\s*(Z|UTC|[+-]\d\d:?\d\d)?$")


@dataclass(frozen=True)
class Layout:
    """What a published format calls its columns. `unit_ns`: of a time that is a number. `tenant`: if it has one."""

    name: str
    at: str
    tokens: str
    output: str
    unit_ns: int
    tenant: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that must be there."""
        return (self.at, self.tokens, self.output)


CSV_LAYOUTS = (
    Layout("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", NS_PER_S),
    Layout("BurstGPT", "Timestamp", "Request tokens", "Response tokens", NS_PER_S, tenant="Model"),
    Layout("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", NS_PER_S),
)
MOONCAKE = Layout("Mooncake", "timestamp", "input_length", "output_length", NS_PER_MS)
BAILIAN = Layout("Bailian", "timestamp", "input_length", "output_length", NS_PER_S)
BAILIAN_ONLY = ("chat_id", "turn")  # its times are seconds; Mooncake's, under the same name, milliseconds


def read_text(path: Path) -> str:
    """The file's text. Raises TraceError."""
    try:
        if path.stat().st_size > BYTES_MAX:
            raise TraceError(f"{path}: larger than {BYTES_MAX >> 30} GiB; cut it first")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


# ---------------------------------------------------------------- numbers and times


def number(text: str, where: str) -> float:
    """A finite number of at least 0. Raises TraceError with the place."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise TraceError(f"{where}: {text!r} is not a number") from None
    if not np.isfinite(value) or value < 0:
        raise TraceError(f"{where}: {text!r} is not a number of at least 0")
    return value


class Times:
    """Reads times of one file: dates with up to nanoseconds, or numbers in a unit. A number may be below 0."""

    def __init__(self, unit_ns: int) -> None:
        self.dates = False
        self._unit_ns = unit_ns
        self._seconds: dict[tuple[str, str], int] = {}

    def ns(self, text: str, where: str) -> int:
        """Nanoseconds since the file's own zero, or since the epoch."""
        found = DATE.match(text)
        if found:
            self.dates = True
            second, digits, zone = found.group(1), found.group(2) or "", found.group(3) or "Z"
            return self._second(second, zone, where) * NS_PER_S + int(digits[:9].ljust(9, "0"))
        try:
            whole, _, digits = text.partition(".")
            value = int(whole) * self._unit_ns if not digits else round(float(text) * self._unit_ns)
        except (ValueError, OverflowError):
            raise TraceError(f"{where}: {text!r} is neither a time nor a number") from None
        if abs(value) >= 1 << 62:
            raise TraceError(f"{where}: the time {text!r} is out of range")
        return value

    def _second(self, second: str, zone: str, where: str) -> int:
        known = self._seconds.get((second, zone))
        if known is None:
            try:
                at = datetime.fromisoformat(second + ("+00:00" if zone in ("Z", "UTC") else zone))
            except ValueError as error:
                raise TraceError(f"{where}: {error}") from None
            since = at - datetime(1970, 1, 1, tzinfo=UTC)
            known = self._seconds[(second, zone)] = since.days * 86_400 + since.seconds
        return known


# ---------------------------------------------------------------- rows


def table(path: Path, text: str) -> tuple[list[str], Iterator[tuple[int, list[str]]], str]:
    """Header, (line, row) of what is not blank, and the separator."""
    start = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(",;\t", key=start.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)

    def rows() -> Iterator[tuple[int, list[str]]]:
        try:
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, [cell.strip() for cell in row]
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from None

    lines = rows()
    return next(lines, (0, []))[1], lines, separator


def columns(path: Path, header: list[str], needed: tuple[str, ...]) -> list[int]:
    """Where these columns are, whatever their case. Raises TraceError naming all that are missing, and those found."""
    places = {name.lower(): index for index, name in reversed(list(enumerate(header)))}
    missing = [name for name in needed if name.lower() not in places]
    if missing:
        found = ", ".join(header) or "none"
        raise TraceError(f"{path}: missing columns: {', '.join(missing)}; found: {found}")
    return [places[name.lower()] for name in needed]


def layout_of(header: list[str]) -> Layout:
    """The layout that most of these columns belong to."""
    names = {name.lower() for name in header}
    return max(CSV_LAYOUTS, key=lambda layout: sum(column.lower() in names for column in layout.needed))


def read_csv(path: Path) -> Arrivals:
    """An Azure, BurstGPT or vidur trace. Raises TraceError."""
    text = read_text(path)
    header, rows, separator = table(path, text)
    if not header:
        raise TraceError(f"{path}: the file is empty")
    layout = layout_of(header)
    at, tokens, output = columns(path, header, layout.needed)
    tenant = header.index(layout.tenant) if layout.tenant in header else -1
    times = Times(layout.unit_ns)
    width = max(at, tokens, output, tenant)
    found: list[tuple[int, int, int]] = []
    names: dict[str, int] = {}
    who: list[int] = []
    for line, row in rows:
        where = f"{path}, line {line}"
        if len(row) <= width:
            raise TraceError(f"{where}: {len(row)} columns, where the header has {len(header)}")
        if separator == ";":
            row = [cell.replace(",", ".") for cell in row]  # a comma between digits, where semicolons separate
        sizes = int(number(row[tokens], where)), int(number(row[output], where))
        found.append((times.ns(row[at], where), *sizes))
        who.append(names.setdefault(row[tenant], len(names)) if tenant >= 0 else 0)
    return _arrivals(path, layout, found, times.dates, who, tuple(names) or ("",))


def read_jsonl(path: Path) -> Arrivals:
    """A Mooncake or Bailian trace: one JSON object a line. Raises TraceError."""
    found: list[tuple[int, int, int]] = []
    layout, times = MOONCAKE, Times(MOONCAKE.unit_ns)
    for line, row in json_lines(path):
        where = f"{path}, line {line}"
        if not found and any(key in row for key in BAILIAN_ONLY):
            layout, times = BAILIAN, Times(BAILIAN.unit_ns)
        missing = [name for name in layout.needed if name not in row]
        if missing:
            raise TraceError(f"{where}: missing keys: {', '.join(missing)}; found: {', '.join(row) or 'none'}")
        sizes = int(number(row[layout.tokens], where)), int(number(row[layout.output], where))
        found.append((times.ns(str(row[layout.at]), where), *sizes))
    return _arrivals(path, layout, found, times.dates, [0] * len(found), ("",))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of what is not blank. Raises TraceError."""
    for line, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise TraceError(f"{path}, line {line}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {line}: not a JSON object")
        yield line, row


def _arrivals(
    path: Path,
    layout: Layout,
    found: list[tuple[int, int, int]],
    dates: bool,
    who: list[int],
    tenants: tuple[str, ...],
) -> Arrivals:
    if not found:
        raise TraceError(f"{path}: there is no request in it, only {layout.name} columns")
    at, tokens, output = (ints(column) for column in zip(*found, strict=True))
    some = plain(path.name, at, tokens, output)
    whole = Arrivals(path.name, at, tokens, output, some.deadline_ns, some.priority, ints(who), tenants)
    return ordered(whole, absolute=dates)


Reader = Callable[[Path], Arrivals]
