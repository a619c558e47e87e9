"""The dumb oracle: a scheduler whose every line is obvious, and with which the real one must agree.

One list of requests, searched and sorted anew for every question; no heap, no kept counter, nothing incremental.
The policies answer the same questions, and what they learn (intervals, costs, answers, shares) is theirs. Workers here
do not fail: what failures do is the referee's to hold (bench/storm/referee.py).
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from headway.policies.fair import Shares
from headway.policies.intervals import Intervals
from headway.policies.views import BatchView, Cost, LaneView, Launch, Placed, Policies, Seat
from headway.scheduler import events as ev
from headway.scheduler.answers import Answers
from headway.scheduler.held import HeldWindow
from headway.scheduler.latency import CostModel
from headway.scheduler.service import JOINS_RUNNING, KV_MARGIN

NEVER_NS = 1 << 62


@dataclass(eq=False)
class Ask:
    """A request: everything about it."""

    event: ev.Submit
    order: int
    arrived_ns: int
    lane: str
    key: int
    bucket: int
    kv: int
    charged: int
    new: int = 0
    batch: int = 0
    over: bool = False

    @property
    def deadline_ns(self) -> int:
        return NEVER_NS if self.event.deadline_ns is None else self.event.deadline_ns


@dataclass(eq=False)
class Hand:
    """A worker. `seats`: who it was sent and has not reported."""

    ready: ev.WorkerReady
    cap: int
    kv_total: int
    last_used: int = 0
    kv_used: int = 0
    seats: list[Ask] = field(default_factory=list)
    long: set[int] = field(default_factory=set)  # rids of long inputs without a first token

    @property
    def room(self) -> int:
        if self.ready.iteration:
            return min(self.ready.max_batch, self.cap - len(self.seats))
        return 0 if self.seats else self.ready.max_batch

    def holds(self, kv: int) -> bool:
        held = max(self.kv_used, sum(ask.kv for ask in self.seats))
        return not self.kv_total or kv <= self.kv_total - held


class Shop:
    """A service. The policies may look at it as at the real one (DoorView)."""

    def __init__(self, model: str, kind: str, policies: Policies) -> None:
        self.model, self.kind, self.policies = model, kind, policies
        self.asks: list[Ask] = []
        self.hands: list[Hand] = []
        self.padded = False
        self.window = HeldWindow(policies.window_of(model, kind))
        self.learned, self.answers = CostModel(), Answers()
        self.shares = Shares(policies.tenant_weights)
        self.intervals = {"short": Intervals(), "long": Intervals()}
        self.last_arrival_ns = {"short": 0, "long": 0}
        self.stays: dict[tuple[str, str], tuple[int, list[int]]] = {}  # (lane, tenant) -> since when, classes seen
        self.begun = 0
        self.turnaround_ns = 0.0
        self.sized_at: dict[int, tuple[int, int]] = {}  # batch -> (its tokens, when it was sent)

    cost = property(lambda self: self.learned.cost)
    waiting = property(lambda self: len(self.line()))
    waiting_tokens = property(lambda self: sum(ask.event.tokens for ask in self.line()))
    workers = property(lambda self: len(self.hands))
    max_batch = property(lambda self: max([hand.ready.max_batch for hand in self.hands], default=1))
    rows_max = property(lambda self: sum(hand.cap for hand in self.hands if hand.ready.iteration))
    running = property(lambda self: sum(len(hand.seats) for hand in self.hands))
    answer_mean = property(lambda self: self.answers.mean)
    answer_least = property(lambda self: self.answers.least)

    def line(self, lane: str = "") -> list[Ask]:
        """Who waits, whoever is due first at the front."""
        waiting = [ask for ask in self.asks if not ask.batch and not ask.over and lane in ("", ask.lane)]
        return sorted(waiting, key=lambda ask: (ask.key, ask.order))

    def turns(self, lane: str) -> list[str]:
        """The tenants that wait in a lane, whoever was served least at the front."""
        tenants = {ask.event.tenant for ask in self.line(lane)}
        return sorted(tenants, key=lambda name: (self.shares.tenants[name].served, self.stays[(lane, name)][0]))

    def first(self, lane: str, tenant: str) -> Ask:
        return next(ask for ask in self.line(lane) if ask.event.tenant == tenant)

    def like(self, lane: str, tenant: str, first: Ask) -> Ask | None:
        """Of this tenant, who goes best with `first`."""
        alike = [ask for ask in self.line(lane) if ask.event.tenant == tenant and ask.bucket == first.bucket]
        if not first.bucket:
            return alike[0] if alike else None
        return nearest(alike, first) if alike else None

    def unlike(self, lane: str, tenant: str, taken: list[Ask]) -> Ask | None:
        """Of this tenant, whose padding is least, and worth less than a batch of their own would be."""
        cost = self.learned.central
        worth = (cost.a_ns + self.turnaround_ns) / cost.b_ns if self.padded and cost.known and cost.b_ns > 0 else 0.0
        longest = max(ask.event.tokens for ask in taken)
        found: list[tuple[float, Ask]] = []
        for bucket in self.stays[(lane, tenant)][1]:
            others = [ask for ask in self.line(lane) if ask.event.tenant == tenant and ask.bucket == bucket]
            if others and bucket != taken[0].bucket:
                ask = nearest(others, taken[0])
                more = ask.event.tokens - longest
                found.append((len(others) * (more * len(taken) if more > 0 else -more), ask))
        padding, ask = min(found, key=lambda one: one[0], default=(worth, taken[0]))
        return ask if padding < worth else None

    def enter(self, ask: Ask, now_ns: int) -> None:
        self.asks.append(ask)
        self.intervals[ask.lane].observe(now_ns)
        self.last_arrival_ns[ask.lane] = now_ns
        self.shares.enter(ask.event.tenant)
        if (ask.lane, ask.event.tenant) not in self.stays:
            self.begun += 1
            self.stays[(ask.lane, ask.event.tenant)] = (self.begun, [])
        classes = self.stays[(ask.lane, ask.event.tenant)][1]
        if ask.bucket and ask.bucket not in classes:
            classes.append(ask.bucket)

    def left(self, ask: Ask) -> None:
        """It waits no longer."""
        self.shares.tenants[ask.event.tenant].waiting -= 1
        if ask.event.tenant not in {other.event.tenant for other in self.line(ask.lane)}:
            del self.stays[(ask.lane, ask.event.tenant)]


def nearest(asks: list[Ask], to: Ask) -> Ask:
    """In length; of two as near the longer one, of equals the earlier one."""
    return min(asks, key=lambda ask: (abs(ask.event.tokens - to.event.tokens), -ask.event.tokens, ask.order))


class Oracle:
    """`step` answers as the core should: ("dispatch", worker, rids, lane, reason, placed), ("refuse", rid, code) and
    ("end", rid, code, finish), refusals and ends in the order of rids."""

    def __init__(self, policies: Policies) -> None:
        self.policies = policies
        self.shops: dict[tuple[str, str], Shop] = {}
        self.hands: dict[int, tuple[Shop, Hand]] = {}
        self.said: list[tuple[Any, ...]] = []
        self.orders = self.batches = self.now_ns = 0

    def step(self, event: ev.Event, now_ns: int) -> list[tuple[Any, ...]]:
        self.said = []
        self.now_ns = now_ns = max(now_ns, self.now_ns)
        for one in event.events if isinstance(event, ev.Together) else [event]:
            getattr(self, type(one).__name__)(one, now_ns)
        for ask in sorted(self.live(), key=lambda ask: (ask.deadline_ns, ask.order)):
            if ask.deadline_ns <= now_ns:
                self.end(ask, "deadline_exceeded")
        words = sorted(self.said)
        self.said = []
        for shop in self.shops.values():
            while self.launch(shop, now_ns):
                pass
        return words + self.said

    # ------------------------------------------------------------ requests

    def live(self) -> list[Ask]:
        return [ask for shop in self.shops.values() for ask in shop.asks if not ask.over]

    def shop(self, model: str, kind: str) -> Shop:
        return self.shops.setdefault((model, kind), Shop(model, kind, self.policies))

    def Submit(self, event: ev.Submit, now_ns: int) -> None:  # noqa: N802 - named as the event
        shop = self.shop(event.model, event.kind)
        refusal = self.policies.admit(event, shop, now_ns)
        if refusal is not None:
            self.said.append(("refuse", event.rid, refusal.code))
            return
        self.orders += 1
        mean, tokens = shop.answers.mean, event.tokens
        new = int(min(event.max_new, mean)) if mean else event.max_new
        kv = tokens + (int(min(event.max_new, KV_MARGIN * mean)) if mean else event.max_new)
        lane = "long" if tokens > self.policies.bypass(shop.learned.central) else "short"
        bucket = tokens.bit_length() if shop.padded else 0
        key = self.policies.order(event, now_ns)
        shop.enter(Ask(event, self.orders, now_ns, lane, key, bucket, kv, tokens + new * (shop.rows_max > 0)), now_ns)

    def Cancel(self, event: ev.Cancel, _now_ns: int) -> None:  # noqa: N802
        for ask in self.live():
            if ask.event.rid == event.rid:
                self.end(ask, event.code)

    def ClientGone(self, event: ev.ClientGone, _now_ns: int) -> None:  # noqa: N802
        for ask in sorted(self.live(), key=lambda ask: ask.order):
            if ask.event.client == event.client:
                self.end(ask, "cancelled")

    def Satisfied(self, event: ev.Satisfied, _now_ns: int) -> None:  # noqa: N802
        for ask in self.live():
            if ask.event.rid == event.rid:
                self.end(ask, "", "stop")

    def end(self, ask: Ask, code: str, finish: str = "") -> None:
        shop = self.shop(ask.event.model, ask.event.kind)
        ask.over = True
        if not ask.batch:
            shop.left(ask)
        elif shop.rows_max:
            shop.shares.tenants[ask.event.tenant].correct(ask.event.tokens + ask.new - ask.charged)
            if ask.new:
                shop.answers.observe(ask.new)
        self.said.append(("end", ask.event.rid, code, finish))

    # ------------------------------------------------------------ workers

    def WorkerReady(self, event: ev.WorkerReady, _now_ns: int) -> None:  # noqa: N802
        shop = self.shop(event.model, event.kind)
        hand = Hand(event, self.policies.in_flight_max(event.max_num_seqs), event.kv_tokens)
        shop.padded = shop.padded or event.padded
        if not shop.learned.seen and event.prior_ns:
            shop.learned = CostModel(event.prior_ns)
        shop.hands.append(hand)
        self.hands[event.worker] = (shop, hand)

    def Beat(self, event: ev.Beat, now_ns: int) -> None:  # noqa: N802
        """Nobody is lost here."""

    def Tick(self, event: ev.Tick, now_ns: int) -> None:  # noqa: N802
        """Only time has passed."""

    def BatchDone(self, event: ev.BatchDone, now_ns: int) -> None:  # noqa: N802
        shop, hand = self.hands[event.worker]
        batch = [ask for ask in hand.seats if ask.batch == event.batch]
        sent, at_ns = shop.sized_at[event.batch]
        shop.learned.observe(len(batch), sent if shop.kind == "call" else event.tokens, event.compute_ns)
        if batch[0].lane == "short":
            shop.window.observe(len(batch), event.compute_ns)
        beyond_ns = max(0, now_ns - at_ns - event.compute_ns)
        shop.turnaround_ns += (0.2 if beyond_ns < shop.turnaround_ns else 0.02) * (beyond_ns - shop.turnaround_ns)
        codes = {rid: code for rid, code, _ in event.failed}
        hand.seats = []
        hand.long.clear()
        for ask in batch:
            if not ask.over:
                self.end(ask, codes.get(ask.event.rid, ""))

    def StepDone(self, event: ev.StepDone, _now_ns: int) -> None:  # noqa: N802
        shop, hand = self.hands[event.worker]
        shop.learned.observe(event.running, event.tokens, event.compute_ns)
        hand.kv_used, hand.kv_total = event.kv_used, event.kv_total or hand.kv_total
        for row in event.rows:
            ask = next(ask for ask in hand.seats if ask.event.rid == row.rid)
            if row.new:
                hand.long.discard(row.rid)
            if row.finish:
                hand.seats.remove(ask)
                hand.long.discard(row.rid)
            if ask.over:
                continue
            ask.new += row.new
            if row.finish in ("stop", "length"):
                self.end(ask, "", row.finish)
            elif row.finish:
                self.end(ask, row.code or "internal")

    # ------------------------------------------------------------ deciding

    def launch(self, shop: Shop, now_ns: int) -> bool:
        """Send one batch, if one may go."""
        free = [hand for hand in shop.hands if hand.room > 0]
        lanes = [lane for lane in ("short", "long") if shop.line(lane)]
        firsts = {lane: shop.first(lane, shop.turns(lane)[0]) for lane in lanes}
        if not free:
            return False
        for lane in sorted(lanes, key=lambda lane: firsts[lane].key):
            takers = [hand for hand in free if not hand.seats or hand.holds(firsts[lane].kv)]
            if not takers:
                return False
            if lane == "long":
                if sum(len(hand.long) for hand in shop.hands) < self.long_bound(shop):
                    self.dispatch(shop, lane, Launch("long_alone"), takers, now_ns)
                    return True
                continue
            decision = self.ask(shop, lane, takers, now_ns)
            if type(decision) is Launch:
                self.dispatch(shop, lane, decision, takers, now_ns)
                return True
            if len(free) == 1:
                return False
        return False

    def long_bound(self, shop: Shop) -> int:
        return self.policies.long_concurrency or max(1, len(shop.hands) // 2)

    def ask(self, shop: Shop, lane: str, takers: list[Hand], now_ns: int) -> object:
        """What the window says."""
        idle = [hand for hand in takers if not hand.seats]
        if not idle:
            return JOINS_RUNNING
        line = shop.line(lane)
        deadline_ns = min(ask.deadline_ns for ask in line)
        view = LaneView(
            waiting=len(line),
            oldest_arrival_ns=min(ask.arrived_ns for ask in line),
            last_arrival_ns=shop.last_arrival_ns[lane],
            arrivals_sum_ns=sum(ask.arrived_ns for ask in line),
            tightest_deadline_ns=None if deadline_ns == NEVER_NS else deadline_ns,
            max_batch=max(hand.room for hand in takers),
            other_idle=len(idle) > 1,
            cost=shop.cost,
            intervals=shop.intervals[lane],
        )
        return shop.window.ask(view, sum(ask.event.tokens for ask in line), now_ns)

    def size(self, shop: Shop, lane: str, decision: Launch, hand: Hand) -> int:
        """How many at most."""
        cost: Cost = shop.learned.central
        if lane == "long":
            return 1
        if decision.most:
            return min(decision.most, hand.room)
        if hand.ready.iteration:  # so that all with room have equally many
            free = [one for one in shop.hands if one.room > 0]
            whole = len(shop.line(lane)) + sum(len(one.seats) for one in free)
            return max(1, min(hand.room, ceil(whole / len(free)) - len(hand.seats)))
        if hand.room == 1 or not cost.known:
            return hand.room
        line, seen = shop.line(lane), shop.intervals[lane]
        rate = len(seen) / seen.total_ns if seen.total_ns else 0.0
        mean = sum(ask.event.tokens for ask in line) / len(line)
        view = BatchView(len(line), mean, hand.room, len(shop.hands), rate, shop.turnaround_ns, cost)
        return max(1, min(hand.room, self.policies.size(view)))

    def dispatch(self, shop: Shop, lane: str, decision: Launch, takers: list[Hand], now_ns: int) -> None:
        seats = [Seat(hand.ready.worker, len(hand.seats), 0, hand.last_used) for hand in takers]
        placed: Placed = self.policies.place(seats, shop.cost)
        hand = takers[placed.seat]
        most = self.size(shop, lane, decision, hand)
        self.batches += 1
        taken: list[Ask] = []
        while len(taken) < most and shop.line(lane):
            ask = self.next(shop, lane, taken)
            if ask is None or (taken and not self.joins(ask, taken, hand)):
                break
            tenant = shop.shares.tenants[ask.event.tenant]
            if not taken:
                shop.shares.reached(tenant.served)
            tenant.charge(ask.charged)
            ask.batch = self.batches
            shop.left(ask)
            taken.append(ask)
        hand.last_used = self.batches
        hand.seats += taken
        rids = tuple(ask.event.rid for ask in taken)
        if lane == "long":
            hand.long.update(rids)
        shop.sized_at[self.batches] = (sum(ask.event.tokens for ask in taken), now_ns)
        self.said.append(("dispatch", hand.ready.worker, rids, lane, decision.reason, placed.reason))

    def next(self, shop: Shop, lane: str, taken: list[Ask]) -> Ask | None:
        """Who goes next into the batch."""
        turns = shop.turns(lane)
        if not taken:
            return shop.first(lane, turns[0])
        alike = [ask for tenant in turns if (ask := shop.like(lane, tenant, taken[0])) is not None]
        if alike or not taken[0].bucket:
            return alike[0] if alike else None
        return shop.unlike(lane, turns[0], taken)

    def joins(self, ask: Ask, taken: list[Ask], hand: Hand) -> bool:
        """Whether the batch may grow by it."""
        batch = [*taken, ask]
        limit = self.policies.batch_tokens_max
        sizes = [one.event.tokens for one in batch]
        padded = max(sizes) * len(sizes) if taken[0].bucket else sum(sizes)
        return hand.holds(sum(one.kv for one in batch)) and (not limit or padded <= limit)
