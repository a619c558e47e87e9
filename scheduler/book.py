"""The book of live requests: which there are, whose they are, which of them run. Entered once, ended once.

Waiting requests are also in a lane, running ones also have a seat in a batch: the core keeps those in step.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from msgspec import Struct

from headway.scheduler.lifecycle import MOVES, move

NEVER_NS = 1 << 62
DEAD_MIN = 64  # dead heap entries that are not worth a rebuild


class Request(Struct, gc=False, eq=False):
    """The core's side of one request. `key`: due time; `order` breaks ties; `batch`: 0 unless running.

    `bucket`: its length class where batches are padded, else 0. `kv`: cache tokens it is expected to need. `charged`:
    tokens its tenant was charged for this run; `new`: tokens it has generated.

    `forecast`: what only an expert-aware service can read; `passed`: how many younger requests overtook this one there.

    `seq` counts its stays in the queue, so that what an earlier stay left behind in a heap is known as dead.

    `suspect`: it was running when its worker or batch died, so it runs on trial, alone, until it has shown otherwise.
    """

    rid: int
    client: int
    service: Any
    long: bool
    tokens: int
    deadline_ns: int
    arrived_ns: int
    key: int
    order: int
    tenant: str = ""
    bucket: int = 0
    kv: int = 0
    charged: int = 0
    new: int = 0
    forecast: object | None = None
    passed: int = 0
    state: str = "waiting"
    batch: int = 0
    seq: int = 0
    losses: int = 0
    suspect: bool = False

    def moved(self, event: str) -> None:
        """Follow the lifecycle table."""
        self.state = move(self.state, event, MOVES)


class DueHeap:
    """Requests by a number, smallest first. What leaves the middle stays as a dead entry and is skipped later, so every
    operation is O(log n); when the dead outnumber the living, the heap is rebuilt. `live` says who counts."""

    __slots__ = ("_heap", "_live")

    def __init__(self, live: dict[int, Request]) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._live = live

    def push(self, at: int, request: Request) -> None:
        """Enter a request at a number."""
        if len(self._heap) > 2 * len(self._live) + DEAD_MIN:
            self._heap = [entry for entry in self._heap if self._alive(entry)]
            heapify(self._heap)
        heappush(self._heap, (at, request.order, request.seq, request))

    def _alive(self, entry: tuple[int, int, int, Request]) -> bool:
        request = entry[3]
        return entry[2] == request.seq and request.rid in self._live

    def peek(self) -> Request | None:
        """The first living request, or None."""
        heap = self._heap
        while heap:
            if self._alive(heap[0]):
                return heap[0][3]
            heappop(heap)
        return None

    def in_order(self) -> Iterator[Request]:
        """The living, smallest first; nothing is taken. Each costs a logarithm of those seen so far."""
        heap = self._heap
        ahead = [(heap[0][:3], 0)] if heap else []
        while ahead:
            _, at = heappop(ahead)
            if self._alive(heap[at]):
                yield heap[at][3]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(ahead, (heap[child][:3], child))

    def first_at(self) -> int:
        """The smallest living number, or NEVER_NS."""
        return self._heap[0][0] if self.peek() is not None else NEVER_NS


class Book:
    """All live requests."""

    __slots__ = ("_deadlines", "clients", "live", "running")

    def __init__(self) -> None:
        self.live: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.clients: dict[int, dict[int, None]] = {}
        self._deadlines = DueHeap(self.running)

    def __len__(self) -> int:
        return len(self.live)

    def enter(self, request: Request) -> None:
        """A request was admitted, and waits."""
        assert request.rid not in self.live, f"request id {request.rid} is given twice"
        self.live[request.rid] = request
        mine = self.clients.get(request.client)
        if mine is None:
            mine = self.clients[request.client] = {}
        mine[request.rid] = None

    def run(self, request: Request, batch: int) -> None:
        """It is in a batch now."""
        request.moved("dispatch")
        request.batch = batch
        self.running[request.rid] = request
        if request.deadline_ns < NEVER_NS:
            self._deadlines.push(request.deadline_ns, request)

    def requeue(self, request: Request) -> None:
        """It waits again."""
        request.moved("requeue")
        del self.running[request.rid]
        request.batch = 0
        request.seq += 1

    def end(self, request: Request, event: str) -> None:
        """It has its ending."""
        request.moved(event)
        rid = request.rid
        del self.live[rid]
        self.running.pop(rid, None)
        mine = self.clients[request.client]
        del mine[rid]
        if not mine:
            del self.clients[request.client]

    def current(self, rid: int, batch: int) -> Request | None:
        """The live request if it runs in this very batch; otherwise a report about it is late."""
        request = self.live.get(rid)
        return request if request is not None and request.batch == batch else None

    @property
    def deadline_ns(self) -> int:
        """The tightest deadline of the running requests, or NEVER_NS."""
        return self._deadlines.first_at()

    def overdue(self, now_ns: int) -> Request | None:
        """A running request whose deadline has come, or None."""
        return self._deadlines.peek() if self.deadline_ns <= now_ns else None
