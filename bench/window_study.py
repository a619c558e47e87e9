"""How far each window is from the best fixed one in hindsight, over traces, loads, workers and cost models.

    python -m headway.bench.window_study [--quick] [--traces DIR] [--json FILE] [--plot FILE] [--processes N]

Simulated: the real core under a virtual clock (docs/simulate.md). The grid is traces x loads .1-.9 x 1-2 workers x
three cost models. Besides: clients that wait for their answers, pulses and one request in ten seconds, against greedy;
ten times the load at once; first tokens of an iteration-level engine; the padding of a padded one; and how fast the
simulator itself is. Prints the tables, the targets with what was reached, and writes JSON and a plot. The exit code is
1 if a target is missed.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.bench.pictures import drawn
from headway.bench.sim import plots, study, synthetic
from headway.bench.sim.compare import Setting, geomean, simulate
from headway.bench.sim.engines import PRESETS
from headway.bench.sim.study import Cell, FirstToken, Job, Lengths, Loop, Steps
from headway.scheduler import clock
from headway.scheduler.spec import PolicySpec

LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LOADS_QUICK = (0.2, 0.5, 0.8)
QUICK_TRACES = ("azure_conv", "servegen_r1", "poisson", "pulse8")
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
CLIENTS_QUICK = (1, 4, 16, 64)
PULSE = "pulses:burst=3,span_ms=200,idle_ms=800,n={n}"
SPARSE = "poisson:rps=0.1,n={n}"
WIDTH_PIPED = 160  # columns where there is no terminal to ask
MILLION = 1_000_000
MILLION_S_MAX = 120.0

Found = list[tuple[Job, dict[str, Any]]]


class Target(msgspec.Struct, frozen=True):
    """What was aimed at, and what was reached."""

    name: str
    reached: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether it was."""
        return self.reached <= self.limit


def jobs(quick: bool, folder: str) -> list[Job]:
    """All that is to be run; the long ones first, so that the cores end together."""
    n, seeds = (800, 2) if quick else (2000, 2)
    known = study.traces_in(folder)
    names = [name for name in QUICK_TRACES if name in known] if quick else known
    first = "azure_conv" if "azure_conv" in known else "poisson"
    tokens: list[Job] = [
        FirstToken(first, load, engine, 300 if quick else 1500, folder)
        for load in ((0.6,) if quick else (0.3, 0.6, 0.8))
        for engine in ("gen", "fast")
    ]
    cells: list[Job] = [
        Cell(name, load, workers, engine, n, seeds, folder)
        for name in names
        for load in (LOADS_QUICK if quick else LOADS)
        for workers in (1, 2)
        for engine in study.ENGINES
    ]
    engines = ("e1", "e2")
    loops: list[Job] = [
        Loop(f"closed:clients={clients},think_ms=2,n={600 if quick else 4000},spread=0.8", engine, seeds)
        for clients in (CLIENTS_QUICK if quick else CLIENTS)
        for engine in engines
    ]
    few: list[Job] = [
        Loop(text.format(n=400 if quick else 3000), engine, seeds) for text in (PULSE, SPARSE) for engine in engines
    ]
    lengths: list[Job] = [
        Lengths(first, load, engine, 2_000 if quick else 8_000, folder)
        for load in ((0.6,) if quick else (0.3, 0.6, 0.8))
        for engine in study.ENGINES
    ]
    return [*tokens, *lengths, Steps("e2", 2 if quick else 12), *cells, *loops, *few]


def run(work: Sequence[Job], processes: int, console: Console) -> Found:
    """All jobs, on all cores."""
    found: Found = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("window study", total=len(work))
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for one in pool.imap_unordered(study.do, work):
                found.append(one)
                bar.advance(task)
    order = {job: index for index, job in enumerate(work)}
    return sorted(found, key=lambda one: order[one[0]])


def speed(requests: int) -> float:
    """Seconds that the simulator needs for a million requests, from a run with `requests`."""
    setting = Setting(PRESETS["e1"], PolicySpec())
    load = setting.at_load(synthetic.poisson(rps=50, n=requests, sizes=study.MIXED, seed=1), 0.6)
    begin = clock.now_ns()
    simulate(load, setting)
    return (clock.now_ns() - begin) / clock.NS_PER_S * MILLION / requests


# ---------------------------------------------------------------- what was found


def summary(found: Found) -> list[dict[str, Any]]:
    """For each window and engine: geomean and worst of the ratios to hindsight, and where the worst was."""
    rows = []
    cells = [(job, result) for job, result in found if isinstance(job, Cell)]
    for name in study.WINDOWS:
        for engine in (*study.ENGINES, "all"):
            mine = [(job, result[name]) for job, result in cells if engine in (job.engine, "all")]
            worst_job, worst = max(mine, key=lambda one: one[1]["mean_ratio"])
            rows.append(
                {
                    "window": name,
                    "engine": engine,
                    "cells": len(mine),
                    "mean_geomean": geomean([values["mean_ratio"] for _, values in mine]),
                    "mean_worst": worst["mean_ratio"],
                    "p95_geomean": geomean([values["p95_ratio"] for _, values in mine]),
                    "p95_worst": max(values["p95_ratio"] for _, values in mine),
                    "worst": f"{worst_job.trace} {worst_job.engine} x{worst_job.workers} @{worst_job.load:g}",
                }
            )
    return rows


def targets(found: Found, rows: Sequence[dict[str, Any]], million_s: float) -> list[Target]:
    """The aims of the adaptive window, and of the simulator."""
    whole = next(row for row in rows if (row["window"], row["engine"]) == ("adaptive", "all"))
    loops = [(job.source, result["adaptive"]["ratio"]) for job, result in found if isinstance(job, Loop)]
    stepped = [result["adaptive"] for job, result in found if isinstance(job, Steps)]
    first = [result["adaptive"]["ratio"] for job, result in found if isinstance(job, FirstToken)]
    waste = [result["like lengths, by cost"]["waste"] for job, result in found if isinstance(job, Lengths)]
    return [
        Target("mean latency over hindsight, geomean", whole["mean_geomean"], 1.05),
        Target("mean latency over hindsight, worst cell", whole["mean_worst"], 1.5),
        Target("closed loop over greedy, worst", max(r for s, r in loops if s.startswith("closed")), 1.03),
        Target("pulses over greedy, worst", max(r for s, r in loops if s.startswith("pulses")), 1.03),
        Target("one in 10 s over greedy, worst", max(r for s, r in loops if s.startswith("poisson")), 1.03),
        Target("2 s after a load step over steady, worst", max(max(one.values()) for one in stepped), 1.5),
        Target("iteration: P95 first token over greedy, worst", max(one for one in first if one is not None), 1.03),
        Target("padding waste of like lengths, worst", max(waste), 0.2),
        Target("a million simulated requests, seconds", million_s, MILLION_S_MAX),
    ]


def over_load(found: Found) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """engine -> window -> (load, geomean of the mean's ratio)."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    cells = [(job, result) for job, result in found if isinstance(job, Cell)]
    for engine in study.ENGINES:
        for name in study.WINDOWS:
            for load in sorted({job.load for job, _ in cells}):
                ratios = [r[name]["mean_ratio"] for job, r in cells if (job.engine, job.load) == (engine, load)]
                value = geomean(ratios)
                if value is not None:
                    panels.setdefault(engine, {}).setdefault(name, []).append((load, value))
    return panels


# ---------------------------------------------------------------- for a person


def show(console: Console, found: Found, rows: Sequence[dict[str, Any]], aims: Sequence[Target]) -> None:
    """The tables."""
    table = Table(title="over the best fixed window in hindsight")
    for head in ("window", "engine", "cells", "mean geomean", "mean worst", "P95 geomean", "P95 worst", "worst cell"):
        table.add_column(head, justify="left" if head in ("window", "engine", "worst cell") else "right")
    for row in rows:
        keys = ("mean_geomean", "mean_worst", "p95_geomean", "p95_worst")
        ratios = (f"{row[key]:.3f}" for key in keys)
        table.add_row(row["window"], row["engine"], str(row["cells"]), *ratios, row["worst"])
    console.print(table)
    others = Table(
        title="over greedy (mean latency; P95 of the first token; steps: first 2 s over steady, up and down)"
    )
    others.add_column("load")
    for name in study.WINDOWS:
        others.add_column(name, justify="right")
    for job, result in found:
        if not isinstance(job, (Cell, Lengths)):
            others.add_row(_named(job), *(_ratio(result.get(name, {})) for name in study.WINDOWS))
    console.print(others)
    console.print(lengths_table(found))
    for aim in aims:
        word = "[green]met[/]   " if aim.met else "[red]missed[/]"
        console.print(f"{word} {aim.name}: {aim.reached:.3f} (limit {aim.limit:g})")


def lengths_table(found: Found) -> Table:
    """Padding, and the latency of short and long inputs apart."""
    table = Table(title=f"a padded engine (long: over {study.BYPASS} tokens)")
    heads = ("waste", "device_ms", "short_mean_ms", "short_p95_ms", "long_mean_ms", "long_p95_ms")
    for head in ("load", "batches", *heads):
        table.add_column(head.replace("_", " "), justify="left" if head in ("load", "batches") else "right")
    for job, result in found:
        if isinstance(job, Lengths):
            for way, values in result.items():
                cells = [f"{values[head]:.3g}" if head in values else "" for head in heads]
                table.add_row(f"{job.trace} {job.engine} @{job.load:g}", way, *cells)
    return table


def _named(job: Job) -> str:
    if isinstance(job, Loop):
        return f"{job.source.split(',n=')[0]} {job.engine}"
    if isinstance(job, Steps):
        return f"steps {'/'.join(f'{rate:g}' for rate in study.STEP_RATES)} {job.engine}"
    return f"first token {job.trace} {job.engine} @{job.load:g}"


def _ratio(values: dict[str, Any]) -> str:
    if "up" in values:
        return f"{values['up']:.2f}, {values['down']:.2f}"
    return "" if values.get("ratio") is None else f"{values['ratio']:.3f}"


def folder_of(given: str | None) -> str:
    """Where the traces lie: as said, or shared/traces in or beside this checkout."""
    if given is not None:
        return given
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "traces").is_dir():
            return str(parent / "shared" / "traces")
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells, at most a minute")
    parser.add_argument("--traces", metavar="DIR", help="default: shared/traces in or beside the checkout")
    parser.add_argument("--json", type=Path, default=Path("window_study.json"))
    parser.add_argument("--plot", type=Path, default=Path("window_study.png"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    folder = folder_of(args.traces)
    missing = [name for name in study.RECORDED if name not in study.traces_in(folder)]
    if missing:
        console.print(f"not there, and left out: {', '.join(missing)} (looked in {folder or 'no folder'})")
    found = run(jobs(args.quick, folder), args.processes, console)
    million_s = speed(20_000 if args.quick else MILLION)
    rows = summary(found)
    aims = targets(found, rows, million_s)
    show(console, found, rows, aims)
    whole = {
        "summary": rows,
        "targets": [{"name": aim.name, "reached": aim.reached, "limit": aim.limit, "met": aim.met} for aim in aims],
        "jobs": [{"kind": type(job).__name__, **vars(job), "found": result} for job, result in found],
    }
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    console.print(f"written: {args.json}")
    drawn(console, args.plot, lambda: plots.draw_over_load(args.plot, over_load(found), "mean latency over hindsight"))
    return 0 if all(aim.met for aim in aims) else 1


if __name__ == "__main__":
    sys.exit(main())
