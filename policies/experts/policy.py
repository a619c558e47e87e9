"""Expert-aware scheduling of one service, as the core uses it: who may in, who runs next, and what came of it.

The core hands in requests that carry a forecast, made elsewhere; it never looks into one. All state that deciding needs
is here: what waits, as loads; what runs, as demand; which batches were composed and how even they turned out. The
predictor itself is not: it learns in another thread, and only says how good it is.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from headway.policies.experts.arrays import Loads, imbalance
from headway.policies.experts.composer import (
    GROUPING_WINDOW,
    JOINING_WINDOW,
    WINDOW,
    Waiting,
    balanced,
    grouped,
    grouping_pays,
    overdue_after,
    overtaken,
)
from headway.policies.experts.cost import StepCost, Work
from headway.policies.experts.decode import Running
from headway.policies.experts.shedding import FORCE_AGE, Backlog, Drain, Usage, Verdict, verdict
from headway.policies.experts.values import Candidate, Choice, Forecast, Launched, Learned, Observed, Told
from headway.policies.experts.worth import Mean, Worth
from headway.policies.forecast import ExpertFacts, LoadForecast

BATCHES_KEPT = 256  # launched batches whose reports are still awaited; older ones are given up
PASSES_SHOWN = 16  # the histogram of overtakings, in batches' worth, ends here
TENANTS_SHOWN = 20
SHED_MAX = 4096  # (tenant, reason) pairs that are counted
STEP_RATE = 0.1
NEVER_NS = 1 << 62  # a deadline that never comes


class ExpertAware:
    """`layers` x `groups`: what is reported. `slots`: requests in a batch, or that run at once on a worker.

    `grouping`: groups are single experts, and all lie on one device. `joining`: requests join those who run one by one
    (iteration-level engines), instead of in whole batches. `slo_ns`: what an answer may take that has no deadline; 0:
    as long as it likes, and it is never refused here. `stopwatch`: CPU time in nanoseconds, only to say what choosing
    takes.
    """

    def __init__(
        self,
        layers: int,
        groups: int,
        slots: int,
        *,
        top_k: int = 1,
        grouping: bool = False,
        joining: bool = False,
        slo_ns: int = 0,
        stopwatch: Callable[[], int] = lambda: 0,
    ) -> None:
        self.layers, self.groups, self.slots, self.top_k = layers, groups, max(1, slots), top_k
        self.grouping, self.joining, self.slo_ns = grouping, joining, slo_ns
        self._stopwatch = stopwatch
        self.worth = Worth()
        self.cost = StepCost()
        self.usage = Usage(groups)
        self.backlog = Backlog(layers, groups)
        self.drain = Drain()
        self.predicted = Mean()  # imbalance of composed batches, as it was predicted
        self.composing_ns, self.retry_ms, self.pads = Mean(), Mean(), Mean()
        self.step = Work(0.0, 0.0)  # what a step does, lately
        self.counters: Counter[str] = Counter()
        self.shed: Counter[tuple[str, str]] = Counter()  # (tenant, reason)
        self.passes: Counter[int] = Counter()
        self._running: dict[int, tuple[int, Running]] = {}  # rid: worker, demand
        self._launched: dict[int, Launched] = {}
        self._nothing = np.zeros((layers, groups), np.float32)

    @classmethod
    def of(cls, facts: ExpertFacts, stopwatch: Callable[[], int] = lambda: 0) -> Self:
        """As the facts say."""
        return cls(
            facts.layers,
            facts.groups,
            facts.slots,
            top_k=facts.top_k,
            grouping=facts.grouping,
            joining=facts.joining,
            slo_ns=facts.slo_ns,
            stopwatch=stopwatch,
        )

    def __repr__(self) -> str:
        return f"<ExpertAware {self.layers} x {self.groups}, {self.backlog.requests} waiting, {self.worth!r}>"

    @property
    def window(self) -> int:
        """How many of the oldest to hand to `choose`."""
        return self.slots * (GROUPING_WINDOW if self.grouping else JOINING_WINDOW if self.joining else WINDOW)

    # ------------------------------------------------------------ at the door

    def refusal(
        self, forecast: object | None, tenant: str, left_ns: int | None, *, workers: int, reserved: bool, rid: int
    ) -> Verdict | None:
        """Why the request must be refused, or None. `left_ns`: until its deadline, None if it has none.

        Asks for nothing while costs or loads are not known.
        """
        limit_ns = self.slo_ns if left_ns is None else min(left_ns, self.slo_ns or left_ns)
        known = self._known(forecast)
        if known is None or limit_ns <= 0 or self.grouping or not self.cost.known or not self.worth.predictable:
            return None
        found = verdict(
            self.backlog,
            known.whole,
            known.tokens + known.decode,
            self._steps(known),
            tenant,
            cost=self.cost,
            drain=self.drain.factor,
            usage=self.usage,
            workers=max(1, workers),
            limit_ns=limit_ns,
            reserved=reserved,
            jitter=rid * 0.6180339887 % 1.0,
        )
        self.counters[f"door.{found.reason}"] += 1
        if found.admitted:
            return None
        self.retry_ms.add(found.retry_after_ms)
        if len(self.shed) < SHED_MAX or (tenant, found.reason) in self.shed:
            self.shed[tenant, found.reason] += 1
        return found

    def enter(self, candidate: Candidate) -> None:
        """It waits now."""
        if (known := self._known(candidate.forecast)) is not None:
            self.backlog.add(known.whole, known.tokens + known.decode, self._steps(known))
            self.usage.add(candidate.tenant, known.whole)

    def leave(self, candidate: Candidate) -> None:
        """It waits no more, whatever became of it."""
        if (known := self._known(candidate.forecast)) is not None:
            self.backlog.remove(known.whole, known.tokens + known.decode, self._steps(known))

    def _known(self, forecast: object | None) -> Forecast | None:
        """A forecast for this model as it is now placed."""
        if isinstance(forecast, LoadForecast):
            load = self._array(forecast.load)
            return None if load is None else Forecast(load, forecast.tokens, forecast.decode)
        if isinstance(forecast, Forecast) and forecast.load.shape == (self.layers, self.groups):
            return forecast
        return None

    def _steps(self, known: Forecast) -> float:
        """Its share of the steps that it takes part in: one batch, or one for each token that is decoded."""
        return (1.0 + known.decode if self.joining else 1.0) / self.slots

    # ------------------------------------------------------------ who runs next

    def choose(
        self, waiting: Sequence[Candidate], depth: int, take: int, batch: int, worker: int, now_ns: int
    ) -> Choice:
        """Up to `take` of `waiting` (the next of `depth`, in order) for batch number `batch` on `worker`."""
        skipped = self.worth.skipped(depth, take, batch) or self._grouping_is_vain()
        self.counters[f"batches.{skipped or ('grouped' if self.grouping else 'composed')}"] += 1
        if skipped:
            return Choice(list(range(min(take, len(waiting)))), skipped)
        began_ns = self._stopwatch()
        taken = self._compose(waiting, take, worker, now_ns)
        self.composing_ns.add(self._stopwatch() - began_ns)
        for at in taken:
            self.passes[min(waiting[at].passed // take, PASSES_SHOWN)] += 1
        for one, younger in zip(waiting, overtaken(taken, len(waiting)), strict=True):
            one.passed += younger
        return Choice(taken, "grouped" if self.grouping else "composed")

    def _compose(self, waiting: Sequence[Candidate], take: int, worker: int, now_ns: int) -> list[int]:
        """Who goes together, by what is known of them and of who runs there."""
        after = overdue_after(len(waiting))
        overdue = [at for at, one in enumerate(waiting) if self._is_overdue(one, after, now_ns)]
        self.counters["forced"] += min(take, len(overdue))
        running = [demand for on, demand in self._running.values() if on == worker]
        if self.grouping:
            chances = np.stack([self._demand(one) for one in waiting])
            return grouped(Waiting(chances, overdue, not self.joining), take, _used(running))
        return balanced(*self._balance(waiting, overdue, take, running))

    def _grouping_is_vain(self) -> str:
        """On one device: why similar requests should not be grouped, or empty."""
        if not self.grouping:
            return ""
        if not self.cost.known:
            return "unmeasured"
        tokens, _, active = self.step
        pays = grouping_pays(tokens, self.top_k, active / self.layers, self.cost.slots_worth)
        return "" if pays else "bound_by_work"

    def _balance(
        self, waiting: Sequence[Candidate], overdue: list[int], take: int, running: list[Running]
    ) -> tuple[Waiting, int, Loads | None]:
        """Prompts, and beside them, as further layers, what is decoded while those chosen now run."""
        known = [self._known(one.forecast) for one in waiting]
        loads = np.stack([one.load if one else self._nothing for one in known])
        horizon = float(np.mean([one.decode if one else 0.0 for one in known])) if self.joining else 0.0
        if not horizon:
            return Waiting(loads, overdue, not self.joining), take, None
        decoding = np.stack([one.demand if one else self._nothing for one in known]) * np.float32(horizon)
        now = np.sum([one.demand for one in running], axis=0) * np.float32(horizon) if running else self._nothing
        both = Waiting(np.concatenate([loads, decoding], 1), overdue, not self.joining)
        return both, take, np.concatenate([self._nothing, now])

    def started(self, requests: Sequence[Candidate], *, take: int, batch: int, worker: int, reason: str) -> None:
        """These, who have left the queue, are on their way to `worker` as one batch of at most `take`."""
        self.usage.decay()
        loads = [self._load(one) for one in requests]
        if reason == "composed":
            self.predicted.add(imbalance(np.sum(loads, axis=0)))
        self._drained(requests)
        full = len(requests) == take > 1
        self._launched[batch] = Launched(
            reason, worker, {one.rid for one in requests}, full, np.zeros_like(self._nothing)
        )
        while len(self._launched) > BATCHES_KEPT:
            del self._launched[next(iter(self._launched))]
        for one, load in zip(requests, loads, strict=True):
            known = self._known(one.forecast)
            self._running[one.rid] = worker, Running(load, known.tokens if known else 1)

    def _drained(self, requests: Sequence[Candidate]) -> None:
        known = [found for one in requests if (found := self._known(one.forecast)) is not None]
        if known:
            load: Loads = np.sum([one.whole for one in known], axis=0)
            tokens, steps = sum(one.tokens + one.decode for one in known), sum(self._steps(one) for one in known)
            self.drain.launched(self.backlog, load, tokens, steps, self.cost)

    # ------------------------------------------------------------ what came of it

    def _array(self, packed: bytes) -> Loads | None:
        """Float32 [layers, groups], or None if it is of another size."""
        if len(packed) != 4 * self.layers * self.groups:
            return None
        return np.frombuffer(packed, "<f4").reshape(self.layers, self.groups)

    def told(self, event: Told) -> None:
        """Reports as they travel."""
        reports = [
            Observed(one.batch, one.rid, one.prompt, one.tokens, counts)
            for one in event.reports
            if (counts := self._array(one.counts)) is not None
        ]
        work = Work(event.tokens, event.critical, event.active) if event.critical else None
        self.hear(Learned(reports, event.r2, event.learned, work, event.spent_ns))

    def hear(self, told: Learned) -> None:
        """Reports have come."""
        if told.r2 is not None:
            self.worth.learned(told.r2, told.learned)
        if told.work is not None and told.spent_ns > 0:
            self.cost.observe(told.work, told.spent_ns)
            if not self.joining and (own := sum(one.tokens for one in told.reports)):
                self.pads.add(max(0.0, 1.0 - own / max(1.0, told.work.tokens)))
            self.step = Work(*(old + STEP_RATE * (new - old) for old, new in zip(self.step, told.work, strict=True)))
        for report in told.reports:
            if report.counts.shape != (self.layers, self.groups):
                continue  # of before the experts were moved
            self.counters["reports"] += 1
            if (found := self._running.get(report.rid)) is not None:
                found[1].prefilled(report.counts, report.tokens) if report.prompt else found[1].decoded(
                    report.counts, report.tokens
                )
            if report.prompt:
                self._one_of_batch(report)

    def ended(self, rid: int) -> None:
        """It runs no more."""
        self._running.pop(rid, None)

    def _one_of_batch(self, report: Observed) -> None:
        launched = self._launched.get(report.batch)
        if launched is None or report.rid not in launched.awaited:
            return
        launched.awaited.remove(report.rid)
        launched.load += report.counts
        if launched.awaited:
            return
        del self._launched[report.batch]
        load = self._together(launched)
        if load is not None:
            self.worth.observe(imbalance(load), composed=launched.reason == "composed")

    def _together(self, launched: Launched) -> Loads | None:
        """What to judge a choice by: a full batch's load; of those who joined, the next step of all they run with."""
        if not self.joining:
            return launched.load if launched.full else None
        beside = [one.demand for on, one in self._running.values() if on == launched.worker]
        return np.sum(beside, axis=0) if len(beside) >= max(2, self.slots // 2) else None

    # ------------------------------------------------------------ for people

    def report(self) -> dict[str, Any]:
        """What there is to know, by stable names; seconds, shares and counts."""
        sums = self.backlog.load.sum(0)
        total = float(sums.sum())
        per_device = [self.cost.ns(Work(0.0, float(one)), 0.0) / 1e9 for one in sums]
        shed = sorted(self.shed.items(), key=lambda one: (-one[1], one[0]))[:TENANTS_SHOWN]
        return {
            "layers": self.layers,
            "groups": self.groups,
            "grouping": self.grouping,
            "r2": round(self.worth.r2, 4),
            "reports": self.worth.reports,
            "imbalance": {policy: spread.report() for policy, spread in self.worth.spread.items()},
            "imbalance_fifo": round(self.worth.fifo.value, 4),
            "imbalance_composed": round(self.worth.composed.value, 4),
            "imbalance_predicted": round(self.predicted.value, 4),
            "gain": round(self.worth.gain, 4),
            "device_backlog_s": [round(one, 4) for one in per_device],
            "hot_device_share": round(float(sums.max()) / total, 4) if total > 0 else 0.0,
            "step_error": round(self.cost.error, 4),
            "pad_share": round(self.pads.shown, 4),
            "compose_s": round(self.composing_ns.shown / 1e9, 7),
            "retry_after_s": round(self.retry_ms.shown / 1e3, 3),
            "passed_over": {str(passes): count for passes, count in sorted(self.passes.items())},
            "tenant_dominant_share": {tenant: round(share, 4) for tenant, share in self.usage.report().items()},
            "shed": [{"tenant": tenant, "reason": reason, "count": count} for (tenant, reason), count in shed],
            "counters": dict(sorted(self.counters.items())),
        }

    def _load(self, one: Candidate) -> Loads:
        known = self._known(one.forecast)
        return known.load if known else self._nothing

    def _demand(self, one: Candidate) -> Loads:
        known = self._known(one.forecast)
        return known.demand if known else self._nothing

    def _is_overdue(self, one: Candidate, after: int, now_ns: int) -> bool:
        limit_ns = self.slo_ns if one.deadline_ns >= NEVER_NS else one.deadline_ns - one.arrived_ns
        return one.passed >= after or bool(limit_ns and now_ns - one.arrived_ns >= FORCE_AGE * limit_ns)


def _used(running: Sequence[Running]) -> Loads | None:
    """The chance that each expert is used by any of `running` in a step."""
    if not running:
        return None
    used: Loads = 1.0 - np.prod([1.0 - np.clip(one.demand, 0.0, 1.0) for one in running], axis=0)
    return used
