"""Made-up workers that do everything a worker should not: fail, forget, lie, repeat themselves, die, come back.

A machine is told what the core wants (`take`, `drop`) and says when its next piece of work ends (`begin`) and what it
then reports (`end`). It never looks at the core. What it draws comes from a generator of its own, so that a storm from
which something was left out still treats the others alike. A request's trait does what it says in calm weather, too.
"""

import random
from collections import deque
from collections.abc import Callable

from headway.bench.storm.plan import Ask, Join
from headway.scheduler import actions as act
from headway.scheduler import events as ev

PREFILL_TOKENS = 256  # that an engine reads in one step
CALL_US_PER_TOKEN = 10
MEMORY_ABOVE = 2  # a "memory" request fails its batch if that has more requests

Key = tuple[int, int]  # (batch, rid)


class DiedError(Exception):
    """The worker's process is gone."""


class Machine:
    """One worker process. `asks`: what each request is; `calm`: whether the storm is over."""

    def __init__(self, number: int, join: Join, iteration: bool, asks: dict[int, Ask], seed: int) -> None:
        self.number = number
        self.join = join
        self.iteration = iteration
        self.progress = 0
        self.stalled_until_ns = 0
        self.silent_until_ns = 0
        self.turn = 0  # which piece of work is under way, counted; 0: none is
        self.calm = False
        self._asks = asks
        self._rng = random.Random(f"worker {number} of {seed}")
        self._dropped: set[Key] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}{' busy' if self.busy else ''}>"

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        raise NotImplementedError

    def drop(self, action: act.Drop) -> None:
        """Somebody does not want these any more."""
        self._dropped.update((action.batch, rid) for rid in action.rids)

    def _unruly(self) -> bool:
        return not self.calm and self._rng.random() < self.join.unruly

    def _forgets(self) -> bool:
        return not self.calm and self._rng.random() < self.join.forgetful

    def beats(self) -> bool:
        """Whether the next heartbeat gets through."""
        return self.calm or self._rng.random() >= self.join.deaf

    def _traits(self, rids: list[int]) -> set[str]:
        return {self._asks[rid].trait for rid in rids if rid in self._asks}

    def _some(self, rids: list[int]) -> tuple[int, ...]:
        return tuple(self._rng.sample(rids, self._rng.randint(1, len(rids))))


class OneShot(Machine):
    """Runs one batch after the other, each as a whole."""

    def __init__(self, number: int, join: Join, iteration: bool, asks: dict[int, Ask], seed: int) -> None:
        super().__init__(number, join, iteration, asks, seed)
        self._batches: deque[act.Dispatch] = deque()
        self._rest: list[ev.Event] = []  # what is still to be said of the last batch
        self._took_us = 0

    @property
    def busy(self) -> bool:
        return bool(self._batches or self._rest)

    def take(self, action: act.Dispatch) -> None:
        """A batch more."""
        if not self._forgets():
            self._batches.append(action)

    def begin(self) -> int:
        """Microseconds until the next report."""
        if self._rest:
            return 1_000
        tokens = sum(self._asks[rid].tokens for rid in self._batches[0].rids)
        self._took_us = self.join.step_us + tokens * CALL_US_PER_TOKEN
        return self._took_us

    def end(self) -> list[ev.Event]:
        """The reports that are due now. Raises DiedError."""
        self.progress += 1
        if self._rest:
            return [self._rest.pop(0)]
        batch = self._batches.popleft()
        rids = list(batch.rids)
        traits = self._traits(rids)
        if traits & {"poison", "late_poison"}:
            raise DiedError(f"request of batch {batch.batch} killed it")
        if "memory" in traits and len(rids) > MEMORY_ABOVE:
            return [ev.BatchFailed(self.number, batch.batch, "out_of_memory", "no memory")]
        if "culprit" in traits:
            return [ev.BatchFailed(self.number, batch.batch, "engine_error", "boom")]
        reports: list[ev.Event] = self._mistake(batch, rids) if self._unruly() else [self._done(batch, rids)]
        if self._unruly():
            self._rest.append(reports[0])  # says it twice
        return reports

    def _done(self, batch: act.Dispatch, rids: list[int]) -> ev.BatchDone:
        sizes = [self._asks[rid].tokens for rid in rids]
        tokens = max(sizes) * len(sizes) if self.join.padded else sum(sizes)
        bad = [(rid, "engine_error", "this one only") for rid in rids if self._asks[rid].trait == "fails"]
        bad += [(rid, "cancelled", "dropped") for rid in rids if (batch.batch, rid) in self._dropped]
        return ev.BatchDone(self.number, batch.batch, self._took_us * 1_000, tokens, tuple(bad))

    def _mistake(self, batch: act.Dispatch, rids: list[int]) -> list[ev.Event]:
        done = self._done(batch, rids)
        draw = self._rng.randrange(5)
        if draw == 0:
            return [ev.BatchFailed(self.number, batch.batch, "out_of_memory", "no memory")]
        if draw == 1:
            self._rest.append(done)
            return [ev.BatchFailed(self.number, batch.batch, "engine_error", "a part", self._some(rids))]
        if draw == 2:
            return [ev.BatchFailed(self.number, batch.batch, "engine_error", "odd names", (*self._some(rids), 987_654))]
        if draw == 3:
            bad = tuple((rid, "engine_error", "some") for rid in (*self._some(rids), 987_654))
            return [ev.BatchDone(self.number, batch.batch, 0, 0, bad)]
        raise DiedError("it crashed just so")


class Engine(Machine):
    """Runs all requests it holds at once, a step at a time; they join and leave between steps."""

    def __init__(self, number: int, join: Join, iteration: bool, asks: dict[int, Ask], seed: int) -> None:
        super().__init__(number, join, iteration, asks, seed)
        self._rows: dict[Key, list[int]] = {}  # (batch, rid) -> [tokens to read, tokens to make, tokens made]

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def take(self, action: act.Dispatch) -> None:
        """Requests join."""
        for rid in action.rids:
            if not self._forgets():
                ask = self._asks[rid]
                self._rows[(action.batch, rid)] = [ask.tokens, max(1, ask.max_new), 0]

    def begin(self) -> int:
        """Microseconds until the step ends."""
        return self.join.step_us

    def end(self) -> list[ev.Event]:
        """What the step reports. Raises DiedError."""
        self.progress += 1
        failed = self._failed()
        rows = [row for key in list(self._rows) for row in self._row(key)]
        if rows and self._unruly():
            rows = self._mistake(rows)
        tokens = sum(row.new for row in rows)
        cache = min(self._cached(), self.join.kv_tokens), self.join.kv_tokens
        step = ev.StepDone(self.number, self.join.step_us * 1_000, tokens, max(1, len(rows)), tuple(rows), *cache)
        return [*failed, step]

    def _cached(self) -> int:
        return sum(self._asks[rid].tokens + made for (_, rid), (_, _, made) in self._rows.items())

    def _failed(self) -> list[ev.Event]:
        """Rows that break the step they are in take all of it along; the engine says which rows those were."""
        broken = [(key, self._asks[key[1]].trait) for key in self._rows]
        code = next((trait for _, trait in broken if trait in ("culprit", "memory")), "")
        if code == "memory" and len(self._rows) <= MEMORY_ABOVE:
            return []
        if not code and not (self._unruly() and self._rng.random() < 0.3):
            return []
        said = "out_of_memory" if code == "memory" else "engine_error"
        by_batch: dict[int, list[int]] = {}
        for batch, rid in self._rows:
            by_batch.setdefault(batch, []).append(rid)
        self._rows.clear()
        return [ev.BatchFailed(self.number, batch, said, "boom", tuple(rids)) for batch, rids in by_batch.items()]

    def _row(self, key: Key) -> list[ev.RowDone]:
        left = self._rows[key]
        trait = self._asks[key[1]].trait
        if key in self._dropped:
            del self._rows[key]
            return [ev.RowDone(*key, 0, "dropped")]
        if trait == "poison" or (trait == "late_poison" and left[2]):
            raise DiedError(f"request {key[1]} killed it")
        left[0] -= PREFILL_TOKENS
        if left[0] > 0:
            return []
        left[1] -= 1
        left[2] += 1
        finish = "" if left[1] else "length"
        if trait == "fails":
            finish = "error"
        if finish:
            del self._rows[key]
        return [ev.RowDone(*key, 1, finish, "engine_error" if finish == "error" else "")]

    def _mistake(self, rows: list[ev.RowDone]) -> list[ev.RowDone]:
        """Says something twice, about nobody, or ends what goes on."""
        row = self._rng.choice(rows)
        draw = self._rng.randrange(6)
        if draw == 0:
            return [*rows, row]
        if draw == 1:
            return [*rows, ev.RowDone(row.batch, 987_654, 1, "stop")]
        if draw == 2:
            self._rows.pop((row.batch, row.rid), None)
            return [*rows, ev.RowDone(row.batch, row.rid, 0, "error", "", "")]
        if draw == 3:  # ended, and goes on reporting
            return [*rows, ev.RowDone(row.batch, row.rid, 2, "stop")]
        if draw == 4:
            return [ev.RowDone(row.batch + 1, row.rid, 1, "stop"), *rows]
        raise DiedError("it crashed just so")


MAKE: dict[bool, Callable[..., OneShot | Engine]] = {False: OneShot, True: Engine}
