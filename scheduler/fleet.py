"""Who runs what: workers, the batches in flight on them, and which worker is free.

A batch is known by an id that is never used again. A report about a batch that is not in flight here is late and says
nothing. A request cancelled while it runs is gone from the core at once, but keeps its seat in the batch until the
worker reports it: the books count what a worker really does.
"""

from msgspec import Struct, field

from headway.policies.views import Seat
from headway.scheduler.lifecycle import WORKER_MOVES, move


class Batch(Struct, eq=False):
    """A batch in flight. `rids`: who still has a seat in it, and how much of the cache is held for each."""

    batch: int
    rids: dict[int, int]
    tokens: int
    long: int  # how many long inputs in it have not shown a first result
    at_ns: int = 0


class Worker(Struct, eq=False):
    """A registered worker process. `cap`: most requests on it at once; `trial`: the suspect running there, or 0;
    `kv_used` of `kv_total` tokens of its cache were taken after its last step; `kv_held`: what those on it may need."""

    worker: int
    name: str
    iteration: bool
    max_batch: int
    cap: int
    seen_ns: int
    progress: int = 0
    progress_ns: int = 0
    state: str = "ready"
    trial: int = 0
    failures: int = 0
    last_used: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    running: int = 0
    kv_used: int = 0
    kv_total: int = 0
    kv_held: int = 0

    @property
    def room(self) -> int:
        """How many requests it could take now."""
        if self.trial:
            return 0
        if not self.iteration:
            return 0 if self.batches else self.max_batch
        return min(self.max_batch, self.cap - self.running)

    def fits(self, kv: int) -> bool:
        """Whether its cache has room for one who needs so many tokens. An empty one takes anybody: its engine has the
        last word."""
        return not self.running or self.holds(kv)

    def holds(self, kv: int) -> bool:
        """Whether its cache has room for so many tokens more."""
        return not self.kv_total or kv <= self.kv_total - max(self.kv_used, self.kv_held)

    def moved(self, event: str) -> None:
        """Follow the lifecycle table."""
        self.state = move(self.state, event, WORKER_MOVES)


class Fleet:
    """The workers of one service."""

    __slots__ = ("_uses", "long_running", "max_batch", "rows_max", "running", "workers")

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.long_running = 0
        self.max_batch = 1  # the largest batch that any worker here takes
        self.rows_max = 0  # requests that may run at once on iteration-level workers
        self.running = 0
        self._uses = 0

    def __repr__(self) -> str:
        return f"<Fleet {len(self.workers)} workers, {sum(w.running for w in self.workers.values())} running>"

    @property
    def free(self) -> list[Worker]:
        """Workers that could take a batch now."""
        return [worker for worker in self.workers.values() if worker.room > 0]

    def join(self, worker: Worker) -> None:
        """A worker is here."""
        self.workers[worker.worker] = worker
        self._resize()

    def part(self, worker: Worker) -> None:
        """A worker is gone."""
        del self.workers[worker.worker]
        self._resize()

    def _resize(self) -> None:
        self.max_batch = max((one.max_batch for one in self.workers.values()), default=1)
        self.rows_max = sum(one.cap for one in self.workers.values() if one.iteration)

    @staticmethod
    def seats(workers: list[Worker]) -> list[Seat]:
        """What the place policy sees of them."""
        return [Seat(w.worker, w.running, w.failures, w.last_used) for w in workers]

    def start(self, worker: Worker, batch: Batch, suspect: int) -> None:
        """The batch is now in flight on the worker."""
        worker.batches[batch.batch] = batch
        worker.running += len(batch.rids)
        self.running += len(batch.rids)
        worker.kv_held += sum(batch.rids.values())
        worker.trial = suspect
        self.long_running += batch.long
        self._uses += 1
        worker.last_used = self._uses

    def prefilled(self, batch: Batch) -> None:
        """A long input of an iteration-level engine has its first token: from now on it is a row like any other."""
        self.long_running -= batch.long
        batch.long = 0

    def vacate(self, worker: Worker, batch: Batch, rid: int) -> bool:
        """The worker is done with this request of the batch. Whether it had a seat there."""
        if rid not in batch.rids:
            return False
        kv = batch.rids.pop(rid)
        worker.running -= 1
        self.running -= 1
        worker.kv_held -= kv
        if worker.trial == rid:
            worker.trial = 0
        if batch.long:
            batch.long -= 1
            self.long_running -= 1
        if not batch.rids:
            del worker.batches[batch.batch]
        return True

    def clear(self, worker: Worker, batch: Batch) -> list[int]:
        """The whole batch has left the worker. Who had a seat in it."""
        rids = list(batch.rids)
        worker.running -= len(rids)
        self.running -= len(rids)
        worker.kv_held -= sum(batch.rids.values())
        if worker.trial in batch.rids:
            worker.trial = 0
        self.long_running -= batch.long
        del worker.batches[batch.batch]
        batch.rids.clear()
        return rids
