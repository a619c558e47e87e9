"""How far simulated latencies are from live ones: a real server, three loads, and the simulator on the same arrivals.

    python -m headway.bench.simulated_live            # about six minutes, alone on a quiet machine
    python -m headway.bench.simulated_live --quick

A server with the default model and a flight record is started. A closed loop finds its capacity and a Poisson load at
TRAIN of it follows; from the steps of these two the simulator's engine is fitted (bench/ab/steps.py), and from nothing
else. Then three other loads are played live, and simulated with that engine, as it is and at the pace that the machine
then had. Exit code 1: a mean or a P95 at that pace is further off than --within. docs/tuning.md says more.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from headway.bench.ab.steps import fitted, pace
from headway.bench.generate.options import range_of
from headway.bench.replay.seen import Seen
from headway.bench.sim.arrivals import Arrivals
from headway.bench.sim.compare import Setting
from headway.bench.sim.engines import PRESETS, Engine
from headway.bench.sim.steps import StepCost
from headway.bench.sim.synthetic import ClosedLoop
from headway.bench.simulated_live import live, report
from headway.scheduler import clock

SHARES = (0.3, 0.6, 0.85)
TRAIN, TRAIN_TIME = 0.6, 0.2  # of the capacity, and of the time
CLOSED_ROUNDS = 4  # requests of each client
QUICK_REQUESTS = 24
WIDTH_PIPED = 120

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=(__doc__ or "").split("\n\n")[0])
def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="of measuring, about")] = 6.0,
    requests: Annotated[int, typer.Option(min=0, help="of each load; 0: as many as there is time for")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_REQUESTS} requests of each load: it works, and says little")
    ] = False,
    model: Annotated[str, typer.Option(help="a folder, a hub id or a packaged model")] = "smollm2",
    threads: Annotated[int, typer.Option(min=1, help="of a worker")] = 1,
    workers: Annotated[int, typer.Option(min=1)] = 1,
    prompt: Annotated[str, typer.Option(metavar="LOW:HIGH", help="tokens of a prompt")] = "8:96",
    output: Annotated[str, typer.Option(metavar="LOW:HIGH", help="tokens of an answer")] = "4:24",
    within: Annotated[float, typer.Option(min=0, help="how far off means and P95 may be")] = 0.15,
    seed: Annotated[int, typer.Option(min=0, help="of lengths and arrivals")] = 1,
    json: Annotated[Path, typer.Option(metavar="FILE")] = Path("simulated-live.json"),
) -> None:
    lengths = Lengths(range_of(prompt), range_of(output), seed)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-")))
        console.print("the server loads its model", style="dim")
        server = stack.enter_context(live.started(folder, model, threads, workers))
        bar = stack.enter_context(Progress(console=Console(stderr=True)))
        subject = Subject(server, bar)
        learned = _learn(subject, lengths, 0.1 if quick else minutes)
        bar.console.print(learned.words)
        count = QUICK_REQUESTS if quick else requests or learned.count(60 * minutes * (1 - TRAIN_TIME))
        loads = [
            _tried(subject, learned, share, lengths.poisson(count, share * learned.limit_rps, number))
            for number, share in enumerate(SHARES)
        ]
    console.print(report.shown(loads, within))
    facts = {"model": model, "threads": threads, "workers": workers, "prompt": prompt, "output": output, "seed": seed}
    json.write_bytes(report.as_json(loads, facts | learned.facts))
    worst, lost = max(load.worst for load in loads), sum(load.lost for load in loads)
    console.print(f"worst of means and P95, at its pace: {worst:.1%} (aim: {within:.0%}); {lost} without an answer")
    console.print(f"written: {json}")
    raise typer.Exit(0 if worst <= within and not lost else 1)


# ---------------------------------------------------------------- the parts of it


@dataclass(frozen=True)
class Lengths:
    """Of prompts and answers, in all loads."""

    prompts: live.Range
    answers: live.Range
    seed: int

    def poisson(self, count: int, rate: float, number: int) -> Arrivals:
        return live.poisson(count, rate, self.prompts, self.answers, self.seed + number)

    def closed(self, count: int, clients: int) -> ClosedLoop:
        return live.closed(count, clients, self.prompts, self.answers, self.seed)


class Subject:
    """The server, played on with a bar that shows how far it is."""

    def __init__(self, server: live.Server, bar: Progress) -> None:
        self.server, self._bar = server, bar
        model = server.model
        self.setting = Setting(  # until its engine is fitted
            PRESETS["gen"],
            server.spec.policy,
            workers=model.workers,
            max_batch=model.max_batch,
            max_num_seqs=model.max_num_seqs,
        )

    def play(self, what: str, load: Arrivals | ClosedLoop) -> list[Seen]:
        """All requests of a load."""
        task = self._bar.add_task(what, total=len(load))
        seen = self.server.play(load, lambda _fired, ended: self._bar.update(task, completed=ended))
        self._bar.update(task, completed=len(load))
        return seen

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Something that has no steps to be shown."""
        task = self._bar.add_task(what, total=1)
        yield
        self._bar.update(task, completed=1)


@dataclass(frozen=True)
class Learned:
    """What the training showed."""

    limit_rps: float
    way_ms: float
    engine: Engine
    cost: StepCost
    steps: int

    @property
    def words(self) -> str:
        engine, cost = self.engine, self.cost
        line = f"{engine.a_ms:.1f} ms + {engine.b_ms:.2f} a token + {engine.m_ms:.2f} a row"
        between = f"{cost.gap_ms:.2f} ms between steps, {cost.wake_ms:.2f} to wake, {self.way_ms:.2f} to the client"
        return f"capacity {self.limit_rps:.2f} requests/s; {self.steps:,} steps: about {line}; {between}"

    @property
    def facts(self) -> dict[str, object]:
        cost = self.cost
        fit = {"ms": cost.ms, "gap_ms": cost.gap_ms, "wake_ms": cost.wake_ms}
        return {"capacity_rps": self.limit_rps, "way_ms": self.way_ms, "steps": self.steps, "fit": fit}

    def count(self, span_s: float) -> int:
        """Requests of each load, if all loads together have so much time."""
        return max(QUICK_REQUESTS, round(span_s * self.limit_rps / sum(1 / share for share in SHARES)))


def _learn(subject: Subject, lengths: Lengths, minutes: float) -> Learned:
    """A closed loop and a Poisson load, and what their steps cost."""
    clients = subject.setting.rows * subject.setting.workers
    full = subject.play(f"{clients} clients, for the capacity", lengths.closed(CLOSED_ROUNDS * clients, clients))
    limit = live.capacity_rps(full, clients)
    count = max(QUICK_REQUESTS, round(60 * minutes * TRAIN_TIME * TRAIN * limit))
    load = lengths.poisson(count, TRAIN * limit, len(SHARES))
    seen = subject.play(f"learning at {TRAIN:g} of {limit:.2f} requests/s", load)
    steps = subject.server.steps()
    engine = fitted(steps, "fitted", subject.server.model.step_tokens)
    assert engine.steps is not None  # fitted ones have them
    return Learned(limit, live.way_ms(seen), engine, engine.steps, len(steps))


def _tried(subject: Subject, learned: Learned, share: float, load: Arrivals) -> report.Load:
    """One load live, and simulated."""
    began_ns = clock.now_ns()
    seen = subject.play(f"live at {share:g}", load)
    steps = subject.server.steps(began_ns)
    rows = sum(step.shape.rows + step.shape.chunks for step in steps) / max(1, len(steps))
    setting = replace(subject.setting, engine=learned.engine)
    with subject.busy(f"simulated at {share:g}"):
        slowness = pace(steps, learned.cost)
        return report.load_of(share, load, seen, setting, way_ms=learned.way_ms, pace=slowness, rows=rows)


if __name__ == "__main__":
    app()
