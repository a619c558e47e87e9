"""One service: a model and kind, its two lanes, its fleet, and what its batches cost.

Short and long inputs wait in lanes of their own. A long input goes alone and at once, under a concurrency bound of its
own, so that it neither pads others nor takes every worker. Between lanes, whoever is due first goes first.
"""

from headway.policies.views import Cost, LaneView, Launch, Policies, Wait, WindowChoice
from headway.scheduler.book import NEVER_NS, Request
from headway.scheduler.fleet import Batch, Fleet, Worker
from headway.scheduler.held import HeldWindow
from headway.scheduler.latency import CostModel
from headway.scheduler.queue import Lane

ORPHAN_NS = 10_000_000_000  # how long requests wait for a first or a new worker before they are told
JOINS_RUNNING = Launch("joins_running")


class Service:
    """What the core keeps for one (model, kind). `abandoned_ns`: when whoever still waits for a worker is told."""

    __slots__ = ("abandoned_ns", "down", "fleet", "kind", "lanes", "learned", "long", "model", "short", "window")

    def __init__(self, model: str, kind: str, window: WindowChoice, now_ns: int) -> None:
        self.model = model
        self.kind = kind
        self.short = Lane("short")
        self.long = Lane("long")
        self.lanes = (self.short, self.long)
        self.fleet = Fleet()
        self.learned = CostModel()
        self.window = HeldWindow(window)
        self.abandoned_ns = now_ns + ORPHAN_NS
        self.down = ""

    def __repr__(self) -> str:
        return f"<Service {self.model}/{self.kind} {self.waiting} waiting, {len(self.fleet.workers)} workers>"

    @property
    def waiting(self) -> int:
        """Requests in both lanes."""
        return len(self.short.waiting) + len(self.long.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Their input tokens."""
        return self.short.tokens + self.long.tokens

    @property
    def workers(self) -> int:
        """How many workers serve it."""
        return len(self.fleet.workers)

    @property
    def max_batch(self) -> int:
        """The largest batch that any of them takes."""
        return self.fleet.max_batch

    @property
    def cost(self) -> Cost:
        """What a batch costs, as far as is known."""
        return self.learned.cost

    def lane(self, request: Request) -> Lane:
        """Where the request waits."""
        return self.long if request.long else self.short

    def join(self, worker: Worker, prior_ns: tuple[float, ...]) -> None:
        """A worker is here."""
        if not self.learned.seen and prior_ns:
            self.learned = CostModel(prior_ns)
        self.fleet.join(worker)
        self.abandoned_ns = NEVER_NS
        self.down = ""

    def part(self, worker: Worker, now_ns: int) -> None:
        """A worker is gone."""
        self.fleet.part(worker)
        if not self.fleet.workers:
            self.abandoned_ns = now_ns + ORPHAN_NS

    def observe(self, batch: Batch, tokens: int, compute_ns: int) -> None:
        """A one-shot batch ran to its end: the cost model learns from it, and the window if it is one that learns."""
        self.learned.observe(len(batch.rids), tokens, compute_ns)
        if not batch.long:
            self.window.observe(len(batch.rids), compute_ns)

    @property
    def wakeup_ns(self) -> int:
        """When a window closes, a deadline comes, or waiting for a worker is over."""
        if not self.waiting:
            return NEVER_NS
        at = self.abandoned_ns
        for lane in self.lanes:
            at = min(at, lane.deadline_ns())
            if type(lane.decision) is Wait:
                at = min(at, lane.decision.until_ns)
        return at

    def batch_size(self, lane: Lane, worker: Worker) -> int:
        """How many the worker takes from this lane in one batch."""
        if lane is self.long:
            return 1
        most = lane.decision.most if type(lane.decision) is Launch else 0
        return min(most, worker.room) if most else worker.room

    def long_bound(self, policies: Policies) -> int:
        """How many long inputs may run at once."""
        return policies.long_concurrency or max(1, len(self.fleet.workers) // 2)

    def choose(self, free: list[Worker], policies: Policies, now_ns: int) -> tuple[Lane, str] | None:
        """The lane to launch from and why, or None if all wait. Lanes are asked in the order of who is due first."""
        heads = [(first.key, index, lane) for index, lane in enumerate(self.lanes) if (first := lane.first())]
        for _, _, lane in sorted(heads):
            if lane is self.long:
                if self.fleet.long_running < self.long_bound(policies):
                    return lane, "long_alone"
                continue
            lane.decision = decision = self._ask(lane, free, now_ns)
            if type(decision) is Launch:
                return lane, decision.reason
            if len(free) == 1:  # whoever is due later must not take the worker that this one waits with
                return None
        return None

    def window_ns(self, now_ns: int) -> int:
        """How long a request that came now would wait for others; 0 while an iteration-level engine runs."""
        workers = self.fleet.workers.values()
        idle = sum(not worker.running for worker in workers)
        if not idle and any(worker.iteration for worker in workers):
            return 0
        view = LaneView(
            waiting=1,
            oldest_arrival_ns=now_ns,
            last_arrival_ns=now_ns,
            arrivals_sum_ns=now_ns,
            tightest_deadline_ns=None,
            max_batch=self.max_batch,
            other_idle=idle > 1,
            cost=self.cost,
            intervals=self.short.intervals,
        )
        return self.window.effective_ns(view, now_ns)

    def _ask(self, lane: Lane, free: list[Worker], now_ns: int) -> Launch | Wait:
        """What the window says. While an engine runs and no other worker is idle there is none: its next step comes
        anyway, and a window would only add to the first token."""
        idle = sum(1 for worker in free if not worker.running)
        if not idle:
            return JOINS_RUNNING
        deadline_ns = lane.deadline_ns()
        view = LaneView(
            waiting=len(lane.waiting),
            oldest_arrival_ns=lane.oldest_arrival_ns(),
            last_arrival_ns=lane.last_arrival_ns,
            arrivals_sum_ns=lane.arrivals_sum_ns,
            tightest_deadline_ns=None if deadline_ns == NEVER_NS else deadline_ns,
            max_batch=max(worker.room for worker in free),
            other_idle=idle > 1,
            cost=self.cost,
            intervals=lane.intervals,
        )
        return self.window.ask(view, lane.tokens, now_ns)
