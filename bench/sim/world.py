"""The virtual world: the real core, N made-up workers, a load, and nothing that waits.

The third shell of the core beside the router and the embedded scheduler. Time jumps from one happening to the next, so
an hour is a matter of seconds. Things that happen at one nanosecond are taken in together, as the live shell does with
what it finds in its sockets. Workers never fall silent, so beats are left out. Nothing depends on hash order or on the
machine: the same load, settings and seed give the same run, to the nanosecond.

No Python object is made for a request beyond the core's own; what is known about it lies in arrays.
"""

import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headway.bench.sim.arrivals import Arrivals
from headway.bench.sim.engines import Engine, Noise
from headway.bench.sim.iteration import IterationMachine
from headway.bench.sim.sources import Load
from headway.bench.sim.synthetic import ClosedLoop
from headway.policies.views import Policies
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.book import NEVER_NS
from headway.scheduler.core import Core

SILENT_NS = 1 << 61  # no made-up worker is ever lost or stuck
PROGRESS_EVERY = 4096  # requests between two words to whoever watches
PENDING, OK = 0, 1

Watch = Callable[[int], None]


class Machine(Protocol):
    """A made-up worker."""

    number: int
    busy_ns: int

    def take(self, action: act.Dispatch) -> None: ...
    def drop(self, action: act.Drop) -> None: ...
    def begin(self, now_ns: int) -> int | None: ...
    def end(self, now_ns: int) -> ev.Event: ...


class OneShotMachine:
    """A worker that runs a batch as a whole. A dropped request stays in it: its time is spent all the same."""

    def __init__(self, number: int, engine: Engine, noise: Noise, tokens: list[int], max_new: list[int]) -> None:
        self.number = number
        self.busy_ns = 0
        self._engine = engine
        self._noise = noise
        self._tokens = tokens
        self._max_new = max_new
        self._batch: act.Dispatch | None = None
        self._done: ev.BatchDone | None = None

    def take(self, action: act.Dispatch) -> None:
        """The next batch."""
        self._batch = action

    def drop(self, action: act.Drop) -> None:
        """Nothing to be done about it."""

    def begin(self, now_ns: int) -> int | None:
        """Start the batch, if there is one; returns when it ends."""
        batch = self._batch
        if batch is None:
            return None
        self._batch = None
        tokens = [self._tokens[rid] for rid in batch.rids]
        took_ns = self._noise(self._engine.batch_ns(tokens, [self._max_new[rid] for rid in batch.rids]))
        self._done = ev.BatchDone(self.number, batch.batch, took_ns, self._engine.computed(tokens))
        self.busy_ns += took_ns
        return now_ns + took_ns

    def end(self, now_ns: int) -> ev.Event:
        """The batch ends: what the worker reports."""
        del now_ns
        assert self._done is not None
        return self._done


@dataclass(eq=False)
class Outcome:
    """All that happened. Arrays have one number for each request, in order of arrival, nanoseconds.

    `started_ns`: -1 for never. `first_ns`, `done_ns`: 0 for never. `ending`: PENDING, OK, or 2 + an index into `codes`.
    """

    at_ns: "array[int]"
    started_ns: "array[int]"
    first_ns: "array[int]"
    done_ns: "array[int]"
    ending: "array[int]"
    codes: list[str] = field(default_factory=list)
    busy_ns: int = 0
    end_ns: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    tokens_run: int = 0
    tokens_padded: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class World:
    """One run. `run` lets it happen and returns what did; once."""

    def __init__(
        self,
        load: Load,
        engine: Engine,
        policies: Policies,
        *,
        workers: int = 1,
        max_batch: int = 32,
        max_num_seqs: int = 32,
        seed: int = 0,
        grouped: bool = True,
    ) -> None:
        """`grouped`: a padded engine says that it pads, so that like lengths run together; else in order of arrival."""
        self._load = load
        self._tokens: list[int] = load.tokens.tolist()
        self._max_new: list[int] = load.max_new.tolist()
        count = len(self._tokens)
        at, first, done, ending = (array("q", bytes(8 * count)) for _ in range(4))
        self.outcome = Outcome(at, array("q", [-1]) * count, first, done, ending)
        self.core = Core(policies, lost_after_ns=SILENT_NS, stuck_after_ns=SILENT_NS)
        self.now_ns = 0
        self._rng = random.Random(f"clients {seed}")
        self._heap: list[tuple[int, int, int]] = []  # (when, tie, worker, or below 0 a client)
        self._seq = 0
        self._next = 0
        self._machines: dict[int, Machine] = {}
        self._wake_seen = -1
        self._codes: dict[str, int] = {}
        noise = Noise(engine, seed)
        for number in range(1, workers + 1):
            first = self.outcome.first_ns
            self._machines[number] = (
                IterationMachine(number, engine, noise, self._tokens, self._max_new, first)
                if engine.iteration
                else OneShotMachine(number, engine, noise, self._tokens, self._max_new)
            )
            name = f"w{number}"
            sizes = engine.iteration, max_batch, max_num_seqs
            self.core.step(ev.WorkerReady(number, name, "m", "k", *sizes, padded=engine.padded and grouped), 0)
        self._one_shot = not engine.iteration

    def __repr__(self) -> str:
        return f"<World at {self.now_ns / 1e9:.3f} s, {self._next:,} of {len(self._tokens):,} came, {self.core!r}>"

    # ------------------------------------------------------------ the loop

    def run(self, watch: Watch | None = None) -> Outcome:
        """All of it. `watch` is told now and then how many requests have come."""
        if isinstance(self._load, ClosedLoop):
            self._run_closed(self._load, watch)
        else:
            self._run_open(self._load, watch)
        outcome = self.outcome
        outcome.codes = list(self._codes)
        outcome.end_ns = self.now_ns
        outcome.busy_ns = sum(machine.busy_ns for machine in self._machines.values())
        for machine in self._machines.values():
            if isinstance(machine, IterationMachine):
                outcome.gaps += machine.gaps
        return outcome

    def _run_open(self, load: Arrivals, watch: Watch | None) -> None:
        heap, core = self._heap, self.core
        times: list[int] = load.at_ns.tolist()
        submit = self._submitter(load)
        count, told = len(times), 0
        self.outcome.at_ns = array("q", load.at_ns.tobytes())
        while True:
            index = self._next
            at = times[index] if index < count else NEVER_NS
            if heap and heap[0][0] < at:
                at = heap[0][0]
            wake = core.wakeup_ns
            if wake < at:
                at = wake
            if at >= SILENT_NS:
                return
            self.now_ns = at
            events: list[ev.Event] = []
            while heap and heap[0][0] == at:
                events.append(self._machines[heapq.heappop(heap)[2]].end(at))
            while index < count and times[index] == at:
                events.append(submit(index, at))
                index += 1
            self._next = index
            self._step(events, at)
            if watch is not None and index - told >= PROGRESS_EVERY:
                watch(index)
                told = index

    def _run_closed(self, load: ClosedLoop, watch: Watch | None) -> None:
        heap, core = self._heap, self.core
        for client in range(min(load.clients, len(load))):
            self._push(self._think(load), -1 - client)
        count, told = len(load), 0
        client_of: dict[int, int] = {}
        while True:
            at = min(heap[0][0] if heap else NEVER_NS, core.wakeup_ns)
            if at >= SILENT_NS:
                return
            self.now_ns = at
            events: list[ev.Event] = []
            while heap and heap[0][0] == at:
                who = heapq.heappop(heap)[2]
                if who > 0:
                    events.append(self._machines[who].end(at))
                elif self._next < count:
                    rid = self._next
                    self._next += 1
                    self.outcome.at_ns[rid] = at
                    client_of[rid] = -who
                    events.append(ev.Submit(rid, -who, "m", "k", self._tokens[rid], self._max_new[rid]))
            for rid in self._step(events, at):
                self._push(at + self._think(load), -client_of.pop(rid))
            if watch is not None and self._next - told >= PROGRESS_EVERY:
                told = self._next
                watch(told)

    def _think(self, load: ClosedLoop) -> int:
        return int(self._rng.expovariate(1.0) * load.think_ns)

    def _submitter(self, load: Arrivals) -> Callable[[int, int], ev.Submit]:
        """Makes the Submit of a request; the plain ones without looking anything up."""
        tokens, max_new = self._tokens, self._max_new
        if not (load.deadline_ns.any() or load.priority.any() or load.tenant.any() or load.tenants[0]):
            return lambda rid, _at: ev.Submit(rid, 1, "m", "k", tokens[rid], max_new[rid])
        deadlines: list[int] = load.deadline_ns.tolist()
        priorities: list[int] = load.priority.tolist()
        whose: list[int] = load.tenant.tolist()

        def submit(rid: int, at: int) -> ev.Submit:
            deadline = at + deadlines[rid] if deadlines[rid] else None
            tenant = whose[rid]
            size = tokens[rid], max_new[rid]
            return ev.Submit(rid, 1 + tenant, "m", "k", *size, deadline, priorities[rid], load.tenants[tenant])

        return submit

    # ------------------------------------------------------------ one step, and what it asks for

    def _step(self, events: list[ev.Event], at: int) -> list[int]:
        """One step of the core, performed. Returns whose ending it was."""
        if len(events) == 1:
            actions = self.core.step(events[0], at)
        elif events:
            actions = self.core.step(ev.Together(events), at)
        else:
            actions = self.core.step(ev.Tick(), at)
            assert self._wake_seen != at or actions, "the core wakes for nothing"
            self._wake_seen = at
        ended: list[int] = []
        for action in actions:
            kind = type(action)
            if kind is act.End:
                self._end(action, at)  # type: ignore[arg-type]
                ended.append(action.rid)  # type: ignore[union-attr]
            elif kind is act.Dispatch:
                self._dispatch(action, at)  # type: ignore[arg-type]
            elif kind is act.Refuse:
                self._refuse(action, at)  # type: ignore[arg-type]
                ended.append(action.rid)  # type: ignore[union-attr]
            elif kind is act.Drop:
                self._machines[action.worker].drop(action)  # type: ignore[union-attr, arg-type]
        for machine in self._machines.values():
            until = machine.begin(at)
            if until is not None:
                self._push(until, machine.number)
        return ended

    def _push(self, at: int, who: int) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at, self._seq, who))

    def _dispatch(self, action: act.Dispatch, at: int) -> None:
        outcome, rids = self.outcome, action.rids
        sizes = [self._tokens[rid] for rid in rids]
        outcome.sizes[len(rids)] += 1
        outcome.reasons[action.reason] += 1
        outcome.tokens_run += sum(sizes)
        outcome.tokens_padded += len(sizes) * max(sizes)
        for rid in rids:
            outcome.started_ns[rid] = at
        self._machines[action.worker].take(action)

    def _end(self, action: act.End, at: int) -> None:
        outcome, rid = self.outcome, action.rid
        outcome.done_ns[rid] = at
        if not action.code:
            outcome.ending[rid] = OK
            if self._one_shot:
                outcome.first_ns[rid] = at
            return
        outcome.ending[rid] = self._code(action.code)
        outcome.failed[action.code] += 1

    def _refuse(self, action: act.Refuse, at: int) -> None:
        self.outcome.done_ns[action.rid] = at
        self.outcome.ending[action.rid] = self._code(action.code)
        self.outcome.refused[action.code] += 1

    def _code(self, code: str) -> int:
        return 2 + self._codes.setdefault(code, len(self._codes))
