"""What headway is for, in one command: the default model one at a time, in fixed batches, and behind headway.

    python -m headway.bench.headline

Three servers stay up and take turns on the same requests and threads: headway with its defaults; plain `generate` one
request at a time; plain `generate` in padded batches of 8 after at most 100 ms. Each round first runs a closed loop,
for throughput and device time, then open loops at shares of what one at a time was found to do, for times to first
token. The exit code is 1 if a target is missed. docs/tuning.md says more.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from headway.bench.generate import ways
from headway.bench.generate.options import folder_of, range_of
from headway.bench.generate.processes import cpu_s
from headway.bench.generate.work import Answer, Work, make
from headway.bench.headline import load, report
from headway.bench.headline.report import CLOSED, FIXED, OURS, SOLO, WAYS, Found, run_of
from headway.bench.overhead import free_address
from headway.bench.pictures import drawn
from headway.scheduler import clock

BASELINES = {SOLO: (1, 0.0), FIXED: (8, 100.0)}  # requests of a batch, and how long the oldest waits, ms
SOLO_SHARE = 4  # in a closed loop one at a time runs one in so many requests: its speed does not depend on how many
ROWS_MAX = 32  # the default of max_num_seqs
KV_MIB = 512
WIDTH_PIPED = 140

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Server:
    """One of the three: its address and its process."""

    def __init__(self, way: str, address: str, process: "subprocess.Popen[bytes]") -> None:
        self.way, self.address, self.process = way, address, process

    def run(self, number: int, name: str, work: Sequence[Work], plan: load.Plan) -> tuple[report.Run, list[Answer]]:
        """One load on it."""
        before_s, began_ns = cpu_s(self.process.pid), clock.now_ns()
        answers = load.Player(self.address, work, plan).run()
        wall_ns, spent_s = clock.now_ns() - began_ns, cpu_s(self.process.pid) - before_s
        return run_of(number, self.way, name, answers, wall_ns, spent_s), answers


@contextmanager
def started(folder: Path, threads: int) -> Iterator[dict[str, Server]]:
    """All three, each having answered once."""
    with ExitStack() as stack:
        ours = ways.Headway(folder, 1, threads, ROWS_MAX, KV_MIB)
        stack.callback(ways.stop, ours.process)
        servers = {OURS: Server(OURS, ours.address, ours.process)}
        for way, (batch, wait_ms) in BASELINES.items():
            address = free_address()
            command = [sys.executable, "-m", "headway.bench.headline.baseline", str(folder), str(threads)]
            process = subprocess.Popen(
                [*command, str(batch), str(wait_ms), address], env=ways.thread_environment(threads)
            )
            stack.callback(ways.stop, process)
            servers[way] = Server(way, address, process)
        for server in servers.values():
            load.Player(server.address, [Work("", [9, 8, 7, 6], 2)] * 2, 2).run()
        yield servers


def _shares(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers, as in 0.7,1.5") from None
    if not all(0.05 <= share <= 20 for share in found):
        raise typer.BadParameter("each share is from 0.05 to 20")
    return found


@app.command(help=(__doc__ or "").split("\n\n")[0])
def main(
    rounds: Annotated[int, typer.Option(min=1, help="turns of all servers")] = 2,
    requests: Annotated[int, typer.Option(min=8, help="requests of a closed loop")] = 32,
    clients: Annotated[int, typer.Option(min=1, max=256, help="of the closed loop")] = 16,
    shares: Annotated[
        str, typer.Option(metavar="N,N", help="open loops, as shares of one at a time's rate")
    ] = "0.7,1.5",
    span_s: Annotated[float, typer.Option(min=1, help="how long requests come in an open loop")] = 15.0,
    prompt: Annotated[str, typer.Option(metavar="LOW:HIGH", help="tokens of a prompt")] = "16:64",
    output: Annotated[str, typer.Option(metavar="LOW:HIGH", help="tokens of an answer")] = "8:24",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads each server computes with")] = max(
        1, (os.cpu_count() or 2) - 1
    ),
    model: Annotated[str, typer.Option(help="a folder; empty: the packaged SmolLM2-135M")] = "",
    trace: Annotated[str, typer.Option(help="a trace whose arrivals are used, set to the rates; empty: Poisson")] = "",
    seed: Annotated[int, typer.Option(help="of requests and arrivals")] = 11,
    json: Annotated[Path, typer.Option(metavar="FILE")] = Path("headline.json"),
    plot: Annotated[Path, typer.Option(metavar="FILE")] = Path("headline.png"),
) -> None:
    prompts, outputs, opened = range_of(prompt), range_of(output), _shares(shares)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    folder = folder_of(model)
    work = make(folder, requests, prompts, outputs, seed)
    found = Found()
    with Console(stderr=True).status("three servers load the model"):
        stack = ExitStack()
        servers = stack.enter_context(started(folder, threads))
    with stack, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=rounds * len(WAYS) * (1 + len(opened)))
        rate = 0.0
        for number in range(rounds):
            order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            closed: dict[str, list[Answer]] = {}
            for way in order:
                progress.update(task, description=f"round {number + 1}, {clients} clients: {way}")
                part = work[: -(-requests // SOLO_SHARE)] if way == SOLO else work
                run, closed[way] = servers[way].run(number, CLOSED, part, clients)
                found.runs.append(run)
                progress.advance(task)
            found.same = _same(found.same, closed[OURS], closed[SOLO])
            rate = rate or found.of(SOLO, CLOSED)[0].per_second
            for share in opened:
                count = max(4, round(share * rate * span_s))
                sent = make(folder, count, prompts, outputs, seed + 1 + number)
                plan = _due(trace, count, share * rate, seed + number)
                for way in order:
                    progress.update(task, description=f"round {number + 1}, {share * rate:.2f} requests/s: {way}")
                    found.runs.append(servers[way].run(number, f"{share:g}", sent, plan)[0])
                    progress.advance(task)
    report.show(found, clients, console)
    settings = {"threads": threads, "clients": clients, "prompt": prompts, "output": outputs, "solo_per_s": rate}
    json.write_bytes(report.as_json(found, settings | {"model": str(folder), "trace": trace, "seed": seed}))
    console.print(f"written: {json}")
    drawn(console, plot, lambda: report.draw(plot, found))
    raise typer.Exit(0 if all(aim.met for aim in report.targets(found)) else 1)


def _due(trace: str, count: int, rate: float, seed: int) -> list[int]:
    return load.from_trace(trace, count, rate) if trace else load.poisson(count, rate, seed)


def _same(before: tuple[int, int], ours: Sequence[Answer], alone: Sequence[Answer]) -> tuple[int, int]:
    """Answers are compared where both have them."""
    equal = sum(a.tokens == b.tokens for a, b in zip(ours, alone, strict=False))
    return before[0] + equal, before[1] + min(len(ours), len(alone))


if __name__ == "__main__":
    app()
