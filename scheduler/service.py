"""One service: a model and kind, its two lanes, its fleet, and what its batches cost.

Short and long inputs wait in lanes of their own. A long input goes alone and at once, under a concurrency bound of its
own, so that it neither pads others nor takes every worker. Between lanes, whoever is due first goes first.
"""

from typing import Any, NamedTuple

from headway.policies.fair import Shares
from headway.policies.forecast import ExpertFacts
from headway.policies.views import BatchView, Cost, LaneView, Launch, Policies, Refusal, Wait, WindowChoice
from headway.scheduler.answers import Answers
from headway.scheduler.book import NEVER_NS, Request
from headway.scheduler.events import Submit
from headway.scheduler.fleet import Batch, Fleet, Worker
from headway.scheduler.held import HeldWindow
from headway.scheduler.latency import CostModel
from headway.scheduler.queue import Lane

ORPHAN_NS = 10_000_000_000  # how long requests wait for a first or a new worker before they are told
JOINS_RUNNING = Launch("joins_running")
KV_MARGIN = 1.5  # cache held for an answer, in mean answers: one that grows longer may be preempted, and is not lost


class Choice(NamedTuple):
    """What to launch, why, and who can run it."""

    lane: Lane
    reason: str
    takers: list[Worker]


def _due(head: tuple[int, int, Lane, Request]) -> tuple[int, int]:
    return head[0], head[1]


class Service:
    """What the core keeps for one (model, kind). `abandoned_ns`: when whoever still waits for a worker is told."""

    __slots__ = (
        "abandoned_ns",
        "answers",
        "down",
        "experts",
        "facts",
        "fleet",
        "kind",
        "lanes",
        "learned",
        "long",
        "model",
        "padded",
        "shares",
        "short",
        "turnaround_ns",
        "window",
    )

    def __init__(self, model: str, kind: str, window: WindowChoice, policies: Policies, now_ns: int) -> None:
        self.model = model
        self.kind = kind
        self.shares = Shares(policies.tenant_weights)
        self.short = Lane("short", self.shares)
        self.long = Lane("long", self.shares)
        self.lanes = (self.short, self.long)
        self.fleet = Fleet()
        self.learned = CostModel()
        self.window = HeldWindow(window)
        self.answers = Answers()
        self.turnaround_ns = 0.0
        self.padded = False
        self.experts: Any = None  # an ExpertAware, where workers route tokens to experts; it needs numpy
        self.facts: ExpertFacts | None = None
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

    @property
    def rows_max(self) -> int:
        """Requests that may run at once, on iteration-level workers; 0 where batches run as a whole."""
        return self.fleet.rows_max

    @property
    def running(self) -> int:
        """Requests that its workers have."""
        return self.fleet.running

    @property
    def answer_mean(self) -> float:
        """Tokens of an answer on average; 0 while unknown."""
        return self.answers.mean

    @property
    def answer_least(self) -> float:
        """Tokens that three of four answers have at least; 0 while unknown."""
        return self.answers.least

    def lane(self, request: Request) -> Lane:
        """Where the request waits."""
        return self.long if request.long else self.short

    def join(
        self,
        worker: Worker,
        prior_ns: tuple[float, ...],
        policies: Policies,
        *,
        padded: bool,
        experts: ExpertFacts | None,
    ) -> None:
        """A worker is here."""
        if experts is not None and experts != self.facts and policies.experts is not None:
            self._look_at(experts, policies.experts(experts))
        self.padded = self.padded or padded
        if not self.learned.seen and prior_ns:
            self.learned = CostModel(prior_ns)
        self.fleet.join(worker)
        self.abandoned_ns = NEVER_NS
        self.down = ""

    def _look_at(self, facts: ExpertFacts, experts: Any) -> None:
        """Its model has experts, or they have moved: from now on their load counts. `experts` None: nobody can tell."""
        self.facts, self.experts = facts, experts
        for lane in self.lanes:
            lane.backlog = experts
            for request in lane.waiting.values() if experts is not None else ():
                experts.enter(request)

    def part(self, worker: Worker, now_ns: int) -> None:
        """A worker is gone."""
        self.fleet.part(worker)
        if not self.fleet.workers:
            self.abandoned_ns = now_ns + ORPHAN_NS

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

    def request(self, event: Submit, order: int, policies: Policies, now_ns: int) -> Request:
        """An admitted request, with what has to be guessed about it: what of an answer its tenant is charged for ahead,
        and how much cache it may need."""
        tokens, mean = event.tokens, self.answers.mean
        new = int(min(event.max_new, mean)) if mean else event.max_new
        kv = int(min(event.max_new, KV_MARGIN * mean)) if mean else event.max_new
        return Request(
            rid=event.rid,
            client=event.client,
            service=self,
            long=tokens > policies.bypass(self.learned.central),
            tokens=tokens,
            deadline_ns=NEVER_NS if event.deadline_ns is None else event.deadline_ns,
            arrived_ns=now_ns,
            key=policies.order(event, now_ns),
            order=order,
            tenant=event.tenant,
            bucket=tokens.bit_length() if self.padded else 0,
            kv=tokens + kv,  # whoever is here now: those who wait for a worker to come back must fit, too
            charged=tokens + new if self.fleet.rows_max else tokens,
            forecast=event.forecast,
        )

    def ended(self, request: Request) -> None:
        """A request that ran has its ending: what its tenant was charged for and did not get is given back, and its
        answer says something about answers."""
        if self.experts is not None:
            self.experts.ended(request.rid)
        if request.charged and self.fleet.rows_max:
            tenant = self.shares.tenants.get(request.tenant)
            if tenant is not None:
                tenant.correct(request.tokens + request.new - request.charged)
            if request.new:
                self.answers.observe(request.new)

    def returned(self, request: Request) -> None:
        """A request waits again through no fault of its tenant's: it is charged anew when it runs."""
        if self.experts is not None:
            self.experts.ended(request.rid)
        tenant = self.shares.tenants.get(request.tenant)
        if tenant is not None:
            tenant.correct(-request.charged)

    def refusal(self, arrival: Submit, policies: Policies, now_ns: int) -> Refusal | None:
        """Why a request must not come in, or None."""
        if self.down or now_ns >= self.abandoned_ns:
            why = self.down or "its workers are gone"
            text = f"no worker serves {self.kind} for model {self.model!r}: {why}"
            return Refusal("no_worker", text, 1000, "no_worker")
        refused = policies.admit(arrival, self, now_ns)
        if refused is not None or self.experts is None:
            return refused
        left_ns = None if arrival.deadline_ns is None else arrival.deadline_ns - now_ns
        found = self.experts.refusal(
            arrival.forecast,
            arrival.tenant,
            left_ns,
            workers=len(self.fleet.workers),
            reserved=arrival.priority < 0,
            rid=arrival.rid,
        )
        return (
            None if found is None else Refusal("expert_saturated", found.text, found.retry_after_ms, "expert_saturated")
        )

    def take(
        self, lane: Lane, worker: Worker, policies: Policies, batch: int, now_ns: int
    ) -> tuple[list[Request], str]:
        """The requests of batch number `batch`, and, where experts' load counts, why these or why as they came."""
        most = self.batch_size(lane, worker, policies)
        tokens_max, experts, first = policies.batch_tokens_max, self.experts, lane.first()
        if experts is None or lane is self.long or first is None or first.suspect:
            return lane.take(most, tokens_max, worker, self.padding_worth), ""
        window = lane.upcoming(first, experts.window, worker) if len(lane) > most else []
        chosen, why = experts.choose(window, len(window), most, batch, worker.worker, now_ns)
        picked = [window[at] for at in chosen] if why in ("composed", "grouped") else None
        taken = lane.take(most, tokens_max, worker, self.padding_worth, picked)
        experts.started(taken, take=most, batch=batch, worker=worker.worker, reason=why)
        return taken, why

    def batch_done(self, batch: Batch, tokens: int, compute_ns: int, now_ns: int) -> None:
        """What a one-shot batch took, and what it took beyond computing."""
        self.learned.observe(len(batch.rids), tokens, compute_ns)
        if not batch.long:
            self.window.observe(len(batch.rids), compute_ns)
        beyond_ns = max(0, now_ns - batch.at_ns - compute_ns)
        # quick to go down and slow to go up: a busy machine's hiccups are not what a batch costs
        self.turnaround_ns += (0.2 if beyond_ns < self.turnaround_ns else 0.02) * (beyond_ns - self.turnaround_ns)

    def batch_size(self, lane: Lane, worker: Worker, policies: Policies) -> int:
        """How many the worker takes from this lane in one batch."""
        if lane is self.long:
            return 1
        most = worker.room
        if type(lane.decision) is Launch and lane.decision.most:  # the window's own size
            return min(most, lane.decision.most)
        if worker.iteration:
            return self._even(lane, worker)
        if most == 1 or not self.cost.known:
            return most
        waiting, total_ns = len(lane.waiting), lane.intervals.total_ns
        view = BatchView(
            waiting=waiting,
            mean_tokens=lane.tokens / waiting,
            most=most,
            workers=len(self.fleet.workers),
            arrivals_per_ns=len(lane.intervals) / total_ns if total_ns else 0.0,
            turnaround_ns=self.turnaround_ns,
            cost=self.learned.central,
        )
        return max(1, min(most, policies.size(view)))

    def _even(self, lane: Lane, worker: Worker) -> int:
        """How many a running engine takes, so that all with room end up with equally many."""
        free = self.fleet.free
        share = -(-(len(lane.waiting) + sum([one.running for one in free])) // len(free))
        return max(1, min(worker.room, share - worker.running))

    @property
    def padding_worth(self) -> float:
        """How many tokens of padding cost as much as a batch's fixed part; 0 where nothing is padded, or known."""
        a_ns, b_ns, _, known = self.learned.central
        return (a_ns + self.turnaround_ns) / b_ns if self.padded and known and b_ns > 0 else 0.0

    def long_bound(self, policies: Policies) -> int:
        """How many long inputs may run at once."""
        return policies.long_concurrency or max(1, len(self.fleet.workers) // 2)

    def choose(self, free: list[Worker], policies: Policies, now_ns: int) -> Choice | None:
        """The lane to launch from, why, and on which of the free workers; None if all wait, and each lane says why.

        Lanes are asked in the order of who is due first.
        """
        heads = [(first.key, index, lane, first) for index, lane in enumerate(self.lanes) if (first := lane.first())]
        if len(heads) > 1:
            heads.sort(key=_due)
        for _, _, lane, first in heads:
            takers = free
            if self.fleet.rows_max and not all(worker.fits(first.kv) for worker in free):
                takers = [worker for worker in free if worker.fits(first.kv)]
                if not takers:
                    lane.decision = Wait(NEVER_NS, "kv_full")
                    return None  # whoever is due later must not eat the room that this one waits for
            if lane is self.long:
                if self.fleet.long_running < self.long_bound(policies):
                    return Choice(lane, "long_alone", takers)
                lane.decision = Wait(NEVER_NS, "long_bound")
                continue
            lane.decision = decision = self._ask(lane, takers, now_ns)
            if type(decision) is Launch:
                return Choice(lane, decision.reason, takers)
            if len(free) == 1:  # whoever is due later must not take the worker that this one waits with
                return None
        return None

    def held(self, lane: Lane, *, free: bool) -> str:
        """Why the first of a lane is not running."""
        if not self.fleet.workers:
            return "no_worker"
        if not free:
            return "no_free_worker"
        decision = lane.decision
        return decision.reason if type(decision) is Wait else "turn_of_another_lane"

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
