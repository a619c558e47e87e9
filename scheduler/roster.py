"""All workers by number, and which of them are to be given up: silent for too long, or busy without progress."""

from headway.scheduler.book import NEVER_NS
from headway.scheduler.fleet import Worker
from headway.scheduler.service import Service


class Roster:
    """The registered workers, each with the service it belongs to."""

    __slots__ = ("_entries", "_lost_after_ns", "_stuck_after_ns")

    def __init__(self, lost_after_ns: int, stuck_after_ns: int) -> None:
        self._entries: dict[int, tuple[Service, Worker]] = {}
        self._lost_after_ns = lost_after_ns
        self._stuck_after_ns = stuck_after_ns

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, service: Service, worker: Worker) -> None:
        """A worker has registered."""
        self._entries[worker.worker] = (service, worker)

    def seen(self, number: int, now_ns: int) -> tuple[Service, Worker] | None:
        """The worker of a report, marked as alive; None if it is not one of ours any more."""
        found = self._entries.get(number)
        if found is not None:
            found[1].seen_ns = now_ns
        return found

    def strike(self, number: int) -> tuple[Service, Worker] | None:
        """The worker is gone."""
        return self._entries.pop(number, None)

    @property
    def wakeup_ns(self) -> int:
        """When the next of them would have to be given up."""
        at = NEVER_NS
        for _, worker in self._entries.values():
            at = min(at, worker.seen_ns + self._lost_after_ns)
            if worker.running:
                at = min(at, worker.progress_ns + self._stuck_after_ns)
        return at

    def overdue(self, now_ns: int) -> list[tuple[int, str]]:
        """The numbers of those to be given up, and why."""
        found: list[tuple[int, str]] = []
        for number, (_, worker) in self._entries.items():
            if now_ns >= worker.seen_ns + self._lost_after_ns:
                found.append((number, f"silent for {self._lost_after_ns // 1_000_000} ms"))
            elif worker.running and now_ns >= worker.progress_ns + self._stuck_after_ns:
                found.append((number, f"no progress for {self._stuck_after_ns // 1_000_000} ms"))
        return found
