"""Expert-aware scheduling of one service, as the core uses it: who may in, who runs next, and what came of it.

The core hands in requests that carry a forecast, made elsewhere; it never looks into one. All state that deciding needs
is here: what waits, as loads; what runs, as demand; which batches were composed and how even they turned out. The
predictor itself is not: it learns in another thread, and only says how good it is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headway.policies.experts.arrays import Loads, imbalance
from headway.policies.experts.composer import (
    GROUPING_WINDOW,
    JOINING_WINDOW,
    WINDOW,
    Waiting,
    balanced,
    grouped,
    overdue_after,
    overtaken,
)
from headway.policies.experts.cost import StepCost, Work
from headway.policies.experts.decode import Running
from headway.policies.experts.shedding import FORCE_AGE, Backlog, Drain, Usage, Verdict, verdict
from headway.policies.experts.worth import Mean, Worth

BATCHES_KEPT = 256  # launched batches whose reports are still awaited; older ones are given up
PASSES_SHOWN = 16  # the histogram of overtakings, in batches' worth, ends here
TENANTS_SHOWN = 20


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What a request is expected to ask for: `load` [layers, groups] of its `tokens` input tokens, `decode` more."""

    load: Loads
    tokens: int
    decode: float = 0.0

    @property
    def demand(self) -> Loads:
        """The load of one token."""
        demand: Loads = self.load / max(1, self.tokens)
        return demand

    @property
    def whole(self) -> Loads:
        """The prompt and what it decodes: what waits in it."""
        whole: Loads = self.load * np.float32(1.0 + self.decode / max(1, self.tokens))
        return whole


class Candidate(Protocol):
    """A waiting request, as far as it matters here. `forecast`: a Forecast, or None where nobody could make one."""

    @property
    def rid(self) -> int: ...

    @property
    def forecast(self) -> object | None: ...

    @property
    def arrived_ns(self) -> int: ...

    @property
    def limit_ns(self) -> int: ...

    passed: int  # younger requests that overtook it


class Choice(NamedTuple):
    """Indices into the window, in the order they go, and why: composed, grouped, or why they stay as they came."""

    taken: list[int]
    reason: str


class Observed(NamedTuple):
    """A report: `counts` [layers, groups] of `tokens` tokens of a request: of its `prompt`, or decoded."""

    batch: int
    rid: int
    prompt: bool
    tokens: int
    counts: Loads


@dataclass(slots=True)
class Launched:
    """A batch whose truth is awaited."""

    reason: str
    awaited: set[int]
    full: bool
    load: Loads
    seen: int = 0


class ExpertAware:
    """`layers` x `groups`: what is reported. `grouping`: groups are single experts, and all lie on one device.

    `joining`: requests join those who run one by one (iteration-level engines), instead of in whole batches.
    """

    def __init__(self, layers: int, groups: int, *, grouping: bool = False, joining: bool = False) -> None:
        self.layers, self.groups = layers, groups
        self.grouping, self.joining = grouping, joining
        self.worth = Worth()
        self.cost = StepCost()
        self.usage = Usage(groups)
        self.backlog = Backlog(layers, groups)
        self.drain = Drain()
        self.predicted = Mean()  # imbalance of composed batches, as it was predicted
        self.counters: Counter[str] = Counter()
        self.shed: Counter[tuple[str, str]] = Counter()  # (tenant, reason)
        self.passes: Counter[int] = Counter()
        self._running: dict[int, tuple[int, Running, str]] = {}  # rid: worker, demand, tenant
        self._launched: dict[int, Launched] = {}
        self._nothing = np.zeros((layers, groups), np.float32)

    def __repr__(self) -> str:
        return f"<ExpertAware {self.layers} x {self.groups}, {self.backlog.requests} waiting, {self.worth!r}>"

    def window(self, slots: int) -> int:
        """How many of the oldest to hand to `choose`. `slots`: requests in a batch, or that run at a time."""
        return slots * (GROUPING_WINDOW if self.grouping else JOINING_WINDOW if self.joining else WINDOW)

    # ------------------------------------------------------------ at the door

    def refusal(
        self, forecast: object | None, tenant: str, *, limit_ns: int, take: int, workers: int, reserved: bool, rid: int
    ) -> Verdict | None:
        """Why the request must be refused, or None. Asks for nothing while costs or loads are not known."""
        if not isinstance(forecast, Forecast) or not limit_ns or self.grouping:
            return None
        if not self.cost.known or not self.worth.predictable:
            return None
        found = verdict(
            self.backlog,
            forecast.whole,
            forecast.tokens + forecast.decode,
            tenant,
            cost=self.cost,
            drain=self.drain.factor,
            usage=self.usage,
            take=take,
            workers=max(1, workers),
            limit_ns=limit_ns,
            reserved=reserved,
            jitter=rid * 0.6180339887 % 1.0,
        )
        self.counters[f"door.{found.reason}"] += 1
        if found.admitted:
            return None
        if len(self.shed) < 4096 or (tenant, found.reason) in self.shed:
            self.shed[tenant, found.reason] += 1
        return found

    def entered(self, candidate: Candidate, tenant: str) -> None:
        """It waits now."""
        if isinstance(forecast := candidate.forecast, Forecast):
            self.backlog.add(forecast.whole, forecast.tokens + forecast.decode)
            self.usage.add(tenant, forecast.whole)

    def left(self, candidate: Candidate) -> None:
        """It waits no more, whatever became of it."""
        if isinstance(forecast := candidate.forecast, Forecast):
            self.backlog.remove(forecast.whole, forecast.tokens + forecast.decode)

    # ------------------------------------------------------------ who runs next

    def choose(
        self, waiting: Sequence[Candidate], depth: int, take: int, batch: int, worker: int, now_ns: int
    ) -> Choice:
        """Up to `take` of `waiting` (the oldest of `depth`, in order) for batch number `batch` on `worker`."""
        skipped = self.worth.skipped(depth, take, batch)
        self.counters[f"batches.{skipped or ('grouped' if self.grouping else 'composed')}"] += 1
        if skipped:
            return Choice(list(range(min(take, len(waiting)))), skipped)
        after = overdue_after(len(waiting))
        overdue = [at for at, one in enumerate(waiting) if _is_overdue(one, after, now_ns)]
        self.counters["forced"] += min(take, len(overdue))
        running = [demand for on, demand, _ in self._running.values() if on == worker]
        if self.grouping:
            chances = np.stack([self._demand(one) for one in waiting])
            taken = grouped(Waiting(chances, overdue, not self.joining), take, _used(running))
        else:
            taken = balanced(*self._balance(waiting, overdue, take, running))
        for at in taken:
            self.passes[min(waiting[at].passed // take, PASSES_SHOWN)] += 1
        for one, younger in zip(waiting, overtaken(taken, len(waiting)), strict=True):
            one.passed += younger
        return Choice(taken, "grouped" if self.grouping else "composed")

    def _balance(
        self, waiting: Sequence[Candidate], overdue: list[int], take: int, running: list[Running]
    ) -> tuple[Waiting, int, Loads | None]:
        """Prompts, and beside them, as further layers, what is decoded while those chosen now run."""
        loads = np.stack([self._load(one) for one in waiting])
        horizon = float(np.mean([_decode(one) for one in waiting]))
        if not horizon:
            return Waiting(loads, overdue, not self.joining), take, None
        decoding = np.stack([self._demand(one) for one in waiting]) * np.float32(horizon)
        now = np.sum([one.demand for one in running], axis=0) * np.float32(horizon) if running else self._nothing
        both = Waiting(np.concatenate([loads, decoding], 1), overdue, not self.joining)
        return both, take, np.concatenate([self._nothing, now])

    def started(
        self, requests: Sequence[tuple[Candidate, str]], *, take: int, batch: int, worker: int, reason: str
    ) -> None:
        """These (each with its tenant) are on their way to `worker` as one batch."""
        self.usage.decay()
        loads = [self._load(one) for one, _ in requests]
        total: Loads = np.sum(loads, axis=0)
        if reason == "composed":
            self.predicted.add(imbalance(total))
        wholes = [one.forecast for one, _ in requests if isinstance(one.forecast, Forecast)]
        if wholes:
            load: Loads = np.sum([one.whole for one in wholes], axis=0)
            tokens = sum(one.tokens + one.decode for one in wholes)
            self.drain.launched(self.backlog, load, tokens, len(wholes), self.cost, take)
        full = len(requests) == take > 1
        self._launched[batch] = Launched(reason, {one.rid for one, _ in requests}, full, np.zeros_like(self._nothing))
        while len(self._launched) > BATCHES_KEPT:
            del self._launched[next(iter(self._launched))]
        for (one, tenant), load in zip(requests, loads, strict=True):
            tokens = one.forecast.tokens if isinstance(one.forecast, Forecast) else 1
            self._running[one.rid] = worker, Running(load, tokens), tenant

    # ------------------------------------------------------------ what came of it

    def observed(self, reports: Sequence[Observed], r2: float, learned: int) -> None:
        """Reports of those who run, and what the predictor says of itself: its R2, and how many reports it has seen."""
        self.worth.learned(r2, learned)
        for report in reports:
            self.counters["reports"] += 1
            if (found := self._running.get(report.rid)) is not None:
                if report.prompt:
                    found[1].prefilled(report.counts, report.tokens)
                else:
                    found[1].decoded(report.counts, report.tokens)
            if report.prompt:
                self._one_of_batch(report)

    def stepped(self, work: Work, spent_ns: float) -> None:
        """A measured step."""
        self.cost.observe(work, spent_ns)

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
        if launched.full:
            self.worth.observe(imbalance(launched.load), composed=launched.reason == "composed")

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
            "imbalance_fifo": round(self.worth.fifo.value, 4),
            "imbalance_composed": round(self.worth.composed.value, 4),
            "imbalance_predicted": round(self.predicted.value, 4),
            "gain": round(self.worth.gain, 4),
            "device_backlog_s": [round(one, 4) for one in per_device],
            "hot_device_share": round(float(sums.max()) / total, 4) if total > 0 else 0.0,
            "step_error": round(self.cost.error, 4),
            "passed_over": {str(passes): count for passes, count in sorted(self.passes.items())},
            "tenant_dominant_share": {tenant: round(share, 4) for tenant, share in self.usage.report().items()},
            "shed": [{"tenant": tenant, "reason": reason, "count": count} for (tenant, reason), count in shed],
            "counters": dict(sorted(self.counters.items())),
        }

    def _load(self, one: Candidate) -> Loads:
        return one.forecast.load if isinstance(one.forecast, Forecast) else self._nothing

    def _demand(self, one: Candidate) -> Loads:
        return one.forecast.demand if isinstance(one.forecast, Forecast) else self._nothing


def _decode(one: Candidate) -> float:
    return one.forecast.decode if isinstance(one.forecast, Forecast) else 0.0


def _is_overdue(one: Candidate, after: int, now_ns: int) -> bool:
    return one.passed >= after or bool(one.limit_ns and now_ns - one.arrived_ns >= FORCE_AGE * one.limit_ns)


def _used(running: Sequence[Running]) -> Loads | None:
    """The chance that each expert is used by any of `running` in a step."""
    if not running:
        return None
    used: Loads = 1.0 - np.prod([1.0 - np.clip(one.demand, 0.0, 1.0) for one in running], axis=0)
    return used
