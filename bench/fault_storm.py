"""Fault storms over as many seeds as you like: does the core keep its laws whatever happens, and does all of it end?

    python -m headway.bench.fault_storm --seeds 10000 [--first N] [--processes N]
    python -m headway.bench.fault_storm --seed 4711 [--transcript]

Each seed is a scheduler of its own with made-up workers and clients, faults of all kinds, and a referee that holds the
laws after every step (docs/design.md). The first seed that breaks one is made short and told; the exit code is 1.
"""

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headway.bench.storm.plan import draw
from headway.bench.storm.shrink import play, report, shrink, transcript
from headway.bench.storm.world import Storm
from headway.scheduler import clock

CHUNK = 16  # seeds that a process takes at a time


class Found(NamedTuple):
    """What one seed did. `broken`: the law and sentence, or empty."""

    seed: int
    steps: int
    seen: Counter[str]
    broken: str


def one(seed: int) -> Found:
    """Play a seed."""
    storm = Storm(draw(seed))
    failure = play(storm)
    return Found(seed, len(storm.steps), storm.seen, failure.text if failure else "")


def run(seeds: range, processes: int, console: Console) -> list[Found]:
    """All seeds, or all until the first that breaks a law."""
    found: list[Found] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("storms", total=len(seeds))
        for result in _results(seeds, processes):
            found.append(result)
            bar.advance(task)
            if result.broken:
                break
    return found


def _results(seeds: range, processes: int) -> Iterator[Found]:
    if processes == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(one, seeds, CHUNK)


def tell(seed: int, console: Console) -> None:
    """A failing seed, made short."""
    failure = play(Storm(draw(seed)))
    assert failure is not None, f"seed {seed} broke a law in another process, and does not here"
    with console.status("making it short") as status:
        shorter = shrink(failure, lambda left: status.update(f"making it short: {left} happenings left"))
    console.print(report(shorter, len(failure.storm.plan.happenings)), markup=False, highlight=False, soft_wrap=True)


def show(found: Sequence[Found], spent_ns: int, console: Console) -> None:
    """What was seen, so that it is known what was tried."""
    seen: Counter[str] = sum((one.seen for one in found), Counter())
    table = Table(title="what happened", show_header=False)
    names = sorted(seen)
    half = -(-len(names) // 2)
    for left, right in zip(names[:half], [*names[half:], ""], strict=False):
        table.add_row(left, f"{seen[left]:,}", right, f"{seen[right]:,}" if right else "")
    console.print(table)
    steps = sum(one.steps for one in found)
    console.print(f"{len(found):,} seeds, {steps:,} steps of the core, {spent_ns / clock.NS_PER_S:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headway.bench.fault_storm", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--transcript", action="store_true", help="with --seed: print all that happened")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    console = Console()
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else range(args.seed, args.seed + 1)
    begin = clock.now_ns()
    found = run(seeds, 1 if len(seeds) == 1 else args.processes, console)
    broken = [one for one in found if one.broken]
    if broken:
        tell(broken[0].seed, console)
        return 1
    if args.transcript and args.seed is not None:
        lines = transcript(Storm(draw(args.seed)).run().steps)
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    show(found, clock.now_ns() - begin, console)
    console.print("every law held, everything ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
