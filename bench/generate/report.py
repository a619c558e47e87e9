"""What a comparison found: targets, a table, JSON and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.generate.steps import LongPrompt, Overhead
from headway.bench.generate.work import Run, median_of

OURS = "headway"
SOLO, STATIC, CONTINUOUS, VLLM = "one at a time", "static batches", "continuous batching", "vLLM (CPU)"
AIMS = {CONTINUOUS: 1.25, SOLO: 4.0, VLLM: 1.0}  # headway's tokens/s over theirs, at AT running
AT = 16
OVERHEAD_MAX, LONGEST_MAX = 0.10, 3.0

COLUMNS = (
    ("tokens/s", "tokens_per_s", ".1f"),
    ("TTFT P50 ms", "ttft_p50_ms", ",.0f"),
    ("P95", "ttft_p95_ms", ",.0f"),
    ("token gap P50 ms", "gap_p50_ms", ",.0f"),
    ("P95", "gap_p95_ms", ",.0f"),
    ("P99", "gap_p99_ms", ",.0f"),
    ("CPU ms/token", "cpu_ms_per_token", ".1f"),
    ("MiB", "memory_mib", ",d"),
)


class Target(msgspec.Struct, frozen=True):
    """What was aimed at, and what was reached."""

    name: str
    reached: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it was."""
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit


class Found(msgspec.Struct):
    """All of it. `runs`: every one, in the order they ran; `skipped`: way -> why; `same`: answers equal to those of the
    plain model one at a time, of how many compared."""

    runs: list[Run] = []
    skipped: dict[str, str] = {}
    same: tuple[int, int] = (0, 0)
    overhead: Overhead | None = None
    long_prompt: LongPrompt | None = None

    def medians(self, concurrency: int) -> dict[str, Run]:
        """For each way, the medians of its rounds."""
        of: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.concurrency == concurrency:
                of.setdefault(run.way, []).append(run)
        return {way: median_of(runs) for way, runs in of.items()}

    def ratios(self, concurrency: int) -> dict[str, float]:
        """headway's tokens/s over each other way's."""
        rows = self.medians(concurrency)
        ours = rows.get(OURS)
        return {way: ours.tokens_per_s / row.tokens_per_s for way, row in rows.items()} if ours else {}


def targets(found: Found) -> list[Target]:
    """Those that what was measured can tell of."""
    ratios = found.ratios(AT)
    aims = [
        Target(f"tokens/s over {way}, {AT} running", ratios[way], aim, at_least=True)
        for way, aim in AIMS.items()
        if way in ratios
    ]
    if found.overhead:
        name = f"share of a step outside the model, {found.overhead.running} running"
        aims.append(Target(name, found.overhead.share, OVERHEAD_MAX, at_least=False))
    if found.long_prompt:
        name = f"longest wait for a token over the median, a prompt of {found.long_prompt.prompt_tokens} coming"
        aims.append(Target(name, found.long_prompt.ratio, LONGEST_MAX, at_least=False))
    return aims


def show(found: Found, console: Console) -> None:
    """The tables."""
    for concurrency in sorted({run.concurrency for run in found.runs}):
        table = Table(title=f"{concurrency} running", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("way")
        for name, _, _ in COLUMNS:
            table.add_column(name, justify="right")
        table.add_column("headway over it", justify="right")
        ratios = found.ratios(concurrency)
        for way, row in found.medians(concurrency).items():
            cells = (format(getattr(row, key), form) for _, key, form in COLUMNS)
            table.add_row(way, *cells, f"{ratios[way]:.2f}" if way in ratios and way != OURS else "")
        console.print(table)
    show_skipped(found, console)
    if found.same[1]:
        console.print(f"{found.same[0]} of {found.same[1]} answers are those of the plain model one at a time")
    for aim in targets(found):
        sign = "at least" if aim.at_least else "at most"
        console.print(f"{'reached' if aim.met else 'MISSED '}  {aim.name}: {aim.reached:.2f} ({sign} {aim.limit:g})")


def show_skipped(found: Found, console: Console) -> None:
    """What did not run, and why."""
    for way, why in found.skipped.items():
        console.print(f"left out: {way}: {why}", markup=False)


def as_json(found: Found, settings: Mapping[str, Any]) -> bytes:
    """For other programs: settings, medians with ratios, targets, and every run."""
    levels = sorted({run.concurrency for run in found.runs})
    whole = {
        "settings": settings,
        "medians": [
            {"concurrency": level, "ratios": found.ratios(level), "ways": list(found.medians(level).values())}
            for level in levels
        ],
        "targets": [
            {"name": aim.name, "reached": aim.reached, "limit": aim.limit, "met": aim.met} for aim in targets(found)
        ],
        "found": found,
    }
    return msgspec.json.format(msgspec.json.encode(whole)) + b"\n"


def draw(path: Path, found: Found) -> None:
    """Tokens/s over concurrency, and the P95 gap between tokens. Raises ConfigError without matplotlib."""
    from headway.bench.sim.plots import figure

    picture, axes = figure(2)
    levels = sorted({run.concurrency for run in found.runs})
    ways = list(dict.fromkeys(run.way for run in found.runs))
    for axis, key, label in ((axes[0], "tokens_per_s", "tokens/s"), (axes[1], "gap_p95_ms", "token gap P95, ms")):
        for way in ways:
            points = [(level, found.medians(level)[way]) for level in levels if way in found.medians(level)]
            shown: Sequence[float] = [getattr(row, key) for _, row in points]
            axis.plot([level for level, _ in points], shown, marker="o", label=way)
        axis.set(xlabel="running at once", ylabel=label, ylim=(0, None), xticks=levels)
    axes[0].legend(fontsize="small")
    picture.savefig(path)
