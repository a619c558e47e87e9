"""headway's generation against other ways of running the same model, in turns on the same machine and threads.

    python -m headway.bench.generate [--concurrency 1,16] [--threads 2] [--vllm VENV] [--hfserve VENV]

Every way runs the same requests at each concurrency, in an order that turns round with each round; medians over rounds.
Then the cost of a step outside the model, and what a long prompt does to streams. docs/engines.md says more. The exit
code is 1 if a target is missed.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from headway.bench.generate import report, steps, ways
from headway.bench.generate.options import CORES, Hfserve, Model, Seed, Threads, Vllm, folder_of, levels_of, range_of
from headway.bench.generate.report import OURS, SOLO, Found
from headway.bench.generate.starting import PEERS, Bench, started
from headway.bench.generate.work import Answer, make
from headway.bench.pictures import drawn

SOLO_SHARE = 4  # one at a time runs one in so many of the requests: its speed does not depend on how many
WIDTH_PIPED = 160  # columns where there is no terminal to ask

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=(__doc__ or "").split("\n\n")[0])
def main(
    concurrency: Annotated[str, typer.Option(help="requests in flight, 1 to 64, with commas")] = "16",
    requests: Annotated[int, typer.Option(min=4, help="requests of each run")] = 32,
    prompt: Annotated[str, typer.Option(metavar="LOW:HIGH", help="tokens of a prompt, up to 2048")] = "20:200",
    output: Annotated[str, typer.Option(metavar="LOW:HIGH", help="tokens of an answer")] = "16:96",
    rounds: Annotated[int, typer.Option(min=1, help="runs of each way")] = 3,
    threads: Threads = CORES,
    workers: Annotated[
        int, typer.Option(min=0, help="headway's worker processes, which share the threads; 0: one for each thread")
    ] = 1,
    model: Model = "",
    only: Annotated[str, typer.Option(help="ways to run, with commas; empty: all that are there")] = "",
    vllm: Vllm = PEERS / "vllm",
    hfserve: Hfserve = PEERS / "hfserve",
    seed: Seed = 11,
    extras: Annotated[bool, typer.Option(help="also the cost of a step and the long prompt")] = True,
    json: Annotated[Path, typer.Option(metavar="FILE")] = Path("generate.json"),
    plot: Annotated[Path, typer.Option(metavar="FILE")] = Path("generate.png"),
) -> None:
    levels, prompts, outputs = levels_of(concurrency), range_of(prompt), range_of(output)
    workers = workers or threads
    if threads % workers:
        raise typer.BadParameter(f"--threads {threads} does not divide among --workers {workers}")
    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    folder = folder_of(model)
    work = make(folder, requests, prompts, outputs, seed)
    found = Found()
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        bench = Bench(folder, work, max(levels), threads, workers, stack)
        makers = bench.makers(vllm, hfserve, only)
        up = list(started(makers, found, progress, stack))
        if not up:
            report.show_skipped(found, console)
            raise typer.Exit(1)
        task = progress.add_task("measuring", total=rounds * len(levels) * len(up))
        alone: list[Answer] = []
        for number in range(rounds):
            for level in levels:
                for way in up if number % 2 else up[::-1]:
                    share = work[: -(-requests // SOLO_SHARE)] if way.name == SOLO else work
                    progress.update(task, description=f"round {number + 1}, {level} running: {way.name}")
                    run, answers = ways.measure(way, share, 1 if way.name == SOLO else level, threads)
                    found.runs.append(msgspec.structs.replace(run, concurrency=level))
                    if way.name == SOLO:
                        alone = answers
                    elif way.name == OURS and alone:
                        found.same = _same(found.same, answers, alone)
                    progress.advance(task)
        if extras:
            progress.update(task, description="a long prompt among streams")
            found.long_prompt = bench.long_prompt()
    if extras:
        found.overhead = _overhead(folder, threads // workers)
    report.show(found, console)
    settings = {"threads": threads, "workers": workers, "requests": requests, "seed": seed, "rounds": rounds}
    json.write_bytes(report.as_json(found, settings | {"prompt": prompts, "output": outputs, "model": str(folder)}))
    console.print(f"written: {json}")
    drawn(console, plot, lambda: report.draw(plot, found))
    raise typer.Exit(0 if all(aim.met for aim in report.targets(found)) else 1)


def _overhead(folder: Path, threads: int) -> steps.Overhead:
    """In a process of its own, which holds the model."""
    command = [sys.executable, "-m", "headway.bench.generate.steps", str(folder), str(threads), str(report.AT)]
    out = subprocess.run(command, env=ways.thread_environment(threads), stdout=subprocess.PIPE, check=True).stdout
    return msgspec.json.decode(out.splitlines()[-1], type=steps.Overhead)


def _same(before: tuple[int, int], ours: Sequence[Answer], alone: Sequence[Answer]) -> tuple[int, int]:
    equal = sum(one.tokens == other.tokens for one, other in zip(ours, alone, strict=False))
    return before[0] + equal, before[1] + len(alone)


if __name__ == "__main__":
    app()
