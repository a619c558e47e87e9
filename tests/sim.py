"""A whole scheduler in one thread under a virtual clock: the real core, made-up workers, and a referee.

Workers take declared time; faults are drawn from a seed. The referee sees every action and holds the laws: each request
gets exactly one ending, nothing is dispatched to a worker that is gone or full, and nothing is said about what is over.
"""

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

from headway.policies.admit import bounded
from headway.policies.order import due_time
from headway.policies.place import least_loaded
from headway.policies.size import largest
from headway.policies.views import Policies, Window, WindowChoice
from headway.policies.windows import greedy
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.core import Core

MS = 1_000_000
BOUND_NS = 10_000 * MS  # of whatever window is given


def policies(window: Window = greedy, **changes: object) -> Policies:
    """The defaults, greedy unless said otherwise."""
    keys: dict[str, object] = {
        "admit": bounded(queue_max=10_000, queue_tokens_max=1 << 24),
        "order": due_time,
        "window_of": lambda _model, _kind: WindowChoice("given", window, BOUND_NS),
        "place": least_loaded,
        "size": largest,
    }
    return Policies(**(keys | changes))  # type: ignore[arg-type]


@dataclass
class Machine:
    """A made-up worker: one-shot or iteration-level, with declared cost."""

    number: int
    iteration: bool
    max_batch: int
    padded: bool = False
    running: dict[tuple[int, int], int] = field(default_factory=dict)  # (batch, rid) -> tokens left
    dropped: set[tuple[int, int]] = field(default_factory=set)
    stepping: bool = False


class World:
    """The core, its machines and its clients. `run` lets virtual time pass."""

    def __init__(self, seed: int, *, window: Window = greedy, check: bool = True, **changes: object) -> None:
        self.rng = random.Random(seed)
        self.core = Core(policies(window, **changes))
        self.now_ns = 0
        self.machines: dict[int, Machine] = {}
        self.asked: dict[int, ev.Submit] = {}
        self.endings: dict[int, act.End | act.Refuse] = {}
        self.log: list[str] = []
        self.dispatched: list[act.Dispatch] = []
        self.poison: set[int] = set()
        self.culprits: set[int] = set()
        self.check = check
        self._heap: list[tuple[int, int, object]] = []
        self._seq = 0
        self._rids = 0
        self._workers = 0

    # ------------------------------------------------------------ what happens

    def at(self, delay_ns: int, what: object) -> None:
        """Let something happen later: an event, or a callable without arguments."""
        self._seq += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._seq, what))

    def join(self, *, iteration: bool = False, max_batch: int = 8, max_num_seqs: int = 16, **more: Any) -> int:
        """A new worker registers. `more`: fields of WorkerReady."""
        self._workers += 1
        number = self._workers
        self.machines[number] = Machine(number, iteration, max_batch, more.get("padded", False))
        self.step(ev.WorkerReady(number, f"w{number}", "m", "k", iteration, max_batch, max_num_seqs, **more))
        return number

    def lose(self, number: int) -> None:
        """A worker dies."""
        if self.machines.pop(number, None) is not None:
            self.step(ev.WorkerLost(number, "killed"))

    def submit(self, tokens: int = 10, **fields: object) -> int:
        """A request arrives; returns its number."""
        self._rids += 1
        event = ev.Submit(self._rids, fields.pop("client", 1), "m", "k", tokens, **fields)  # type: ignore[arg-type]
        self.asked[self._rids] = event
        self.step(event)
        return self._rids

    def step(self, event: ev.Event) -> list[act.Action]:
        """One step of the core, refereed and performed."""
        actions = self.core.step(event, self.now_ns)
        self.log.append(f"{self.now_ns / MS:9.3f}  {_short(event)}")
        for action in actions:
            self.log.append(f"{'':9}    -> {_short(action)}")
            self._perform(action)
        if self.check:
            self.core.audit()
        return actions

    def run(self, until_ns: int) -> None:
        """Let time pass."""
        while True:
            wake = self.core.wakeup_ns
            at = self._heap[0][0] if self._heap else until_ns + 1
            if min(at, wake) > until_ns:
                self.now_ns = until_ns
                return
            if wake < at:
                self.now_ns = max(self.now_ns, wake)
                self.step(ev.Tick())
                assert self.core.wakeup_ns > self.now_ns, "the core wakes for nothing"
                continue
            self.now_ns, _, what = heapq.heappop(self._heap)
            if callable(what):
                what()
            else:
                self.step(what)  # type: ignore[arg-type]

    # ------------------------------------------------------------ the referee and the machines

    def _perform(self, action: act.Action) -> None:
        if isinstance(action, (act.End, act.Refuse)):
            assert action.rid in self.asked, f"an ending for {action.rid}, which nobody asked for"
            assert action.rid not in self.endings, f"request {action.rid} ended twice"
            self.endings[action.rid] = action
        elif isinstance(action, act.Dispatch):
            self._dispatch(action)
        elif isinstance(action, act.Drop):
            machine = self.machines.get(action.worker)
            if machine:
                machine.dropped.update((action.batch, rid) for rid in action.rids)
        elif isinstance(action, act.Forward):
            for _, rid in action.rows:
                assert rid not in self.endings, f"tokens forwarded after the ending of {rid}"
        elif isinstance(action, act.Restart):
            self.machines.pop(action.worker, None)

    def _dispatch(self, action: act.Dispatch) -> None:
        self.dispatched.append(action)
        machine = self.machines.get(action.worker)
        assert machine is not None, f"dispatched to worker {action.worker}, which is gone"
        assert action.rids, "an empty batch"
        assert len(action.rids) <= machine.max_batch, "a batch larger than the worker takes"
        assert machine.iteration or not machine.running, "a second batch on a one-shot worker"
        for rid in action.rids:
            assert rid not in self.endings, f"dispatched {rid} after its ending"
            machine.running[(action.batch, rid)] = max(1, self.asked[rid].max_new)
        if not machine.iteration:
            took = (8 * MS) + sum(self.asked[rid].tokens for rid in action.rids) * 10_000
            self.at(took, lambda: self._finish(machine, action, took))
        elif not machine.stepping:
            machine.stepping = True
            self.at(5 * MS, lambda: self._engine_step(machine))

    def _finish(self, machine: Machine, action: act.Dispatch, took: int) -> None:
        if self.machines.get(machine.number) is not machine:
            return
        machine.running.clear()
        if self.poison.intersection(action.rids):
            self.lose(machine.number)
            self.at(20 * MS, lambda: self.join(max_batch=machine.max_batch) and None)
        elif self.culprits.intersection(action.rids):
            self.step(ev.BatchFailed(machine.number, action.batch, "engine_error", "boom"))
        else:
            sizes = [self.asked[rid].tokens for rid in action.rids]
            computed = max(sizes) * len(sizes) if machine.padded else sum(sizes)
            self.step(ev.BatchDone(machine.number, action.batch, took, computed))

    def _engine_step(self, machine: Machine) -> None:
        machine.stepping = False
        if self.machines.get(machine.number) is not machine or not machine.running:
            return
        if self.poison.intersection(rid for _, rid in machine.running):
            self.lose(machine.number)
            self.at(20 * MS, lambda: self.join(iteration=True, max_batch=machine.max_batch) and None)
            return
        rows = []
        for key in list(machine.running):
            if key in machine.dropped:
                del machine.running[key]
                rows.append(ev.RowDone(*key, 0, "dropped"))
                continue
            machine.running[key] -= 1
            finish = "length" if machine.running[key] <= 0 else ""
            if finish:
                del machine.running[key]
            rows.append(ev.RowDone(*key, 1, finish))
        self.step(ev.StepDone(machine.number, 5 * MS, len(rows), len(rows), tuple(rows)))
        if machine.running and not machine.stepping:
            machine.stepping = True
            self.at(5 * MS, lambda: self._engine_step(machine))

    def beat(self, every_ns: int = 500 * MS) -> None:
        """All living machines beat, now and for ever."""
        for machine in list(self.machines.values()):
            self.step(ev.Beat(machine.number, self._seq, bool(machine.running)))
        self.at(every_ns, self.beat)


def _short(thing: object) -> str:
    return repr(thing).replace("model='m', kind='k', ", "").replace(", forecast=None", "")
