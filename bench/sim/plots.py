"""Pictures of runs: latency as a cumulative curve, batch sizes, and latency over load. Needs matplotlib, an extra.

Drawn without a display, straight to the file whose suffix says what it becomes (png, svg, pdf).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.sim.compare import Comparison
from headway.bench.sim.report import Report
from headway.bench.sim.world import OK, Outcome
from headway.scheduler.config import ConfigError

POINTS_MAX = 2000  # of one curve
SUFFIXES = (".png", ".svg", ".pdf")

Curve = Sequence[tuple[float, float]]  # (load, milliseconds)


def check(path: Path) -> None:
    """Raises ConfigError before any work is done if the picture could not be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a plot ends in {', '.join(SUFFIXES)}")
    figure(1)


def figure(panels: int) -> tuple[Any, Sequence[Any]]:
    """A picture of `panels` axes in a row. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'headway[bench]'") from None
    figure = Figure(figsize=(5.2 * panels, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def latencies_ms(outcome: Outcome) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Sorted, of those that ended well."""
    ok = np.asarray(outcome.ending) == OK
    return np.sort(np.asarray(outcome.done_ns)[ok] - np.asarray(outcome.at_ns)[ok]) / 1e6


def draw_run(path: Path, report: Report, outcome: Outcome, over_load: Mapping[str, Curve] | None = None) -> None:
    """One run: latency, batch sizes, and if given latency over load."""
    picture, axes = figure(3 if over_load else 2)
    _cdf(axes[0], {report.window: outcome})
    sizes = {int(size): count for size, count in report.batch_sizes.items()}
    axes[1].bar(list(sizes), list(sizes.values()))
    axes[1].set(xlabel="batch size", ylabel="batches")
    if over_load:
        _over_load(axes[2], over_load)
    picture.suptitle(f"{report.source}, {report.engine}, {report.window}")
    picture.savefig(path)


def _cdf(axis: Any, outcomes: Mapping[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        times = latencies_ms(outcome)
        if len(times):
            at = np.unique(np.linspace(0, len(times) - 1, min(POINTS_MAX, len(times))).astype(int))
            axis.plot(times[at], (at + 1) / len(times), label=name)
    axis.set(xscale="log", xlabel="latency, ms", ylabel="share of requests", ylim=(0, 1.02))
    if outcomes:
        axis.legend()


def _over_load(axis: Any, curves: Mapping[str, Curve], what: str = "mean latency, ms") -> None:
    for name, curve in curves.items():
        axis.plot([load for load, _ in curve], [value for _, value in curve], marker=".", label=name)
    axis.set(yscale="log", xlabel="load", ylabel=what)
    axis.legend(fontsize="small")


def draw_over_load(path: Path, panels: Mapping[str, Mapping[str, Curve]], what: str) -> None:
    """One panel for each engine, one curve for each window."""
    picture, axes = figure(max(1, len(panels)))
    for axis, (title, curves) in zip(axes, panels.items(), strict=False):
        _over_load(axis, curves, what)
        axis.set_title(title)
    picture.savefig(path)


def draw_windows(path: Path, comparison: Comparison) -> None:
    """A bar for each window: mean and P95, beside each other."""
    picture, axes = figure(2)
    rows = comparison.windows
    for axis, key, best in ((axes[0], "mean_ms", comparison.best_mean), (axes[1], "p95_ms", comparison.best_p95)):
        known = [row for row in rows if getattr(row.latency, key)]
        colours = ["tab:green" if row.window == best else "tab:blue" for row in known]
        axis.barh([row.window for row in known], [getattr(row.latency, key) for row in known], color=colours)
        axis.invert_yaxis()
        axis.set(xscale="log" if known else "linear", xlabel=f"latency, {key.removesuffix('_ms')}, ms")
    picture.savefig(path)
