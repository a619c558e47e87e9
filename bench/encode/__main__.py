"""MiniLM embeddings through headway, through two floors and through other servers, on this machine, in one run.

Every server has one worker and as many torch threads as the others, 1 by default, and all answer the same texts, 5 to
120 words long. Closed loop with 64 in flight: texts a second. Open loop, Poisson arrivals at 80% of what the best of
the others reached: latency, from when a text was meant to be sent. All servers stay up and take turns; each round
measures each once, in an order that turns round; rates are medians over rounds, percentiles are over all texts of all
rounds. headway is measured through its whole path: client, ZeroMQ router, worker process. What the rest of the machine
used meanwhile is shown as `foreign`, in cores; where that is much, compare the CPU time of a text, not the clock's.
"""

import asyncio
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
from rich.console import Console
from rich.progress import Progress

from headway.bench.encode import report, servers
from headway.bench.encode.load import Asker, Sample, closed, opened
from headway.bench.encode.servers import Server
from headway.bench.encode.texts import make_texts
from headway.bench.sim import plots
from headway.scheduler.clock import NS_PER_S, now_ns
from headway.scheduler.config import ConfigError
from headway.workers.packaged import LoadError, minilm

TEXTS = 2048
SEED = 7
WARM_S = 1.0
WIDTH_PIPED = 120  # columns where there is no terminal to ask
ALIKE = 0.999  # the cosine that tells the same vector from another
PROBE = "the water was good and the people asked about it again"

Measure = Callable[[Asker, Sequence[str]], Coroutine[Any, Any, Sample]]


def measured(server: Server, measure: Measure, texts: Sequence[str]) -> Sample:
    """One sample, and what the rest of the machine used meanwhile."""

    async def run() -> Sample:
        asker = server.asker()
        try:
            return await measure(asker, texts)
        finally:
            await asker.close()

    own = psutil.Process()
    began_ns, busy_s, client_s, server_s = now_ns(), _busy_s(), _used_s(own), server.cpu_s()
    sample = asyncio.run(run())
    server_s = server.cpu_s() - server_s
    foreign = (_busy_s() - busy_s) - server_s - (_used_s(own) - client_s)
    return msgspec.structs.replace(
        sample,
        server=server.kind.name,
        cpu_ms=round(1000 * server_s / max(1, sample.answered), 3),
        foreign_cores=round(max(0.0, foreign * NS_PER_S / (now_ns() - began_ns)), 3),
    )


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy_s() -> float:
    """CPU time that all of the machine has used."""
    times: Any = psutil.cpu_times()
    idle: float = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times[:8])) - idle


def rounds_of(
    running: Sequence[Server],
    count: int,
    measure: Callable[[int], Measure],
    texts: Sequence[str],
    tick: Callable[[], None],
) -> list[Sample]:
    """Each server once a round; the order turns round."""
    samples = []
    for number in range(count):
        for server in running if number % 2 else running[::-1]:
            samples.append(measured(server, measure(number), texts))
            tick()
    return samples


async def _vector(server: Server) -> list[float]:
    asker = server.asker()
    try:
        return await asker.ask(PROBE)
    finally:
        await asker.close()


def strangers(running: Sequence[Server]) -> list[tuple[str, str]]:
    """Servers whose vectors are not those of the first."""
    first, *others = ((server.kind.label, asyncio.run(_vector(server))) for server in running)
    return [
        (label, f"its vector has a cosine of {cosine:.3f} with that of {first[0]}")
        for label, vector in others
        if (cosine := _cosine(first[1], vector)) < ALIKE
    ]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def start(
    stack: ExitStack, only: Sequence[str], peers: Path, threads: int, folder: Path, console: Console
) -> tuple[list[Server], list[tuple[str, str]]]:
    """All servers that can be had, one after another; and which are left out, and why."""
    config = folder / "headway.yaml"
    settings = {
        "MODEL": str(minilm()),
        "THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MAX_BATCH": str(servers.MAX_BATCH),
        "MAX_WAIT_MS": str(servers.MAX_WAIT_MS),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    }
    os.environ["MODEL"] = settings["MODEL"]
    running: list[Server] = []
    left_out: list[tuple[str, str]] = []
    for kind in servers.kinds(config):
        if only and kind.name not in only:
            continue
        if why := servers.missing(kind, peers):
            left_out.append((kind.label, why))
            continue
        address = servers.new_address()
        if kind.name == "headway":
            config.write_text(servers.CONFIG.format(address=address, threads=threads))
        try:
            log = folder / f"{kind.name}.log"
            running.append(stack.enter_context(servers.started(kind, address, peers, settings, log)))
            console.print(f"[dim]{kind.label} answers[/]")
        except (TimeoutError, OSError) as error:
            left_out.append((kind.label, str(error)))
    return running, left_out


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    rounds: Annotated[int, typer.Option(min=1, help="how often each server has its turn")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="length of one closed loop")] = 5.0,
    open_seconds: Annotated[float, typer.Option(min=1, help="length of one open loop")] = 8.0,
    in_flight: Annotated[int, typer.Option(min=1, help="of the closed loop")] = 64,
    load: Annotated[float, typer.Option(min=0.05, max=2, help="of the open loop, to the best other's capacity")] = 0.8,
    rate: Annotated[float | None, typer.Option(help="texts a second of the open loop, in place of --load")] = None,
    threads: Annotated[int, typer.Option(min=1, help="torch threads of each server")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="only this server; may be repeated")] = None,
    peers: Annotated[Path, typer.Option(help="where the other servers' environments are")] = servers.PEERS,
    as_json: Annotated[Path | None, typer.Option("--json", help="write all samples and the summary there")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the picture there (png, svg, pdf)")] = None,
) -> None:
    console = Console(stderr=True)
    texts = make_texts(TEXTS, SEED)
    try:
        if plot:
            plots.check(plot)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-encode-")))
            running, left_out = start(stack, only or (), peers.expanduser(), threads, folder, console)
            if not running:
                raise ConfigError(
                    "no server could be started; see what is left out: " + "; ".join(map(": ".join, left_out))
                )
            left_out += strangers(running)
            with Progress(console=console) as progress:
                task = progress.add_task("measuring", total=2 * rounds * len(running))
                tick = lambda: progress.advance(task)  # noqa: E731
                samples = rounds_of(
                    running, rounds, lambda _: lambda a, t: closed(a, t, in_flight, 1.5 * WARM_S, seconds), texts, tick
                )
                per_second = rate or load * capacity(samples)
                samples += rounds_of(
                    running,
                    rounds,
                    lambda number: lambda a, t: opened(a, t, per_second, WARM_S, open_seconds, SEED + number),
                    texts,
                    tick,
                )
    except (ConfigError, LoadError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    labels = {server.kind.name: server.kind.label for server in running}
    rows = report.summary(samples, labels)
    shown = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    report.show(rows, left_out, in_flight, per_second, shown)
    if as_json:
        as_json.write_bytes(msgspec.json.encode({"summary": rows, "per_second": per_second, "samples": samples}))
    if plot:
        report.draw(plot, samples, labels, in_flight, per_second)


def capacity(samples: Sequence[Sample]) -> float:
    """Texts a second of the best server that is not headway; of headway, if it is alone."""
    rates: dict[str, list[float]] = {}
    for sample in samples:
        rates.setdefault(sample.server, []).append(sample.per_second)
    others = [statistics.median(found) for server, found in rates.items() if server != "headway"]
    return max(others) if others else statistics.median(rates["headway"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers must end, too
    app()
