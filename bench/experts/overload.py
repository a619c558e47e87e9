"""A closed loop on a virtual clock: arrivals, a door, one queue, expert-parallel workers that take batches when free.

The predictor starts cold and learns only from what was served. Time is in batches: one is what the average batch of the
same arrivals takes when they go first come, first served. The expert part of a step is a given share of it and lasts
as long as its hottest device; the rest is paid by the token. Nothing here knows what will come.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headway.bench.experts.routings import Routed, Routings, device_loads, stream
from headway.policies.experts.arrays import Floats, Loads, critical, imbalance
from headway.policies.experts.cost import Work
from headway.policies.experts.policy import ExpertAware
from headway.policies.experts.predictor import Predictor
from headway.policies.experts.shedding import TARGET
from headway.policies.experts.values import Forecast, Learned, Observed

BATCH_NS = 100_000_000  # what one unit of time is on the clock that the policy sees
HOT, HOT_DOMAIN = "hot", 9
FIXED = 0.05  # of a batch's time
FLAT = 0.03


class Policy(NamedTuple):
    """`door`: open, blind (by tokens) or experts; `compose`: nothing, ours, or truth (the oracle)."""

    name: str
    door: str
    compose: str


FIFO_OPEN = Policy("fifo, open door", "open", "")
FIFO = Policy("fifo, blind door", "blind", "")
COMPOSED = Policy("composed, blind door", "blind", "ours")
OURS = Policy("composed, expert door", "experts", "ours")
ORACLE = Policy("oracle", "experts", "truth")
ALL = (FIFO_OPEN, FIFO, COMPOSED, OURS, ORACLE)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Arrivals at `load` times the capacity of first come, first served. Each domain is a tenant.

    `hot_share`: of all requests, of one domain, whose tenant is then called HOT.
    """

    load: float
    burst: int = 16
    hot_share: float = 0.0
    take: int = 16
    devices: int = 8
    workers: int = 1
    moe_share: float = 0.6
    slo: float = 10.0  # batches
    requests: int = 6000
    adversary: float = 0.0  # share of requests, of a tenant of their own, that all go to the first device
    unpredictable: bool = False  # a control: experts are renamed at random for each request
    flat: bool = False  # another: requests differ so little that batches are out of balance by FLAT, as they come


@dataclass(slots=True)
class One:
    """A request in the queue: what a policy may see of it."""

    rid: int
    tenant: str
    forecast: Forecast | None
    arrived_ns: int
    deadline_ns: int
    passed: int = 0


@dataclass(slots=True)
class Outcome:
    """Throughputs are over the capacity of first come, first served; latencies over the SLO."""

    requests: float
    tokens: float
    shed: float
    late: float
    p50: float
    p99: float
    worst: float
    imbalance: float
    r2: float
    composed: float  # share of batches
    off_after: int  # requests that were answered before the last batch was composed; 0 if none was
    success: dict[str, float] = field(default_factory=dict)  # by tenant, within the SLO
    p99_batches: float = 0.0


@dataclass(slots=True)
class World:
    """The arrivals of a scenario, and what they cost."""

    scenario: Scenario
    requests: list[Routed]
    true: Loads
    tokens: Floats
    tenants: list[str]
    at: Floats
    per_token: float
    per_slot: float
    capacity: float  # requests in a unit of time, of one worker
    flat: float  # hottest over token in an even load: what a token's expert part costs at least

    def batch_time(self, members: Sequence[int]) -> float:
        """What the batch of these requests takes."""
        load = self.true[list(members)].sum(0)
        return FIXED + self.per_token * float(self.tokens[list(members)].sum()) + self.per_slot * critical(load)


def world(routings: Routings, scenario: Scenario, seed: int) -> World:
    """Draw the arrivals. Costs are set so that a perfectly even batch of average length takes one unit."""
    count, take = scenario.requests, scenario.take
    hot = HOT_DOMAIN % routings.domains
    other = (1.0 - scenario.hot_share) / (routings.domains - 1)
    weights = [scenario.hot_share if domain == hot else other for domain in range(routings.domains)]
    drawn = stream(
        routings.all, count, burst=scenario.burst, seed=seed, weights=weights if scenario.hot_share else None
    )
    true = device_loads(drawn, routings.placement(scenario.devices))
    tokens = np.array([one.tokens for one in drawn], float)
    tenants = [HOT if scenario.hot_share and one.domain == hot else str(one.domain) for one in drawn]
    rng = np.random.default_rng(seed + 7)
    if scenario.unpredictable:
        true = rng.permuted(true, axis=2)
    if scenario.flat:
        even = true.mean(2, keepdims=True)
        batches = [imbalance(true[start : start + take].sum(0)) for start in range(0, count - take, take)]
        true = even + (true - even) * np.float32(FLAT / (np.mean(batches) - 1.0))
    if scenario.adversary:
        hostile = np.flatnonzero(np.random.default_rng(seed + 9).random(count) < scenario.adversary)
        width = true.sum(2).mean() / tokens.mean()
        true[hostile] = 0.0
        true[hostile, :, 0] = width * tokens[hostile, None]
        for at in hostile:
            tenants[at] = HOT
    flat = float(true.mean(2).sum() / tokens.sum())
    mean = tokens.mean() * take
    made = World(
        scenario, drawn, true, tokens, tenants, tokens,
        per_token=(1 - scenario.moe_share) * (1 - FIXED) / mean,
        per_slot=scenario.moe_share * (1 - FIXED) / (mean * flat),
        capacity=1.0, flat=flat,
    )  # fmt: skip
    times = [made.batch_time(range(start, start + take)) for start in range(0, count - take, take)]
    made.capacity = take / float(np.mean(times))
    rate = made.capacity * scenario.load * scenario.workers
    made.at = np.cumsum(rng.exponential(1 / rate, count))
    return made


class Server:
    """One run of a policy over a world."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world, self.policy = world, policy
        scenario = world.scenario
        layers = world.true.shape[1]
        self.slo = scenario.slo * scenario.take / world.capacity
        self.experts = ExpertAware(layers, scenario.devices, scenario.take)
        self.predictor = Predictor(layers, scenario.devices)
        self.queue: dict[int, One] = {}
        self.done = np.full(len(world.requests), np.nan)
        self.shed = np.zeros(len(world.requests), bool)
        self.queued_tokens = 0.0
        self.token_time = world.per_token + 1.2 * world.per_slot * world.flat
        self.batches = self.answered = self.off_after = 0
        self.sums = np.zeros(2)

    def run(self) -> Outcome:
        """Until the last request has ended."""
        arrivals = [(float(at), 0, rid, 0) for rid, at in enumerate(self.world.at)]
        events: list[tuple[float, int, int, int]] = arrivals  # sorted: a heap
        free = list(range(self.world.scenario.workers))
        flying: dict[int, tuple[list[int], float]] = {}
        now = 0.0
        while events:
            now, kind, which, worker = heapq.heappop(events)
            if kind == 0:
                self.arrive(which, now)
            else:
                self.finish(which, *flying.pop(which), now)
                free.append(worker)
            while free and self.queue:
                worker = free.pop(0)
                batch, members = self.launch(worker, now)
                if not members:
                    free.append(worker)
                    break
                spent = self.world.batch_time(members)
                flying[batch] = members, spent
                heapq.heappush(events, (now + spent, 1, batch, worker))
        return self.outcome(now)

    def arrive(self, rid: int, now: float) -> None:
        world, tenant = self.world, self.world.tenants[rid]
        slo_ns, at_ns = int(self.slo * BATCH_NS), int(now * BATCH_NS)
        one = One(rid, tenant, self.forecast(rid), at_ns, at_ns + slo_ns)
        if self.policy.door == "experts" and self.experts.worth.predictable and self.experts.cost.known:
            found = self.experts.refusal(
                one.forecast, tenant, slo_ns, workers=world.scenario.workers, reserved=False, rid=rid
            )
            refused = found is not None
        elif self.policy.door == "open":
            refused = False
        else:
            wait = (self.queued_tokens + world.tokens[rid]) * self.token_time / world.scenario.workers
            refused = wait > TARGET * self.slo
        if refused:
            self.shed[rid] = True
            return
        self.queue[rid] = one
        self.queued_tokens += world.tokens[rid]
        self.experts.enter(one)

    def forecast(self, rid: int) -> Forecast:
        request = self.world.requests[rid]
        if self.policy.compose == "truth":
            return Forecast(self.world.true[rid], request.tokens)
        return Forecast(self.predictor.predict(request.prompt, self.world.tenants[rid]), request.tokens)

    def launch(self, worker: int, now: float) -> tuple[int, list[int]]:
        world, take = self.world, self.world.scenario.take
        if self.policy is not FIFO_OPEN:
            self.expire(now)
        if not self.queue:
            return 0, []
        self.batches += 1
        window = list(self.queue.values())[: self.experts.window]
        chosen, reason = list(range(min(take, len(window)))), ""
        if self.policy.compose:
            chosen, reason = self.experts.choose(
                window, len(self.queue), take, self.batches, worker, int(now * BATCH_NS)
            )
        picked = [window[at] for at in chosen]
        for one in picked:
            self.leave(one)
        members = [one.rid for one in picked]
        if reason == "composed":
            self.off_after = self.answered
        self.experts.started(picked, take=take, batch=self.batches, worker=worker, reason=reason)
        load = world.true[members].sum(0)
        self.sums += load.max(-1).sum(), load.mean(-1).sum()
        return self.batches, members

    def expire(self, now: float) -> None:
        for one in [one for one in self.queue.values() if now - self.world.at[one.rid] > self.slo]:
            self.leave(one)
            self.shed[one.rid] = True

    def leave(self, one: One) -> None:
        del self.queue[one.rid]
        self.queued_tokens -= self.world.tokens[one.rid]
        self.experts.leave(one)

    def finish(self, batch: int, members: list[int], spent: float, now: float) -> None:
        world = self.world
        self.token_time += 0.05 * (spent / float(world.tokens[members].sum()) - self.token_time)
        self.answered += len(members)
        for rid in members:
            self.done[rid] = now
            self.predictor.learn(world.requests[rid].prompt, world.true[rid], world.tenants[rid])
        reports = [Observed(batch, rid, True, int(world.tokens[rid]), world.true[rid]) for rid in members]
        good = 1.0 if self.policy.compose == "truth" else self.predictor.r2
        work = Work(float(world.tokens[members].sum()), critical(world.true[members].sum(0)))
        self.experts.hear(Learned(reports, good, self.predictor.reports, work, int(spent * BATCH_NS)))
        for rid in members:
            self.experts.ended(rid)

    def outcome(self, now: float) -> Outcome:
        world = self.world
        latency = self.done - world.at
        good = latency <= self.slo  # not done: nan, and so not good
        over = max(now, float(world.at[-1])) * world.capacity * world.scenario.workers
        finished = latency[~np.isnan(latency)]
        tenants = np.array(world.tenants)
        return Outcome(
            requests=float(good.sum()) / over,
            tokens=float(world.tokens[good].sum()) / over / float(world.tokens.mean()),
            shed=float(self.shed.mean()),
            late=float((finished > self.slo).sum()) / len(latency),
            p50=float(np.percentile(finished, 50)) / self.slo,
            p99=float(np.percentile(finished, 99)) / self.slo,
            worst=float(finished.max()) / self.slo,
            imbalance=float(self.sums[0] / self.sums[1]),
            r2=self.predictor.r2,
            composed=self.experts.counters["batches.composed"] / max(1, self.batches),
            off_after=self.off_after,
            success={tenant: float(good[tenants == tenant].mean()) for tenant in sorted(set(world.tenants))},
            p99_batches=float(np.percentile(finished, 99)) * world.capacity / world.scenario.take,
        )


def simulate(routings: Routings, scenario: Scenario, policies: Sequence[Policy], seed: int) -> dict[str, Outcome]:
    """The same arrivals through each policy."""
    drawn = world(routings, scenario, seed)
    return {policy.name: Server(drawn, policy).run() for policy in policies}
