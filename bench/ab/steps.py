"""What a step cost live, found in a flight record: an engine for the simulator that costs as much.

The core is told of each step with its tokens, its rows and the time it took, so nothing has to be guessed from whole
requests. How prompts were cut is not told; it follows from how many of their tokens were in the step and the rule that
workers keep (`workers/generate/shares.py`). Fitted are the numbers of `bench/sim/steps.py`, none below zero, by least
squares of relative errors in which a step counts for less the further it is off (Huber 1964). What the fit leaves over,
measured over fitted, is kept in its order and played again: the machine's noise, and the mean of it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.bench.replay import rerun
from headway.bench.sim.engines import Engine
from headway.bench.sim.iteration import shared_out
from headway.bench.sim.steps import Shape, StepCost, columns
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.blackbox import Step
from headway.scheduler.clock import NS_PER_MS
from headway.scheduler.config import ConfigError

Floats = npt.NDArray[np.float64]
Key = tuple[int, int]  # (batch, rid)

STEPS_MIN = 50  # that a fit needs
HUBER = 0.1  # further off than this share, a step counts for less
ROUNDS, SWEEPS = 6, 400
RATIO_MAX = 20.0  # past it a step was held up by what is no part of serving
HELD_UP_MS = 1000.0  # the same, between two steps


class Seen(NamedTuple):
    """One step as it was. `gap_ms`: since the end of the one before; `wake_ms`: of one that began on an idle worker,
    from the decision to its report beyond its own time. One of the two is None."""

    at_ns: int
    shape: Shape
    took_ms: float
    gap_ms: float | None
    wake_ms: float | None


@dataclass(eq=False)
class _Worker:
    """What is known of one while the record is read."""

    reading: dict[Key, int] = field(default_factory=dict)  # what is left to read, oldest first
    decoding: dict[Key, int] = field(default_factory=dict)  # the length of its text so far
    sent_ns: dict[Key, int] = field(default_factory=dict)
    last_ns: int = 0
    goes_on: bool = False

    def step(self, event: ev.StepDone, now_ns: int, tokens: dict[int, int]) -> Seen | None:
        """The step that was reported; None if nothing was computed."""
        began_ns = now_ns - event.compute_ns
        new = [(row.batch, row.rid) for row in event.rows if row.new]
        rows = [key for key in new if key in self.decoding]
        read = event.tokens - len(rows)
        there = {key: left for key, left in self.reading.items() if self.sent_ns[key] <= began_ns or key in new}
        seen = None
        if event.tokens and read >= 0 and (rows or there):
            shares = shared_out(there, read)
            pieces = [(tokens[key[1]] - there[key], share) for key, share in shares]
            shape = Shape.of(len(rows), read, sum(self.decoding[key] for key in rows), pieces)
            gap = wake = None
            if self.goes_on:
                gap = max(0.0, (began_ns - self.last_ns) / NS_PER_MS)
            else:
                wake = max(0.0, (began_ns - min(self.sent_ns[key] for key in there or rows)) / NS_PER_MS)
            seen = Seen(now_ns, shape, event.compute_ns / 1e6, gap, wake)
            for key, share in shares:
                self.reading[key] = max(1, self.reading[key] - share)
        self._book(event, tokens)
        self.last_ns = now_ns
        self.goes_on = bool(self.decoding or self.reading)
        return seen

    def _book(self, event: ev.StepDone, tokens: dict[int, int]) -> None:
        for row in event.rows:
            key = (row.batch, row.rid)
            if row.new:
                self.reading.pop(key, None)
                self.decoding[key] = self.decoding.get(key, tokens[row.rid]) + row.new
            if row.finish:
                for where in (self.reading, self.decoding, self.sent_ns):
                    where.pop(key, None)


def steps_in(path: Path) -> list[Seen]:
    """All steps of generating workers in a flight record, in order. Raises ConfigError."""
    return list(_seen(one for one in rerun.read(path) if isinstance(one, Step)))


def _seen(steps: Iterable[Step]) -> Iterator[Seen]:
    tokens: dict[int, int] = {}
    workers: dict[int, _Worker] = {}
    for step in steps:
        for event in step.event.events if isinstance(step.event, ev.Together) else [step.event]:
            if isinstance(event, ev.Submit):
                tokens[event.rid] = max(1, event.tokens)
            elif isinstance(event, ev.StepDone):
                seen = workers.setdefault(event.worker, _Worker()).step(event, step.now_ns, tokens)
                if seen is not None:
                    yield seen
        for action in step.actions:
            if isinstance(action, act.Dispatch):
                worker = workers.setdefault(action.worker, _Worker())
                worker.reading |= {(action.batch, rid): tokens[rid] for rid in action.rids}
                worker.sent_ns |= {(action.batch, rid): step.now_ns for rid in action.rids}


# ---------------------------------------------------------------- the fit


def fitted(steps: list[Seen], name: str, step_tokens: int) -> Engine:
    """An engine that costs as these steps did. Raises ConfigError if they are too few."""
    if len(steps) < STEPS_MIN:
        raise ConfigError(f"{len(steps)} steps of a generating worker are too few to fit a cost to; {STEPS_MIN} do")
    x = np.asarray([columns(step.shape) for step in steps])
    took = np.asarray([step.took_ms for step in steps])
    ms = _fit(x, took)
    ratios = np.minimum(took / np.maximum(x @ ms, 1e-6), RATIO_MAX)
    gaps = [step.gap_ms for step in steps if step.gap_ms is not None]
    wakes = [step.wake_ms for step in steps if step.wake_ms is not None]
    cost = StepCost(tuple(ms.tolist()), _held(gaps), _held(wakes), tuple(ratios.tolist()))
    a, b, m = _fit(np.stack([x[:, 0], x[:, 1:-3].sum(axis=1), x[:, -3]], axis=1), took).tolist()
    return Engine(name, a, b, m, iteration=True, step_tokens=step_tokens, steps=cost)


def _held(times: list[float]) -> float:
    """The mean, of what is no accident."""
    usual = [one for one in times if one < HELD_UP_MS]
    return float(np.mean(usual)) if usual else 0.0


def _fit(x: Floats, took: Floats) -> Floats:
    """Non-negative weighted least squares, weighted anew ROUNDS times."""
    found, scale = np.zeros(x.shape[1]), took
    weight = np.ones(len(took))
    for _ in range(ROUNDS):
        rows = x * (np.sqrt(weight) / scale)[:, None]
        found = _non_negative(rows.T @ rows, rows.T @ (np.sqrt(weight) * took / scale))
        made = np.maximum(x @ found, 1e-3)
        scale = made
        weight = np.minimum(1.0, HUBER / np.maximum(1e-9, np.abs(took / made - 1)))
    return found


def _non_negative(gram: Floats, moment: Floats) -> Floats:
    """The least squares solution without negative numbers, one coordinate after the other (Franc et al. 2005)."""
    found = np.zeros(len(moment))
    live = np.flatnonzero(np.diag(gram) > 0)
    for _ in range(SWEEPS):
        for at in live:
            found[at] = max(0.0, found[at] + (moment[at] - gram[at] @ found) / gram[at, at])
    return found


def pace(steps: Iterable[Seen], cost: StepCost) -> float:
    """How much longer than `cost` says these steps took, all together, as a ratio: the machine's pace then."""
    pairs = [(step.took_ms, cost.step_ms(step.shape)) for step in steps]
    took, made = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return took / made if made else 1.0
