"""The live side: a server of its own with a flight record, and loads played on it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import yaml

from headway.bench.ab.steps import Seen as Step
from headway.bench.ab.steps import steps_in
from headway.bench.generate import ways
from headway.bench.overhead import free_address
from headway.bench.replay import job as jobs
from headway.bench.replay.job import Job
from headway.bench.replay.plan import Shaping, shots_of
from headway.bench.replay.player import Told, run
from headway.bench.replay.seen import OK, Seen
from headway.bench.sim.arrivals import NS_PER_MS, NS_PER_S, Arrivals, ints, plain
from headway.bench.sim.synthetic import ClosedLoop
from headway.scheduler.errors import HeadwayError
from headway.scheduler.spec import ModelSpec, ServerSpec

Range = tuple[int, int]
READY_MS = 60_000
LOST_MS = 120_000  # on a machine that others use a worker may be silent for long; it is slow then, not lost


@dataclass(frozen=True)
class Server:
    """A server that runs. `spec`: its settings."""

    address: str
    flight: Path
    spec: ServerSpec

    @property
    def model(self) -> ModelSpec:
        """The one model."""
        return self.spec.models[0]

    def play(self, load: Arrivals | ClosedLoop, told: Told | None = None) -> list[Seen]:
        """All requests of the load, in its order."""
        clients = load.clients if isinstance(load, ClosedLoop) else 0
        job = Job(connect=self.address, clients=clients, timeout_ms=READY_MS)
        seen, _ = run(jobs.play(job, shots_of(load, Shaping(), kind="generate"), told=told))
        return sorted(seen, key=lambda one: one.index)

    def steps(self, since_ns: int = 0) -> list[Step]:
        """The steps that were recorded until now, after a time of the steady clock."""
        return [step for step in steps_in(self.flight) if step.at_ns > since_ns]


@contextmanager
def started(folder: Path, model: str, threads: int, workers: int) -> Iterator[Server]:
    """`headway serve` with its defaults and a flight record. Raises CannotStartError."""
    address, flight, config = free_address(), folder / "flight.msgpack", folder / "serve.yaml"
    keys = {"name": "m", "engine": "generate", "model": model, "threads": threads, "workers": workers}
    values: dict[str, Any] = {"bind": address, "flight_record": str(flight), "lost_after_ms": LOST_MS, "models": [keys]}
    values["log_level"] = "warning"
    config.write_text(yaml.safe_dump(values))
    process = subprocess.Popen([sys.executable, "-m", "headway", "serve", "--config", str(config)])
    try:
        anyio.run(ways.until_ready, address, process, workers)
        yield Server(address, flight, ServerSpec.model_validate(values))
    finally:
        ways.stop(process)


# ---------------------------------------------------------------- loads


def poisson(count: int, rate: float, prompts: Range, answers: Range, seed: int) -> Arrivals:
    """`count` requests at `rate` a second; lengths are uniform in their logarithm."""
    rng = np.random.default_rng([seed, 21])
    at = np.cumsum(rng.exponential(NS_PER_S / rate, count))
    tokens, new = _lengths(prompts, count, rng), _lengths(answers, count, rng)
    return plain(f"{rate:.2f} requests/s", ints(np.rint(at - at[0])), tokens, new)


def closed(count: int, clients: int, prompts: Range, answers: Range, seed: int) -> ClosedLoop:
    """`clients` who wait for their answers."""
    rng = np.random.default_rng([seed, 22])
    return ClosedLoop(clients, 0, _lengths(prompts, count, rng), _lengths(answers, count, rng))


def _lengths(between: Range, count: int, rng: np.random.Generator) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    low, high = between
    return ints(np.floor(np.exp(rng.uniform(np.log(low), np.log(high + 1), count))))


def capacity_rps(seen: list[Seen], clients: int) -> float:
    """What a closed loop shows to be possible: endings a second while all its clients are busy. Raises HeadwayError."""
    if bad := next((one for one in seen if one.code != OK), None):
        raise HeadwayError(bad.code, f"a request ended with {bad.code}: {bad.message}")
    done = sorted(one.done_ns for one in seen)
    busy = done[: max(2, len(done) - clients)]
    return (len(busy) - 1) * NS_PER_S / max(1, busy[-1] - busy[0])


def way_ms(seen: list[Seen]) -> float:
    """What a client waits beyond what the server counts: there and back, median."""
    over = [one.done_ns - one.sent_ns - one.server_ms * NS_PER_MS for one in seen if one.server_ms is not None]
    return max(0.0, float(np.median(over)) / NS_PER_MS) if over else 0.0
