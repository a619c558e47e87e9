"""Who is next in a lane: tenants by turn (policies/fair.py), the requests of each by due time.

For engines that pad, a batch is made of like lengths: each request has a length class, the power of two above its
tokens, and once the first of a batch is chosen the others come from its class, nearest in length first. Engines that do
not pad have one class, 0. When the class is empty, the batch goes on with others as long as that pays: each request
more pads its batch by some tokens, and would otherwise pay its share of another batch's fixed cost. No operation
depends on the number of those waiting by more than a logarithm (and a memory move in the index by length).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace, nsmallest

from headway.policies.fair import Shares, Tenant
from headway.scheduler.book import DueHeap, Request

SKIPPED_MAX = 64  # tenants asked in vain for one of the right length, before the batch is closed as it is


class Flow:
    """The waiting requests of one tenant in one lane."""

    __slots__ = ("_by_length", "_classes", "_live", "_plain", "count", "tenant")

    def __init__(self, tenant: Tenant, live: dict[int, Request]) -> None:
        self.tenant = tenant
        self.count = 0
        self._live = live
        self._plain = DueHeap(live)  # class 0
        self._classes: dict[int, DueHeap] = {}
        self._by_length: dict[int, list[tuple[int, int, Request]]] = {}

    def push(self, request: Request) -> None:
        """One more."""
        self.count += 1
        bucket = request.bucket
        if not bucket:
            self._plain.push(request.key, request)
            return
        heap = self._classes.get(bucket)
        if heap is None:
            heap = self._classes[bucket] = DueHeap(self._live)
            self._by_length[bucket] = []
        heap.push(request.key, request)
        insort(self._by_length[bucket], (request.tokens, request.order, request))

    def leave(self, request: Request) -> None:
        """One less."""
        self.count -= 1
        if request.bucket:
            index = self._by_length[request.bucket]
            del index[bisect_left(index, (request.tokens, request.order))]

    def first(self) -> Request | None:
        """Who is due first."""
        first = self._plain.peek()
        if self._classes:
            heads = [head for heap in self._classes.values() if (head := heap.peek()) is not None]
            return min([*heads, first] if first else heads, key=_due, default=None)
        return first

    def in_order(self, bucket: int) -> Iterator[Request]:
        """Those of a class, by due time; nothing is taken."""
        heap = self._classes.get(bucket) if bucket else self._plain
        return heap.in_order() if heap is not None else iter(())

    def like(self, first: Request) -> Request | None:
        """Who goes with `first`: the nearest in length of its class (of equals the earlier one)."""
        if not first.bucket:
            return self._plain.peek()
        index = self._by_length.get(first.bucket)
        return _nearest(index, first) if index else None

    def unlike(self, first: Request, longest: int, count: int, worth: float) -> Request | None:
        """Who of another class goes with a batch of `count` around `first`: the least padding, if it is worth it.

        `worth`: the tokens of padding that a batch's fixed cost pays for.
        """
        found, least = None, worth
        for bucket, index in self._by_length.items():
            if index and bucket != first.bucket:
                request = _nearest(index, first)
                more = request.tokens - longest
                padding = more * count if more > 0 else -more
                cost = padding * len(index)  # those of its class would share that fixed cost
                if cost < least:
                    found, least = request, cost
        return found


def _nearest(index: list[tuple[int, int, Request]], first: Request) -> Request:
    """The nearest to `first` in length; of equals the earlier one."""
    at = bisect_left(index, (first.tokens, 0))
    if at == len(index) or (at and first.tokens - index[at - 1][0] < index[at][0] - first.tokens):
        at -= 1
    return index[bisect_left(index, (index[at][0], 0))][2]


def _due(request: Request) -> tuple[int, int]:
    return request.key, request.order


class Turns:
    """The flows of one lane, and whose turn it is."""

    __slots__ = ("_flows", "_heap", "_live", "_seq", "_shares")

    def __init__(self, shares: Shares, live: dict[int, Request]) -> None:
        self._shares = shares
        self._live = live
        self._flows: dict[str, Flow] = {}
        self._heap: list[tuple[float, int, Flow]] = []  # entries may be too low, or of a flow that is over
        self._seq = 0

    def push(self, request: Request) -> None:
        """A request waits."""
        tenant = self._shares.enter(request.tenant)
        flow = self._flows.get(request.tenant)
        if flow is None:
            flow = self._flows[request.tenant] = Flow(tenant, self._live)
            self._seq += 1
            heappush(self._heap, (tenant.served, self._seq, flow))
        flow.push(request)

    def leave(self, request: Request) -> Tenant:
        """It waits no longer. Whose it was."""
        flow = self._flows[request.tenant]
        flow.leave(request)
        tenant = flow.tenant
        tenant.waiting -= 1
        if not flow.count:
            del self._flows[request.tenant]
            if not self._flows:
                self._heap.clear()
        return tenant

    def first(self) -> Request | None:
        """The first of the tenant whose turn it is."""
        flow = self._turn()
        return None if flow is None else flow.first()

    def more(self, first: Request, longest: int, count: int, worth: float) -> Request | None:
        """Who is taken next when nobody like `first` is left, if it is worth it."""
        flow = self._turn()
        return None if flow is None else flow.unlike(first, longest, count, worth)

    def next(self, first: Request | None) -> Request | None:
        """Who is taken next into a batch that began with `first` (None: it is empty)."""
        flow = self._turn()
        if flow is None:
            return None
        if first is None:
            self._shares.reached(flow.tenant.served)
            return flow.first()
        return flow.like(first) if len(self._flows) == 1 else self._next_like(first)

    def upcoming(self, first: Request, count: int) -> list[Request]:
        """Up to `count` who would go with `first` and after, in turn, if nobody came any more; nothing is taken.

        Suspects are left out: they run alone. At most SKIPPED_MAX tenants are looked at beyond those found.
        """
        found: list[Request] = []
        ahead: list[tuple[float, int, Iterator[Request], Tenant]] = []
        coming = self._by_turn()
        while len(found) < count:
            while len(ahead) < SKIPPED_MAX and (flow := next(coming, None)) is not None:
                heappush(ahead, (flow.tenant.served, len(ahead) + len(found), flow.in_order(first.bucket), flow.tenant))
            if not ahead:
                break
            served, seq, requests, tenant = ahead[0]
            request = next((one for one in requests if not one.suspect), None)
            if request is None:
                heappop(ahead)
                continue
            heapreplace(ahead, (served + request.charged / tenant.weight, seq, requests, tenant))
            found.append(request)
        return found

    def _by_turn(self) -> Iterator[Flow]:
        """Flows, about in the order of their turns: of many tenants an entry may be too low, and comes too early."""
        if len(self._flows) <= SKIPPED_MAX:
            return iter(self._flows.values())
        entries = nsmallest(2 * SKIPPED_MAX, self._heap)
        return iter({id(flow): flow for _, _, flow in entries if flow.count}.values())

    def _next_like(self, first: Request) -> Request | None:
        skipped: list[tuple[float, int, Flow]] = []
        found = None
        while (flow := self._turn()) is not None and len(skipped) < SKIPPED_MAX:
            if (found := flow.like(first)) is not None:
                break
            skipped.append(heappop(self._heap))
        for entry in skipped:
            heappush(self._heap, entry)
        return found

    def _turn(self) -> Flow | None:
        """The flow of the tenant that was served least."""
        if len(self._flows) == 1:
            return next(iter(self._flows.values()))
        heap = self._heap
        while heap:
            at, seq, flow = heap[0]
            if not flow.count:
                heappop(heap)
            elif at < flow.tenant.served:
                heapreplace(heap, (flow.tenant.served, seq, flow))
            else:
                return flow
        return None
