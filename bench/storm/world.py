"""One storm: a plan is played against the real core, the referee at its elbow; then all is healed, and all must end.

The fourth shell of the core. First safety: anything may fail, and every law holds after every step. Then liveness: the
workers are well again, and each request must end, each seat be given back (no permit leaks), and new requests served.
One thread, virtual time, no hash order: the same plan gives the same transcript, to the byte.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from headway.bench.storm import plan as pl
from headway.bench.storm.machines import MAKE, DiedError, Engine, OneShot
from headway.bench.storm.referee import NS_PER_MS, Referee, hold
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.chosen import policies_of
from headway.scheduler.core import Core

LIVENESS_NS = 600_000_000_000  # healed, nothing here takes longer
BEATS = 5  # in the time after which silence counts as loss
SAID_MAX = 200  # old reports that may come again
RESTART_MS = (20, 20, 700)
NONE_RID = 987_654  # a request that never was

Step = tuple[int, ev.Event, list[act.Action]]
Entry = tuple[int, int, Callable[[], list[ev.Event]]]


class Storm:
    """`run` plays the plan; once. Raises BrokenLawError, or whatever the core raised; `steps` is what happened.

    `audit`: whether the core's own audit is asked, too, after every step.
    """

    def __init__(self, plan: pl.Plan, *, audit: bool = True) -> None:
        self.plan = plan
        self._audit = audit
        lost_after_ns, stuck_after_ns = plan.lost_after_ms * NS_PER_MS, plan.stuck_after_ms * NS_PER_MS
        self.core = Core(policies_of(plan.policy), lost_after_ns=lost_after_ns, stuck_after_ns=stuck_after_ns)
        self.referee = Referee(plan.policy, lost_after_ns, stuck_after_ns)
        self.now_ns = 0
        self.steps: list[Step] = []
        self.seen: Counter[str] = Counter()
        self.machines: dict[int, OneShot | Engine] = {}
        self._beat_ns = lost_after_ns // BEATS
        self._asks: dict[int, pl.Ask] = {}
        self._said: list[ev.Event] = []
        self._heap: list[Entry] = []
        self._seq = 0
        self._workers = 0
        self._turns = 0
        self._calm = False
        self._back_ns = 0

    def __repr__(self) -> str:
        return f"<Storm {self.plan.seed} at {self.now_ns / 1e6:.3f} ms, {len(self.steps)} steps, {self.core!r}>"

    @property
    def command(self) -> str:
        """What plays it again."""
        return f"python -m headway.bench.fault_storm --seed {self.plan.seed}"

    def run(self) -> "Storm":
        """All of it."""
        for one in self.plan.happenings:
            self._at(one.at_us * 1_000, lambda one=one: _HAPPENS[type(one)](self, one))  # type: ignore[misc]
        end_ns = max([one.at_us for one in self.plan.happenings], default=0) * 1_000
        self._play(until=lambda: self._due_ns() > end_ns)
        self._heal()
        self._end("of the storm")
        if self.referee.books.drain_ns is None:
            self._once_more()
        return self

    def digest(self) -> str:
        """Of the whole transcript."""
        found = hashlib.sha256()
        for step in self.steps:
            found.update(repr(step).encode())
        return found.hexdigest()

    # ------------------------------------------------------------ time

    def _at(self, at_ns: int, what: Callable[[], list[ev.Event]]) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at_ns, self._seq, what))

    def _due_ns(self) -> int:
        wakeup_ns = self.core.wakeup_ns + self.plan.lag_us * 1_000
        return min(wakeup_ns, self._heap[0][0]) if self._heap else wakeup_ns

    def _play(self, until: Callable[[], bool]) -> None:
        """Let things happen until it is so."""
        while not until():
            due_ns = self._due_ns()
            self.now_ns = max(self.now_ns, due_ns)
            events: list[ev.Event] = []
            while self._heap and self._heap[0][0] <= self.now_ns:
                events += heapq.heappop(self._heap)[2]()
            if not events and self.now_ns >= self.core.wakeup_ns:
                self._step(ev.Tick())
            elif len(events) > 1 and self._together():
                self._step(ev.Together(events))
            else:
                for event in events:
                    self._step(event)

    def _together(self) -> bool:
        """Deterministic, and the same for most of the storm if something is left out of it."""
        return (self.now_ns // 1_000 * 2_654_435_761 >> 7) % 100 < 100 * self.plan.together

    def _step(self, event: ev.Event) -> None:
        now_ns, self._back_ns = self.now_ns - self._back_ns, 0
        actions: list[act.Action] = []
        self.steps.append((now_ns, event, actions))
        actions += self.core.step(event, now_ns)
        self.judge(event, now_ns, actions)
        for action in actions:
            self.seen[type(action).__name__] += 1
            perform = _PERFORM.get(type(action))
            if perform is not None:
                perform(self, action)

    def judge(self, event: ev.Event, now_ns: int, actions: list[act.Action]) -> None:
        """Whether the step was right. Raises BrokenLawError, or AssertionError from the audit."""
        self.referee.step(event, now_ns, actions, self.core.wakeup_ns, self.core.counters)
        if self._audit:
            self.core.audit()

    # ------------------------------------------------------------ what happens

    def _machine(self, pick: int) -> OneShot | Engine | None:
        numbers = sorted(self.machines)
        return self.machines[numbers[pick % len(numbers)]] if numbers else None

    def _ask(self, ask: pl.Ask) -> list[ev.Event]:
        rid = len(self._asks) + 1
        self._asks[rid] = ask
        model, kind, _ = self.plan.services[ask.service]
        deadline_ns = None if ask.deadline_ms is None else self.now_ns + ask.deadline_ms * NS_PER_MS
        sizes = ask.tokens, ask.max_new
        return [ev.Submit(rid, ask.client, model, kind, *sizes, deadline_ns, ask.priority, ask.tenant)]

    def _cancel(self, one: pl.Cancel) -> list[ev.Event]:
        of = {"live": sorted(self.referee.books.live), "any": sorted(self._asks), "none": [NONE_RID, -1, 0]}[one.of]
        return [ev.Cancel(of[one.pick % len(of)])] if of else []

    def _satisfy(self, one: pl.Satisfy) -> list[ev.Event]:
        live = sorted(self.referee.books.live)
        return [ev.Satisfied(live[one.pick % len(live)])] if live else []

    def _vanish(self, one: pl.Vanish) -> list[ev.Event]:
        return [ev.ClientGone(one.client)]

    def _join(self, join: pl.Join) -> list[ev.Event]:
        self._workers += 1
        iteration = self.plan.services[join.service][2]
        machine = MAKE[iteration](self._workers, join, iteration, self._asks, self.plan.seed)
        machine.calm = self._calm
        self._at(self.now_ns + self._beat_ns, lambda: self._beat(machine))
        return [self._registers(machine)]

    def _registers(self, machine: OneShot | Engine) -> ev.WorkerReady:
        self.machines[machine.number] = machine
        join = machine.join
        model, kind, iteration = self.plan.services[join.service]
        prior_ns = (join.prior_ms * NS_PER_MS, 1e4, 1e5) if join.prior_ms else ()
        sizes = join.max_batch, join.max_num_seqs
        whose = machine.number, f"w{machine.number}", model, kind
        return ev.WorkerReady(*whose, iteration, *sizes, prior_ns, join.padded, join.kv_tokens * iteration)

    def _crash(self, one: pl.Crash) -> list[ev.Event]:
        machine = self._machine(one.pick)
        if machine is None:
            return []
        words = machine.number if one.words and machine.busy else 0
        if words:  # sent before it died, read after
            self._ends(machine, self.now_ns + NS_PER_MS)
        return self._lose(machine, "killed", orderly=one.orderly)

    def _lose(self, machine: OneShot | Engine, reason: str, *, orderly: bool = False) -> list[ev.Event]:
        """Its process is gone; another will be started, in time."""
        del self.machines[machine.number]
        self.seen["Crash"] += 1
        again_ms = RESTART_MS[machine.number % len(RESTART_MS)]
        if self._calm or machine.number % 3:
            self._at(self.now_ns + again_ms * NS_PER_MS, lambda: self._join(machine.join))
        return [ev.WorkerLost(machine.number, reason, orderly)]

    def _stall(self, one: pl.Stall) -> list[ev.Event]:
        machine = self._machine(one.pick)
        if machine is not None and not self._calm:
            machine.stalled_until_ns = self.now_ns + one.ms * NS_PER_MS
            machine.silent_until_ns = machine.stalled_until_ns if one.silent else 0
        return []

    def _rejoin(self, one: pl.Rejoin) -> list[ev.Event]:
        machine = self._machine(one.pick)
        if machine is None:
            return []
        self._workers += 1
        lost = ev.WorkerLost(machine.number, "its connection ended")
        del self.machines[machine.number]
        machine.number = self._workers
        return [lost, self._registers(machine)]

    def _echo(self, one: pl.Echo) -> list[ev.Event]:
        if not self._said:
            return []
        report: Any = self._said[one.pick % len(self._said)]
        worker, batch = one.worker or report.worker, one.batch
        if type(report) is ev.StepDone:
            rows = [ev.RowDone(batch or row.batch, row.rid, row.new, row.finish) for row in report.rows]
            return [ev.StepDone(worker, report.compute_ns, report.tokens, report.running, tuple(rows))]
        if type(report) is ev.BatchDone:
            return [ev.BatchDone(worker, batch or report.batch, report.compute_ns, report.tokens, report.failed)]
        return [ev.BatchFailed(worker, batch or report.batch, report.code, report.message, report.rids)]

    def _down(self, one: pl.Down) -> list[ev.Event]:
        model, kind, _ = self.plan.services[one.service]
        return [ev.ServiceDown(model, kind, "it ended five times in a row")]

    def _drain(self, one: pl.Drain) -> list[ev.Event]:
        return [ev.Drain(self.now_ns + one.limit_ms * NS_PER_MS)]

    def _pause(self, one: pl.Pause) -> list[ev.Event]:
        self.now_ns += one.ms * NS_PER_MS
        return []

    def _step_back(self, one: pl.StepBack) -> list[ev.Event]:
        self._back_ns = min(self.now_ns, one.ms * NS_PER_MS)
        return [ev.Tick()]

    # ------------------------------------------------------------ machines at work

    def _beat(self, machine: OneShot | Engine) -> list[ev.Event]:
        if self.machines.get(machine.number) is not machine:
            return []
        self._at(self.now_ns + self._beat_ns, lambda: self._beat(machine))
        silent = self.now_ns < machine.silent_until_ns or not machine.beats()
        return [] if silent else [ev.Beat(machine.number, machine.progress, machine.busy)]

    def _begin(self, machine: OneShot | Engine) -> None:
        """Its next piece of work, if it is not at one."""
        if machine.busy and not machine.turn:
            self._ends(machine, self.now_ns + machine.begin() * 1_000)

    def _ends(self, machine: OneShot | Engine, at_ns: int) -> None:
        """What it is at ends then; what was said about that before counts no more."""
        self._turns += 1
        machine.turn = turn = self._turns
        self._at(at_ns, lambda: self._end_of(machine) if machine.turn == turn else [])

    def _end_of(self, machine: OneShot | Engine) -> list[ev.Event]:
        """A piece of work ends, unless the worker stands still; a dead one's last words are heard all the same."""
        if self.now_ns < machine.stalled_until_ns:
            self._ends(machine, machine.stalled_until_ns)
            return []
        machine.turn = 0
        here = self.machines.get(machine.number) is machine
        if not machine.busy:
            return []
        try:
            reports = machine.end()
        except DiedError as death:
            return self._lose(machine, str(death)) if here else []
        if here:
            self._begin(machine)
        if len(self._said) < SAID_MAX:
            self._said += reports
        return reports

    def _dispatched(self, action: act.Dispatch) -> None:
        self.seen[f"launched {action.reason}"] += 1
        machine = self.machines.get(action.worker)
        if machine is not None:  # it may be gone, and the core not know yet
            machine.take(action)
            self._begin(machine)

    def _dropped(self, action: act.Drop) -> None:
        machine = self.machines.get(action.worker)
        if machine is not None:
            machine.drop(action)

    def _restart(self, action: act.Restart) -> None:
        machine = self.machines.get(action.worker)
        if machine is not None:
            self._lose(machine, action.reason)  # the core knows

    def _held(self, action: act.Hold) -> None:
        self.seen[f"held {action.reason}"] += 1

    def _ended(self, action: act.End | act.Refuse) -> None:
        self.seen[f"{type(action).__name__} {action.code or 'ok'}"] += 1

    # ------------------------------------------------------------ liveness

    def _heal(self) -> None:
        """No fault happens from here on. A request that kills its worker still does: that is what it is."""
        self._calm = True
        for machine in self.machines.values():
            machine.calm = True
            if self.now_ns < machine.stalled_until_ns and machine.turn:
                self._ends(machine, self.now_ns)
            machine.stalled_until_ns = machine.silent_until_ns = 0
        for index in range(len(self.plan.services)):
            for _ in range(2):
                self._at(self.now_ns, lambda index=index: self._join(pl.Join(0, index)))  # type: ignore[misc]

    def _end(self, of: str) -> None:
        """Until all is over and every seat is given back."""
        limit_ns = self.now_ns + LIVENESS_NS
        self._play(until=lambda: self._quiet() or self.now_ns > limit_ns)
        left = sorted(self.referee.books.live)
        hold(not left, "liveness", f"no ending for {left}, {LIVENESS_NS // 10**9} s after the end {of}")
        hold(self._quiet(), "permits", f"all requests are over, and not all seats free: {self.core.services}")
        hold(self.referee.books.over == set(self._asks), "liveness", "not every request ended")

    def _quiet(self) -> bool:
        books = self.referee.books
        if books.live or any(member.seats for member in books.workers.values()):
            return False
        if not all(books.members((model, kind)) for model, kind, _ in self.plan.services):
            return False
        if any(machine.busy for machine in self.machines.values()):
            return False  # one that registered anew may still die of what it had before
        fleets = [service.fleet for service in self.core.services.values()]
        return not any(fleet.long_running or any(w.running for w in fleet.workers.values()) for fleet in fleets)

    def _once_more(self) -> None:
        """No permit leaked: as many as there are workers are let in, start, and end well."""
        count = len(self._asks)
        for index, (model, kind, _) in enumerate(self.plan.services):
            workers = len(self.referee.books.members((model, kind)))
            for _ in range(min(workers, self.plan.policy.queue_max)):
                self._at(self.now_ns, lambda index=index: self._ask(pl.Ask(0, index, 1)))  # type: ignore[misc]
        before = self.seen["End ok"]
        self._play(until=lambda: self._heap[0][0] > self.now_ns)
        self._end("of the last requests")
        asked, well = len(self._asks) - count, self.seen["End ok"] - before
        hold(well == asked, "permits", f"of {asked} last requests to a healed scheduler {well} ended well")


_HAPPENS: dict[type, Callable[[Storm, Any], list[ev.Event]]] = {
    pl.Ask: Storm._ask,
    pl.Cancel: Storm._cancel,
    pl.Satisfy: Storm._satisfy,
    pl.Vanish: Storm._vanish,
    pl.Join: Storm._join,
    pl.Crash: Storm._crash,
    pl.Stall: Storm._stall,
    pl.Rejoin: Storm._rejoin,
    pl.Echo: Storm._echo,
    pl.Down: Storm._down,
    pl.Drain: Storm._drain,
    pl.Pause: Storm._pause,
    pl.StepBack: Storm._step_back,
}

_PERFORM: dict[type, Callable[[Storm, Any], None]] = {
    act.Dispatch: Storm._dispatched,
    act.Drop: Storm._dropped,
    act.Hold: Storm._held,
    act.Restart: Storm._restart,
    act.End: Storm._ended,
    act.Refuse: Storm._ended,
}
