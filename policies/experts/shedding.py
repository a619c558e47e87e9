"""Who must be refused: at arrival only, by what the request would add to the hottest device, with shares that are safe.

While all that waits can be done within the target, everybody is let in. Beyond it a request is let in if it is cold
(it fits into the valleys: the time it adds for each of its tokens is below average), or if its tenant has had less than
half of its fair share of every device. Everybody else is told to come back, at jittered times so that they do not come
back together. Work that has started is never shed.

Dominant share: a tenant's largest share of any one device (Ghodsi et al., Dominant Resource Fairness, 2011).
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from headway.policies.experts.arrays import Floats, Loads, critical
from headway.policies.experts.cost import StepCost, Work

TARGET, FORCE_AGE = 0.6, 0.7  # of the time a request may take: what may wait, and when age goes before all else
COLD = 0.9  # of the average price of a token
OVER_COLD, OVER_PROTECTED = 0.4, 0.8  # so far over the target the two exceptions go
PROTECTED = 0.5  # of a tenant's fair share
USE_KEPT = 0.98  # of what tenants used, with each batch
USE_GONE = 1e-4  # of all use: a tenant below it is not active any more
SCALE_MAX = 1e12
DRAIN_RATE, DRAIN_MAX = 0.05, 2.0
TENANTS_MAX = 4096
RETRY_MS_MIN, RETRY_MS_MAX = 20, 30_000
SHOWN = 20  # tenants in a report


class Verdict(NamedTuple):
    """`admitted`, and why (room, cold, protected, reserved, saturated). `share`: of all work, on the `hottest`."""

    admitted: bool
    reason: str
    hottest: int = 0
    share: float = 0.0
    retry_after_ms: int = 0

    @property
    def text(self) -> str:
        """For whoever is refused."""
        where = f"device {self.hottest}, where most of its experts lie, has {self.share:.0%} of the waiting work"
        return f"{where}: it cannot be done in time; try again in about {self.retry_after_ms} ms"


class Usage:
    """What each tenant took of each device, lately.

    Instead of shrinking everybody with each batch, what is new counts for more: `_scale` grows, and only shares of it
    are ever read.
    """

    def __init__(self, groups: int) -> None:
        self._use: OrderedDict[str, Floats] = OrderedDict()  # who was heard of longest ago first
        self._total: Floats = np.zeros(groups)
        self._scale = 1.0

    def add(self, tenant: str, load: Loads) -> None:
        """It is going to take `load` [layers, groups]."""
        work = load.sum(0) * self._scale
        self._use[tenant] = self._use.pop(tenant, 0.0) + work
        self._total = self._total + work
        while len(self._use) > TENANTS_MAX:
            self._forget_one()

    def decay(self) -> None:
        """A batch has passed. Who has used nothing for long is forgotten."""
        self._scale /= USE_KEPT
        if self._scale > SCALE_MAX:
            self._use = OrderedDict((tenant, use / self._scale) for tenant, use in self._use.items())
            self._total = self._total / self._scale
            self._scale = 1.0
        least = USE_GONE * float(self._total.sum())
        while self._use and float(next(iter(self._use.values())).sum()) < least:
            self._forget_one()

    def _forget_one(self) -> None:
        self._total = np.maximum(self._total - self._use.popitem(last=False)[1], 0.0)

    @property
    def active(self) -> int:
        """Tenants who used something lately."""
        return len(self._use)

    def dominant(self, tenant: str) -> float:
        """The tenant's largest share of any device, 0 to 1."""
        use = self._use.get(tenant)
        return 0.0 if use is None else float((use / np.maximum(self._total, 1e-9)).max())

    def report(self) -> dict[str, float]:
        """The SHOWN largest dominant shares."""
        shares = {tenant: self.dominant(tenant) for tenant in self._use}
        return dict(sorted(shares.items(), key=lambda one: (-one[1], one[0]))[:SHOWN])


class Backlog:
    """All that waits, summed up: loads, tokens, steps, requests."""

    def __init__(self, layers: int, groups: int) -> None:
        self.load: Loads = np.zeros((layers, groups))
        self.tokens = self.steps = 0.0
        self.requests = 0

    def add(self, load: Loads, tokens: float, steps: float) -> None:
        """A request waits; `steps`: its share of the steps it will be in."""
        self.load = self.load + load
        self.tokens += tokens
        self.steps += steps
        self.requests += 1

    def remove(self, load: Loads, tokens: float, steps: float) -> None:
        """It waits no more."""
        self.requests -= 1
        if not self.requests:  # nothing waits: nothing is left of rounding either
            self.load = np.zeros_like(self.load)
            self.tokens = self.steps = 0.0
            return
        self.load = np.maximum(self.load - load, 0.0)
        self.tokens, self.steps = max(0.0, self.tokens - tokens), max(0.0, self.steps - steps)


class Drain:
    """How long a backlog really takes, over what it would take as one even batch: learned from what is launched."""

    def __init__(self) -> None:
        self.factor = 1.0

    def launched(self, backlog: Backlog, load: Loads, tokens: float, steps: float, cost: StepCost) -> None:
        """This batch left `backlog`, which holds at least as much as the batch again (else it tells nothing)."""
        if not cost.known or backlog.tokens < tokens or tokens <= 0:
            return
        whole = _ns(cost, backlog.load + load, backlog.tokens + tokens, backlog.steps + steps)
        part = whole * tokens / (backlog.tokens + tokens)
        ratio = _ns(cost, load, tokens, steps) / max(part, 1.0)
        self.factor += DRAIN_RATE * (min(DRAIN_MAX, max(1.0, ratio)) - self.factor)


def verdict(
    backlog: Backlog,
    load: Loads,
    tokens: float,
    steps: float,
    tenant: str,
    *,
    cost: StepCost,
    drain: float,
    usage: Usage,
    workers: int,
    limit_ns: float,
    reserved: bool,
    jitter: float,
) -> Verdict:
    """May a request with this predicted `load`, `tokens` and `steps` in, when an answer may take `limit_ns`?

    `drain`: how much longer a backlog takes than as one even batch. `reserved`: its price does not matter (highest
    priority). `jitter`: 0 to 1, spreads the times to come back by a fifth either way. O(layers x groups).
    """
    with_it = backlog.load + load
    before = _ns(cost, backlog.load, backlog.tokens, backlog.steps) * drain / workers
    after = _ns(cost, with_it, backlog.tokens + tokens, backlog.steps + steps) * drain / workers
    target = TARGET * limit_ns
    if after <= target:
        return Verdict(True, "room")
    over = after / target - 1.0
    price, average = (after - before) / max(tokens, 1.0), before / max(backlog.tokens, 1.0)
    if over < OVER_COLD and price < COLD * average:
        return Verdict(True, "cold")
    if over < OVER_PROTECTED:
        if reserved:
            return Verdict(True, "reserved")
        if usage.dominant(tenant) < PROTECTED / max(1, usage.active):
            return Verdict(True, "protected")
    sums = with_it.sum(0)
    hottest = int(sums.argmax())
    retry_ms = (after - target) / 1e6 * (0.8 + 0.4 * jitter)
    return Verdict(
        False,
        "saturated",
        hottest,
        float(sums[hottest] / max(float(sums.sum()), 1e-9)),
        int(min(RETRY_MS_MAX, max(RETRY_MS_MIN, retry_ms))),
    )


def _ns(cost: StepCost, load: Floats, tokens: float, steps: float) -> float:
    return cost.ns(Work(tokens, critical(load)), steps)
