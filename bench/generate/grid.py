"""Generation over batch sizes and prompt lengths: where headway is ahead of others, and by how much.

    python -m headway.bench.generate.grid [--concurrency 1,4,16,64] [--prompts 16,128,512,2048] [--threads 2]

Every cell is one run of each way, in turns: as many requests as run at once (up to 8: twice as many), prompts of one
length, answers of one length, greedy. Shown are headway's tokens a second, and how many times those of each other way.
"""

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.bench.generate import ways
from headway.bench.generate.options import CORES, Hfserve, Model, Seed, Threads, Vllm, folder_of, levels_of, range_of
from headway.bench.generate.report import CONTINUOUS, OURS, SOLO, STATIC, Found, show_skipped
from headway.bench.generate.starting import PEERS, Bench, started
from headway.bench.generate.work import Run, make
from headway.bench.pictures import drawn

TWICE_UP_TO = 8  # at once: then each runs two requests, one after the other
WIDTH_PIPED = 160

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Cell(msgspec.Struct, frozen=True):
    """One run of one way on prompts of `prompt` tokens."""

    prompt: int
    run: Run


@app.command(help=(__doc__ or "").split("\n\n")[0])
def main(
    concurrency: Annotated[str, typer.Option(help="requests in flight, 1 to 64, with commas")] = "1,4,16,64",
    prompts: Annotated[str, typer.Option(help="tokens of a prompt, with commas")] = "16,128,512,2048",
    output: Annotated[int, typer.Option(min=2, help="tokens of an answer")] = 32,
    threads: Threads = CORES,
    model: Model = "",
    only: Annotated[str, typer.Option(help="ways to run, with commas")] = f"{OURS},{SOLO},{STATIC},{CONTINUOUS}",
    vllm: Vllm = PEERS / "vllm",
    hfserve: Hfserve = PEERS / "hfserve",
    seed: Seed = 11,
    json: Annotated[Path, typer.Option(metavar="FILE")] = Path("grid.json"),
    plot: Annotated[Path, typer.Option(metavar="FILE")] = Path("grid.png"),
) -> None:
    levels, lengths = levels_of(concurrency), [range_of(part)[0] for part in prompts.split(",")]
    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    folder, found = folder_of(model), Found()
    longest = make(folder, 1, (max(lengths),) * 2, (output, output), seed)
    cells: list[Cell] = []
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        bench = Bench(folder, longest, max(levels), threads, 1, stack)
        up = list(started(bench.makers(vllm, hfserve, only), found, progress, stack))
        task = progress.add_task("measuring", total=len(levels) * len(lengths) * len(up))
        try:
            for number, (length, level) in enumerate(itertools.product(sorted(lengths), levels)):
                work = make(
                    folder, level * (2 if level <= TWICE_UP_TO else 1), (length, length), (output, output), seed
                )
                for way in up if number % 2 else up[::-1]:
                    progress.update(task, description=f"prompts of {length}, {level} running: {way.name}")
                    alone = way.name == SOLO  # its speed does not depend on how many there are
                    run, _ = ways.measure(way, work[:2] if alone else work, 1 if alone else level, threads)
                    cells.append(Cell(length, msgspec.structs.replace(run, concurrency=level)))
                    progress.advance(task)
        except KeyboardInterrupt:
            console.print("interrupted: what was measured follows")
    show_skipped(found, console)
    if not cells:
        raise typer.Exit(1)
    for name in dict.fromkeys(cell.run.way for cell in cells):
        console.print(table_of(cells, name))
    json.write_bytes(msgspec.json.format(msgspec.json.encode({"threads": threads, "output": output, "cells": cells})))
    console.print(f"written: {json}")
    drawn(console, plot, lambda: draw(plot, cells))


def speed(cells: Sequence[Cell], way: str, prompt: int, level: int) -> float:
    """Tokens a second of `way` there; 0 where it did not run."""
    found = (
        one.run.tokens_per_s for one in cells if (one.run.way, one.prompt, one.run.concurrency) == (way, prompt, level)
    )
    return next(found, 0.0)


def axes_of(cells: Sequence[Cell]) -> tuple[list[int], list[int]]:
    """Prompt lengths and concurrencies of the cells, in order."""
    return sorted({cell.prompt for cell in cells}), sorted({cell.run.concurrency for cell in cells})


def table_of(cells: Sequence[Cell], way: str) -> Table:
    """headway's tokens a second by prompt length and concurrency; or, for another way, how many times its."""
    lengths, levels = axes_of(cells)
    table = Table(title="headway, tokens/s" if way == OURS else f"headway over {way}")
    table.add_column("prompt", justify="right")
    for level in levels:
        table.add_column(f"{level} at once", justify="right")
    for length in lengths:
        row = []
        for level in levels:
            ours, theirs = speed(cells, OURS, length, level), speed(cells, way, length, level)
            row.append(f"{ours:.1f}" if way == OURS else f"{ours / theirs:.2f}" if ours and theirs else "")
        table.add_row(f"{length:,}", *row)
    return table


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """Tokens/s over concurrency, a picture for each prompt length. Raises ConfigError without matplotlib."""
    from headway.bench.sim.plots import figure

    lengths, levels = axes_of(cells)
    picture, axes = figure(len(lengths))
    for axis, length in zip(axes, lengths, strict=True):
        for way in dict.fromkeys(cell.run.way for cell in cells):
            shown = [(level, speed(cells, way, length, level)) for level in levels]
            axis.plot(*zip(*[point for point in shown if point[1]], strict=True), marker="o", label=way)
        axis.set(title=f"prompts of {length:,}", xlabel="running at once", ylabel="tokens/s", ylim=(0, None))
        axis.set_xscale("log", base=2)
    axes[0].legend(fontsize="small")
    picture.savefig(path)


if __name__ == "__main__":
    app()
