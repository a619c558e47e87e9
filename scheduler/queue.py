"""Who waits: one lane for each model, kind and side of bypass_tokens; who is next in it is a matter of turns.py.

A request is in exactly one place: waiting here, running in the fleet, or ended. No operation depends on the length of
the queue by more than a logarithm.
"""

from collections.abc import Iterable
from typing import Protocol

from headway.policies.fair import Shares, Tenant
from headway.policies.intervals import Intervals
from headway.policies.views import Launch, Wait
from headway.scheduler.book import NEVER_NS, DueHeap, Request
from headway.scheduler.fleet import Worker
from headway.scheduler.turns import Turns


class Backlog(Protocol):
    """Who is told of everybody that waits, beside the lane itself."""

    def enter(self, candidate: Request) -> None: ...

    def leave(self, candidate: Request) -> None: ...


class Lane:
    """The waiting requests of one service, short or long. `held`: why its first is not running yet, as last told."""

    __slots__ = (
        "_by_arrival",
        "_by_deadline",
        "_turns",
        "arrivals_sum_ns",
        "backlog",
        "decision",
        "held",
        "intervals",
        "last_arrival_ns",
        "name",
        "tokens",
        "waiting",
    )

    def __init__(self, name: str, shares: Shares) -> None:
        self.name = name
        self.waiting: dict[int, Request] = {}
        self.tokens = 0
        self.arrivals_sum_ns = 0
        self.intervals = Intervals()
        self.last_arrival_ns = 0
        self.decision: Launch | Wait | None = None  # the last answer of the window, for people and for the wake-up
        self.held = ""
        self.backlog: Backlog | None = None
        self._turns = Turns(shares, self.waiting)
        self._by_deadline = DueHeap(self.waiting)
        self._by_arrival = DueHeap(self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    def __repr__(self) -> str:
        return f"<Lane {self.name} {len(self)} waiting>"

    def arrive(self, request: Request, now_ns: int) -> None:
        """A new request joins; its interval is observed."""
        self.intervals.observe(now_ns)
        self.last_arrival_ns = now_ns
        self._enter(request)

    def restore(self, request: Request) -> None:
        """A request comes back from a lost worker: it keeps its due time, and is no arrival."""
        self._enter(request)

    def _enter(self, request: Request) -> None:
        self.waiting[request.rid] = request
        self.tokens += request.tokens
        self.arrivals_sum_ns += request.arrived_ns
        self._turns.push(request)
        self._by_arrival.push(request.arrived_ns, request)
        if request.deadline_ns < NEVER_NS:
            self._by_deadline.push(request.deadline_ns, request)
        if self.backlog is not None:
            self.backlog.enter(request)

    def leave(self, request: Request) -> Tenant:
        """The request is no longer waiting. Whose it was."""
        del self.waiting[request.rid]
        self.tokens -= request.tokens
        self.arrivals_sum_ns -= request.arrived_ns
        if self.backlog is not None:
            self.backlog.leave(request)
        return self._turns.leave(request)

    def first(self) -> Request | None:
        """Who is next."""
        return self._turns.first()

    def upcoming(self, first: Request, count: int, worker: Worker) -> list[Request]:
        """`first`, and up to `count` who would go after it, in turn and of like length, of those for whom the worker's
        cache has room; nobody is taken, and nobody is a suspect."""
        others = self._turns.upcoming(first, count)
        return [first, *(one for one in others if one is not first and (not one.kv or worker.fits(one.kv)))]

    def take(
        self, most: int, tokens_max: int, worker: Worker, worth: float = 0.0, chosen: Iterable[Request] | None = None
    ) -> list[Request]:
        """The next batch: up to `most`, of up to `tokens_max` tokens with padding (0: no limit) unless the first alone
        has more, for whom the worker's cache has room. A suspect is taken alone; nobody is taken along with one.

        `worth`: how many tokens of padding the fixed cost of a batch is worth. `chosen`: who, instead of in turn.
        """
        taken: list[Request] = []
        longest = tokens = kv = 0
        first = None
        given = None if chosen is None else iter(chosen)
        if given is not None:
            self._turns.next(None)  # whose turn it is is known, whoever goes
        while len(taken) < most:
            request = self._next(first, longest, len(taken), worth) if given is None else next(given, None)
            if request is None:
                break
            kv += request.kv
            tokens += request.tokens
            longest = max(longest, request.tokens)
            if first is None:
                first = request
            else:
                whole = longest * (len(taken) + 1) if first.bucket else tokens
                if request.suspect or not worker.holds(kv) or whole > (tokens_max or whole):
                    break
            self.leave(request).charge(request.charged)
            taken.append(request)
            if request.suspect:
                break
        return taken

    def _next(self, first: Request | None, longest: int, count: int, worth: float) -> Request | None:
        request = self._turns.next(first)
        if request is None and worth and first is not None and first.bucket:
            return self._turns.more(first, longest, count, worth)
        return request

    def oldest_arrival_ns(self) -> int:
        """When the longest-waiting request arrived, or NEVER_NS."""
        return self._by_arrival.first_at()

    def deadline_ns(self) -> int:
        """The tightest deadline of those waiting, or NEVER_NS."""
        return self._by_deadline.first_at()

    def expired(self, now_ns: int) -> list[Request]:
        """Those whose deadline has come; the caller ends them."""
        late: list[Request] = []
        while self._by_deadline.first_at() <= now_ns:
            request = self._by_deadline.peek()
            assert request is not None
            self.leave(request)
            late.append(request)
        return late
