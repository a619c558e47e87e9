"""What headway costs: the router with an echo worker against raw two-hop brokers, alternating in one run, as ratios.

    python -m headway.bench.overhead [--seconds 3] [--rounds 5] [--json FILE]

Both are driven by the same closed-loop client over one DEALER socket with 1, 32 and 256 requests outstanding. With two
cores or more the servers are pinned to one and the client to another, so that both have the same. Every round measures
each server at each concurrency, in an order that alternates; medians over rounds are shown, and the ratio is the median
of the ratios of each round. At one outstanding request the latency matters; at many, the throughput.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import zmq
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.bench import core_speed, raw_broker
from headway.scheduler import clock

CONCURRENCY = (1, 32, 256)
WARM_S = 0.3
START_MS = 60_000
ROUND_TRIP_MS = 30_000
SERVERS = ("single", "batched", "headway")

CONFIG = """
bind: {address}
log_level: warning
models:
  - name: echo
    engine: echo
    max_batch: 32
    max_num_seqs: 1024
"""


class Sample(msgspec.Struct, frozen=True):
    """One measurement. Latency in milliseconds."""

    server: str
    concurrency: int
    per_second: float
    p50_ms: float
    p99_ms: float


def closed_loop(address: str, concurrency: int, seconds: float) -> list[float]:
    """Keep `concurrency` requests outstanding for `seconds`; the latencies in ms of those that ended in that time."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.set_hwm(0)
    sock.connect(address)
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    sent: dict[str, int] = {}
    latencies: list[float] = []
    number = 0
    begin = clock.now_ns() + int(WARM_S * clock.NS_PER_S)
    end = begin + int(seconds * clock.NS_PER_S)

    def send() -> None:
        nonlocal number
        number += 1
        sent[str(number)] = clock.now_ns()
        sock.send(encode({"type": "call", "id": str(number), "payload": number}))

    try:
        for _ in range(concurrency):
            send()
        while sent:
            if not sock.poll(ROUND_TRIP_MS):
                raise TimeoutError(f"{address} left {len(sent)} requests unanswered for {ROUND_TRIP_MS} ms")
            while True:
                try:
                    answer = decode(sock.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                if answer["type"] != "result":
                    raise RuntimeError(f"{address} answered {answer}")
                now = clock.now_ns()
                started = sent.pop(answer["id"])
                if begin <= now < end:
                    latencies.append((now - started) / clock.NS_PER_MS)
                if now < end:
                    send()
    finally:
        context.destroy(0)
    return latencies


def measure(server: str, address: str, concurrency: int, seconds: float) -> Sample:
    """One closed-loop measurement."""
    latencies = sorted(closed_loop(address, concurrency, seconds))
    p99 = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]
    return Sample(server, concurrency, len(latencies) / seconds, statistics.median(latencies), p99)


def free_address() -> str:
    """A loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def running(command: list[str], cores: set[int]) -> Iterator[None]:
    """A server process, pinned to `cores`; ended with the block."""
    process = subprocess.Popen(command)
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_answers(address: str) -> None:
    """Return when the server answers a request."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(address)
    limit = clock.now_ns() + START_MS * clock.NS_PER_MS
    try:
        for number in range(1 << 30):
            sock.send(msgspec.msgpack.encode({"type": "call", "id": f"up{number}", "payload": 1}))
            if sock.poll(200) and msgspec.msgpack.decode(sock.recv())["type"] == "result":
                return
            if clock.now_ns() > limit:
                raise TimeoutError(f"no server answered on {address} within {START_MS} ms")
    finally:
        context.destroy(0)


def compare(seconds: float, rounds: int) -> list[Sample]:
    """Both servers side by side, measured in turns."""
    cores = sorted(os.sched_getaffinity(0))
    mine, theirs = ({cores[1]}, {cores[0]}) if len(cores) > 1 else (set(cores), set(cores))
    address = {server: free_address() for server in SERVERS}
    samples: list[Sample] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-"))
        config = Path(folder) / "headway.yaml"
        config.write_text(CONFIG.format(address=address["headway"]))
        python = [sys.executable, "-m"]
        for floor in raw_broker.BROKERS:
            stack.enter_context(running([*python, "headway.bench.raw_broker", floor, address[floor]], theirs))
        stack.enter_context(running([*python, "headway", "serve", "--config", str(config)], theirs))
        os.sched_setaffinity(0, mine)
        stack.callback(os.sched_setaffinity, 0, set(cores))
        for server in SERVERS:
            wait_until_answers(address[server])
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("measuring", total=rounds * len(CONCURRENCY) * len(SERVERS))
            for number in range(rounds):
                for concurrency in CONCURRENCY:
                    for server in SERVERS if number % 2 else SERVERS[::-1]:
                        samples.append(measure(server, address[server], concurrency, seconds))
                        progress.advance(task)
    return samples


def summary(samples: list[Sample]) -> list[dict[str, float]]:
    """For each concurrency: medians over rounds, and the medians of the rounds' ratios to each floor."""
    rows = []
    for concurrency in CONCURRENCY:
        of = {name: [s for s in samples if (s.server, s.concurrency) == (name, concurrency)] for name in SERVERS}
        row: dict[str, float] = {"concurrency": concurrency}
        for name, found in of.items():
            row[f"{name}_per_s"] = statistics.median(s.per_second for s in found)
            row[f"{name}_p50_ms"] = statistics.median(s.p50_ms for s in found)
            row[f"{name}_p99_ms"] = statistics.median(s.p99_ms for s in found)
        for floor in raw_broker.BROKERS:
            pairs = list(zip(of["headway"], of[floor], strict=True))
            row[f"ratio_to_{floor}"] = statistics.median(ours.per_second / raw.per_second for ours, raw in pairs)
            row[f"added_to_{floor}_ms"] = statistics.median(ours.p50_ms - raw.p50_ms for ours, raw in pairs)
        rows.append(row)
    return rows


COLUMNS = (
    ("in flight", "concurrency", ",.0f"),
    ("headway /s", "headway_per_s", ",.0f"),
    ("single /s", "single_per_s", ",.0f"),
    ("ratio", "ratio_to_single", ".2f"),
    ("batched /s", "batched_per_s", ",.0f"),
    ("ratio", "ratio_to_batched", ".2f"),
    ("P50 ms", "headway_p50_ms", ".2f"),
    ("P99 ms", "headway_p99_ms", ".2f"),
    ("added P50 ms", "added_to_single_ms", ".2f"),
)


def show(rows: list[dict[str, float]], console: Console) -> None:
    """The table."""
    title = "headway with an echo worker, against raw two-hop brokers (message by message; in batches of 32)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, _, _ in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(format(row[key], form) for _, key, form in COLUMNS))
    console.print(table)


def main() -> None:
    """Run the comparison and the core's own speed, and print both."""
    parser = argparse.ArgumentParser(prog="python -m headway.bench.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all samples and the summary there")
    options = parser.parse_args()
    console = Console()
    samples = compare(options.seconds, options.rounds)
    rows = summary(samples)
    show(rows, console)
    core_speed.show()
    if options.json:
        options.json.write_text(json.dumps({"summary": rows, "samples": msgspec.to_builtins(samples)}, indent=1))


if __name__ == "__main__":
    main()
