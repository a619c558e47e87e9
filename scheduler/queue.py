"""Who waits: one lane for each model, kind and length class, and in it a heap by due time.

A request is in exactly one place: waiting here, running in the fleet, or ended. No operation depends on the length of
the queue by more than a logarithm.
"""

from headway.policies.intervals import Intervals
from headway.policies.views import Launch, Wait
from headway.scheduler.book import NEVER_NS, DueHeap, Request


class Lane:
    """The waiting requests of one service and length class."""

    __slots__ = (
        "_by_arrival",
        "_by_deadline",
        "_by_due",
        "arrivals_sum_ns",
        "decision",
        "intervals",
        "last_arrival_ns",
        "name",
        "tokens",
        "waiting",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: dict[int, Request] = {}
        self.tokens = 0
        self.arrivals_sum_ns = 0
        self.intervals = Intervals()
        self.last_arrival_ns = 0
        self.decision: Launch | Wait | None = None  # the last answer of the window, for people and for the wake-up
        self._by_due = DueHeap(self.waiting)
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
        self._by_due.push(request.key, request)
        self._by_arrival.push(request.arrived_ns, request)
        if request.deadline_ns < NEVER_NS:
            self._by_deadline.push(request.deadline_ns, request)

    def leave(self, request: Request) -> None:
        """The request is no longer waiting."""
        del self.waiting[request.rid]
        self.tokens -= request.tokens
        self.arrivals_sum_ns -= request.arrived_ns

    def first(self) -> Request | None:
        """Who is due first."""
        return self._by_due.peek()

    def take(self, most: int) -> list[Request]:
        """The next batch: up to `most` in due order. A suspect is taken alone; nobody is taken along with one."""
        taken: list[Request] = []
        while len(taken) < most and (request := self._by_due.peek()) is not None:
            if request.suspect and taken:
                break
            self.leave(request)
            taken.append(request)
            if request.suspect:
                break
        return taken

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
