"""What the headline found: targets, tables, JSON and a picture.

Ratios are between runs of the same round, which followed each other within minutes; shown is the median over rounds.
First tokens are pooled over rounds, and how many there were is said: a P95 of few says little.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.generate.report import Target
from headway.bench.generate.work import Answer, percentile
from headway.scheduler import clock

OURS, SOLO, FIXED = "headway", "one at a time", "batches of 8, 100 ms"
WAYS = (OURS, SOLO, FIXED)
CLOSED = "closed"
THROUGHPUT_MIN, DEVICE_MAX = 3.0, 0.7  # headway's over one at a time
P95_MIN = 100  # first tokens: fewer, and the P95 is marked


class Run(msgspec.Struct, frozen=True):
    """One way under one load. `load`: closed, or an open loop's share of what one at a time can do; `wall_s`: from the
    first request to the last answer; `device_s`: CPU seconds of the server with all its processes; `first_ms`,
    `whole_ms`: of each request, from when it was due."""

    round: int
    way: str
    load: str
    requests: int
    tokens: int
    wall_s: float
    device_s: float
    first_ms: list[float]
    whole_ms: list[float]

    @property
    def per_second(self) -> float:
        """Requests."""
        return self.requests / self.wall_s

    @property
    def device_ms(self) -> float:
        """Of each request."""
        return 1000 * self.device_s / self.requests


def run_of(number: int, way: str, load: str, answers: Sequence[Answer], wall_ns: int, device_s: float) -> Run:
    """The numbers of one run."""
    return Run(
        number,
        way,
        load,
        len(answers),
        sum(len(answer.stamps_ns) for answer in answers),
        wall_ns / clock.NS_PER_S,
        device_s,
        [(answer.stamps_ns[0] - answer.sent_ns) / clock.NS_PER_MS for answer in answers],
        [(answer.stamps_ns[-1] - answer.sent_ns) / clock.NS_PER_MS for answer in answers],
    )


class Row(msgspec.Struct, frozen=True):
    """One way under one load, over all rounds."""

    way: str
    load: str
    requests: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    whole_p95_ms: float
    device_ms: float


class Found(msgspec.Struct):
    """Every run, in order. `same`: answers that are those of one at a time, token for token, of how many compared."""

    runs: list[Run] = []
    same: tuple[int, int] = (0, 0)

    def of(self, way: str, load: str) -> list[Run]:
        """The runs of a way under a load, a round each."""
        return [run for run in self.runs if (run.way, run.load) == (way, load)]

    @property
    def loads(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(run.load for run in self.runs))

    def row(self, way: str, load: str) -> Row:
        """Medians over rounds; percentiles over all requests."""
        runs = self.of(way, load)
        first = [value for run in runs for value in run.first_ms]
        return Row(
            way,
            load,
            len(first),
            median(run.per_second for run in runs),
            median(run.tokens / run.wall_s for run in runs),
            percentile(first, 50),
            percentile(first, 95),
            percentile([value for run in runs for value in run.whole_ms], 95),
            median(run.device_ms for run in runs),
        )

    def throughput_ratio(self, way: str) -> float:
        """headway's tokens a second over this way's, in the closed loop: the median of the rounds' ratios."""
        pairs = zip(self.of(OURS, CLOSED), self.of(way, CLOSED), strict=True)
        return median((a.tokens / a.wall_s) / (b.tokens / b.wall_s) for a, b in pairs)

    def device_ratio(self, way: str, load: str = CLOSED) -> float:
        """headway's device time for a token over this way's."""
        pairs = zip(self.of(OURS, load), self.of(way, load), strict=True)
        return median((a.device_s / a.tokens) / (b.device_s / b.tokens) for a, b in pairs)

    def first_ratio(self, way: str, load: str) -> float:
        """headway's P95 time to first token over this way's."""
        return self.row(OURS, load).ttft_p95_ms / self.row(way, load).ttft_p95_ms


def targets(found: Found) -> list[Target]:
    """Against one at a time."""
    aims = [
        Target("throughput over one at a time", found.throughput_ratio(SOLO), THROUGHPUT_MIN, at_least=True),
        Target("device time of a token over one at a time's", found.device_ratio(SOLO), DEVICE_MAX, at_least=False),
    ]
    for load in found.loads:
        if load != CLOSED:
            name = f"P95 time to first token over one at a time's, at {load} of its capacity"
            aims.append(Target(name, found.first_ratio(SOLO, load), 1.0, at_least=False))
    return aims


COLUMNS = (
    ("requests", "requests", ",d"),
    ("requests/s", "requests_per_s", ".2f"),
    ("tokens/s", "tokens_per_s", ".1f"),
    ("TTFT P50 ms", "ttft_p50_ms", ",.0f"),
    ("P95", "ttft_p95_ms", ",.0f"),
    ("whole P95 ms", "whole_p95_ms", ",.0f"),
    ("device ms a request", "device_ms", ",.0f"),
)


def show(found: Found, clients: int, console: Console) -> None:
    """The tables and the targets."""
    for load in found.loads:
        what = f"{clients} clients, each with one request at a time" if load == CLOSED else f"{load} of what one can do"
        table = Table(title=f"{load}: {what}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
        table.add_column("")
        for name, _, _ in COLUMNS:
            table.add_column(name, justify="right")
        for way in WAYS:
            row = found.row(way, load)
            table.add_row(way, *(format(getattr(row, key), form) for _, key, form in COLUMNS))
        console.print(table)
    fewest = min(found.row(OURS, load).requests for load in found.loads)
    if fewest < P95_MIN:
        console.print(f"a P95 of fewer than {P95_MIN} requests (here {fewest}) moves with each of the slowest few")
    for way in (SOLO, FIXED):
        console.print(
            f"headway over {way}: {found.throughput_ratio(way):.2f} times the throughput, "
            f"{found.device_ratio(way):.2f} of the device time"
        )
    if found.same[1]:
        console.print(f"{found.same[0]} of {found.same[1]} answers are those of one at a time, token for token")
    for aim in targets(found):
        sign = "at least" if aim.at_least else "at most"
        console.print(f"{'reached' if aim.met else 'MISSED '}  {aim.name}: {aim.reached:.2f} ({sign} {aim.limit:g})")


def as_json(found: Found, settings: Mapping[str, Any]) -> bytes:
    """For other programs: settings, rows, ratios, targets, and every run."""
    whole = {
        "settings": settings,
        "rows": [found.row(way, load) for load in found.loads for way in WAYS],
        "ratios": {
            way: {"throughput": found.throughput_ratio(way), "device": found.device_ratio(way)} for way in (SOLO, FIXED)
        },
        "targets": [
            {"name": aim.name, "reached": aim.reached, "limit": aim.limit, "met": aim.met} for aim in targets(found)
        ],
        "found": found,
    }
    return msgspec.json.format(msgspec.json.encode(whole)) + b"\n"


def draw(path: Path, found: Found) -> None:
    """Throughput, device time, and P95 of first tokens over load. Raises ConfigError without matplotlib."""
    from headway.bench.sim.plots import figure

    picture, axes = figure(3)
    rows = [found.row(way, CLOSED) for way in WAYS]
    colours = [f"C{at}" for at in range(len(WAYS))]
    axes[0].bar(WAYS, [row.tokens_per_s for row in rows], color=colours)
    axes[0].set(title="throughput, closed loop", ylabel="tokens/s")
    axes[1].bar(WAYS, [row.device_ms for row in rows], color=colours)
    axes[1].set(title="device time", ylabel="ms a request")
    for way in WAYS:
        opened = [load for load in found.loads if load != CLOSED]
        axes[2].plot(opened, [found.row(way, load).ttft_p95_ms for load in opened], marker="o", label=way)
    axes[2].set(title="first token", xlabel="load, of what one at a time can do", ylabel="P95, ms", yscale="log")
    axes[2].legend(fontsize="small")
    for axis in axes[:2]:
        axis.tick_params(axis="x", labelrotation=12, labelsize="small")
    picture.savefig(path)
