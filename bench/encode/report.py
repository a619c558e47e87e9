"""What the encoder comparison found: one row a server, a table, a picture."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from headway.bench.encode.load import Sample
from headway.bench.sim import plots

FOREIGN_CORES = 0.3  # of the machine, used by others: past it a latency's tail says little


class Row(msgspec.Struct, frozen=True):
    """One server. Rates are medians over rounds, with the least and the most; latencies are of all texts."""

    server: str
    label: str
    per_second: float
    least: float
    most: float
    ratio: float  # headway's rate over this one's, the median of the rounds' ratios
    cpu_ms: float  # of the server, for one text of the closed loop
    closed_p50_ms: float
    open_p50_ms: float
    open_p95_ms: float
    open_p99_ms: float
    late_ms: float
    foreign_cores: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(samples: Sequence[Sample], labels: Mapping[str, str]) -> list[Row]:
    """A row for each server, in the order of `labels`."""
    rows = []
    ours = _rates(samples, "headway")
    for name, label in labels.items():
        rates = _rates(samples, name)
        closed = _latencies(samples, name, "closed")
        opened = _latencies(samples, name, "open")
        mine = [sample for sample in samples if sample.server == name]
        ratios = [one / other for one, other in zip(ours, rates, strict=False) if other]
        rows.append(
            Row(
                server=name,
                label=label,
                per_second=statistics.median(rates),
                least=min(rates),
                most=max(rates),
                ratio=statistics.median(ratios) if ratios else math.nan,
                cpu_ms=statistics.median(sample.cpu_ms for sample in mine if sample.loop == "closed"),
                closed_p50_ms=percentile(closed, 0.5),
                open_p50_ms=percentile(opened, 0.5),
                open_p95_ms=percentile(opened, 0.95),
                open_p99_ms=percentile(opened, 0.99),
                late_ms=max((sample.late_ms for sample in mine), default=0.0),
                foreign_cores=statistics.median(sample.foreign_cores for sample in mine),
            )
        )
    return rows


def _rates(samples: Sequence[Sample], name: str) -> list[float]:
    return [sample.per_second for sample in samples if (sample.server, sample.loop) == (name, "closed")]


def _latencies(samples: Sequence[Sample], name: str, loop: str) -> list[float]:
    return [ms for sample in samples if (sample.server, sample.loop) == (name, loop) for ms in sample.latencies_ms]


def show(
    rows: Sequence[Row], left_out: Sequence[tuple[str, str]], in_flight: int, per_second: float, console: Console
) -> None:
    """The table, and who is not in it."""
    table = Table(title="MiniLM, texts of 5 to 120 words", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("texts/s", "least", "most", "headway", "CPU ms", "P50 ms", "open P50", "P95", "P99", "foreign"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rates = [
            f"{row.per_second:.1f}",
            f"{row.least:.1f}",
            f"{row.most:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.cpu_ms:.1f}",
        ]
        times = (row.closed_p50_ms, row.open_p50_ms, row.open_p95_ms, row.open_p99_ms)
        table.add_row(row.label, *rates, *(f"{ms:,.0f}" for ms in times), f"{row.foreign_cores:.2f}")
    console.print(table)
    text = f"to P50 ms: {in_flight} in flight, CPU ms for one text; open: Poisson, {per_second:.1f} texts a second"
    console.print(f"{text}; foreign: cores that others used", highlight=False)
    for label, why in left_out:
        console.print(f"{label}: left out or not alike: {why}", highlight=False)
    if any(row.foreign_cores > FOREIGN_CORES for row in rows):
        console.print("[yellow]others used this machine meanwhile: compare CPU ms, the rest says little[/]")


def draw(path: Path, samples: Sequence[Sample], labels: Mapping[str, str], in_flight: int, per_second: float) -> None:
    """Rates as bars, latencies of the open loop as curves."""
    figure, axes = plots.figure(2)
    rows = summary(samples, labels)[::-1]
    colours = ["tab:blue" if row.server == "headway" else "tab:gray" for row in rows]
    bars = axes[0].barh([row.label for row in rows], [row.per_second for row in rows], color=colours)
    axes[0].bar_label(bars, fmt="%.1f", padding=3)
    axes[0].set(xlabel=f"texts a second, {in_flight} in flight")
    axes[0].margins(x=0.15)
    for name, label in labels.items():
        latencies = sorted(_latencies(samples, name, "open"))
        shares = [(at + 1) / len(latencies) for at in range(len(latencies))]
        axes[1].plot(latencies, shares, label=label, linewidth=2.5 if name == "headway" else 1.2)
    axes[1].set(
        xscale="log", xlabel="latency in ms", ylabel=f"share of texts, {per_second:.1f} a second", ylim=(0, 1.005)
    )
    axes[1].legend(fontsize="small")
    figure.savefig(path)
