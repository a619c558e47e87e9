"""How exact is the replayer? Its own lateness, servers with known times, and waiting that nobody may leave out.

    python -m headway.bench.replay_accuracy

Two servers: headway with an echo engine, whose two hops and whose engine's own sleep are the server's time and no error
of measuring; and one that does nothing but wait (`exact_server`) and stamps each request when it is read from the
socket and when its answer goes, so that it is seen where the rest goes: until sending, on the way there, on the way
back.

A measurement and no test: it needs an idle machine of two cores, or a priority that makes it one (chrt -f 10 ...).
"""

import sys
import tempfile
from collections.abc import Sequence

import anyio
import msgspec
from rich.console import Console
from rich.table import Table

from headway.bench.exact_server import Stamps
from headway.bench.replay import job as jobs
from headway.bench.replay.job import Job
from headway.bench.replay.plan import Shaping, Shot, opened
from headway.bench.replay.player import run
from headway.bench.replay.report import Facts, Report, report_of
from headway.bench.replay.seen import Seen
from headway.bench.replay.targets import How
from headway.scheduler import clock
from headway.scheduler.client import Client
from headway.scheduler.errors import HeadwayError

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000
TRIES_MAX = 600
RATE_RPS, SECONDS = 500, 20
LAG_MS_MAX, SERVICE_ERROR_MAX = 2.0, 0.02
SERVICE_MS = (20, 100, 500)
EXACT_MS = (20, 100)
QUEUE_SERVICE_MS, QUEUE_GAP_MS, QUEUE_COUNT = 500, 100, 8
QUEUE_LAST_MS = QUEUE_COUNT * QUEUE_SERVICE_MS - (QUEUE_COUNT - 1) * QUEUE_GAP_MS


def report(seen: Sequence[Seen]) -> Report:
    """The numbers of a replay."""
    return report_of(Facts(source="", target="", mode=""), seen, None)


async def _ready(address: str, models: int) -> None:
    async with Client(address, timeout_ms=60_000) as client:
        for _ in range(TRIES_MAX):
            if len((await client.info()).models) == models:
                return
            await anyio.sleep(0.1)
    raise HeadwayError("no_worker", "the workers of the server did not come")


async def measure(address: str, table: Table) -> None:
    """All of it, a row each."""
    await _ready(address, 1 + len(SERVICE_MS))

    async def play(model: str, shots: list[Shot], concurrency: int = 0) -> list[Seen]:
        job = Job(connect=address, how=How(model=model), concurrency=concurrency)
        return (await jobs.play(job, shots))[0]

    load = opened(f"poisson:rps={RATE_RPS},n={RATE_RPS * SECONDS},tokens=16", Shaping())
    began_ns = clock.cpu_ns()
    found = report(await play("free", load.shots("call")))
    cpu_ns = clock.cpu_ns() - began_ns
    lag = found.times["lag"]
    table.add_row(f"late at {RATE_RPS} requests/s, P50", f"{lag.p50_ms:.3f} ms", "")
    table.add_row("late, P99", f"{lag.p99_ms:.3f} ms", f"≤ {LAG_MS_MAX:g} ms")
    share = cpu_ns / NS_PER_S / SECONDS
    table.add_row("computing for it", f"{cpu_ns / found.requests / 1000:.0f} µs a request, {share:.0%} of a core", "")
    for service_ms in SERVICE_MS:
        count = max(5, 2000 // service_ms)
        shots = [Shot(index, 2 * index * service_ms * NS_PER_MS, 1, 0, "call") for index in range(count)]
        seen = await play(f"t{service_ms}", shots)
        measured = sum(one.done_ns - one.due_ns for one in seen) / count / NS_PER_MS
        truly = sum(one.server_ms or 0.0 for one in seen) / count
        text = f"{measured:.2f} ms, the server says {truly:.2f}, {100 * (measured / truly - 1):+.2f} %"
        table.add_row(f"a service of {service_ms} ms, mean of {count}", text, f"± {SERVICE_ERROR_MAX:.0%}")
    shots = [Shot(index, index * QUEUE_GAP_MS * NS_PER_MS, 1, 0, "call") for index in range(QUEUE_COUNT)]
    for concurrency in (0, 1):
        found = report(await play(f"t{QUEUE_SERVICE_MS}", shots, concurrency))
        last = found.columns["e2el_ms"][-1] / 1000
        limit = "one at once at the replayer" if concurrency else "no limit at the replayer"
        table.add_row(
            f"the last of {QUEUE_COUNT} that queue, {limit}", f"{last:.2f} s", f"{QUEUE_LAST_MS / 1000:.1f} s"
        )


async def measure_exact(address: str, table: Table) -> None:
    """Against a server's own stamps."""
    command = [sys.executable, "-m", "headway.bench.exact_server", address]
    async with await anyio.open_process(command, stderr=None) as server:
        runs = []
        for service_ms in EXACT_MS:
            count, payload = max(5, 2000 // service_ms), msgspec.msgpack.encode(service_ms)
            first = TRIES_MAX * service_ms  # ids of different runs differ
            shots = [
                Shot(first + at, 2 * at * service_ms * NS_PER_MS, 1, 0, "call", payload=payload) for at in range(count)
            ]
            began_ns: list[int] = []
            seen, _ = await jobs.play(Job(connect=address, timeout_ms=60_000), shots, started=began_ns.append)
            runs.append((service_ms, began_ns[0], seen))
        assert server.stdin is not None
        assert server.stdout is not None
        await server.stdin.aclose()
        stamps: Stamps = msgspec.json.decode(b"".join([part async for part in server.stdout]), type=Stamps)
    for service_ms, start_ns, seen in runs:
        legs = [_legs(one, start_ns, *stamps[f"r{one.index}"]) for one in seen]
        late, there, truly, back = (sum(leg) / len(legs) / NS_PER_MS for leg in zip(*legs, strict=True))
        text = f"{late + there + truly + back:.2f} ms, truly {truly:.2f}, {100 * (late + there + back) / truly:+.2f} %"
        table.add_row(f"a bare server of {service_ms} ms, mean of {len(seen)}", text, f"± {SERVICE_ERROR_MAX:.0%}")
        table.add_row("of that late, there, back", f"{late:.3f}, {there:.3f}, {back:.3f} ms", "")


def _legs(one: Seen, start_ns: int, read_ns: int, answered_ns: int) -> tuple[int, int, int, int]:
    """Late, on the way there, at the server, on the way back."""
    read_ns, answered_ns = read_ns - start_ns, answered_ns - start_ns
    return one.sent_ns - one.due_ns, read_ns - one.sent_ns, answered_ns - read_ns, one.done_ns - answered_ns


async def main() -> None:
    """Servers in processes of their own, and the measurements."""
    table = Table()
    for head in ("", "measured", "aim"):
        table.add_column(head, justify="right" if head else "left")
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        address, settings = f"ipc://{folder}/s", f"{folder}/s.yaml"
        models = ["{name: free, engine: echo}"]
        models += [f"{{name: t{ms}, engine: echo, max_batch: 1, options: {{fixed_ms: {ms}}}}}" for ms in SERVICE_MS]
        with open(settings, "w") as file:  # noqa: ASYNC230 - before anything runs
            file.write(f"bind: {address}\nlog_level: error\nmodels: [{', '.join(models)}]\n")
        server = await anyio.open_process(
            [sys.executable, "-m", "headway", "serve", "--config", settings], stdout=None, stderr=None
        )
        try:
            await measure(address, table)
            await measure_exact(f"ipc://{folder}/exact", table)
        finally:
            server.terminate()
            await server.wait()
    Console(width=140).print(table)


if __name__ == "__main__":
    run(main())
