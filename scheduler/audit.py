"""Do the books add up? O(everything): after each step in tests."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.scheduler.core import Core


def audit(core: "Core") -> None:
    """AssertionError that names what does not add up. Changes nothing."""
    _requests(core)
    _seats(core)
    ended = sum(n for name, n in core.counters.items() if name.startswith(("ended.", "refused.")))
    assert core.counters["received"] == ended + len(core.book), "a request has vanished, or ended twice"


def _requests(core: "Core") -> None:
    """Each live request is in exactly one place and belongs to its client."""
    book = core.book
    waiting = {rid: lane for service in core.services.values() for lane in service.lanes for rid in lane.waiting}
    for rid, request in book.live.items():
        places = (rid in waiting) + (rid in book.running)
        assert places == 1, f"request {rid} is in {places} places"
        assert request.state == ("waiting" if rid in waiting else "running"), f"request {rid} is {request.state}"
        assert rid in book.clients[request.client], f"request {rid} is missing from its client"
    assert len(waiting) + len(book.running) == len(book), "a lane or a batch holds an ended request"
    assert sum(len(mine) for mine in book.clients.values()) == len(book), "a client holds an ended request"
    for service in core.services.values():
        for lane in service.lanes:
            tokens = sum(request.tokens for request in lane.waiting.values())
            assert lane.tokens == tokens, f"{lane!r} counts {lane.tokens} tokens, has {tokens}"
        whose = Counter(request.tenant for lane in service.lanes for request in lane.waiting.values())
        counted = {name: tenant.waiting for name, tenant in service.shares.tenants.items() if tenant.waiting}
        assert counted == dict(whose), f"{service!r} counts {counted} waiting, has {dict(whose)}"


def _seats(core: "Core") -> None:
    """Each running request has a seat, and each worker counts its seats right."""
    seats: set[tuple[int, int]] = set()
    for service in core.services.values():
        long = 0
        for worker in service.fleet.workers.values():
            count = sum(len(batch.rids) for batch in worker.batches.values())
            assert worker.running == count, f"worker {worker.worker} counts {worker.running} running, has {count}"
            assert all(batch.rids for batch in worker.batches.values()), f"worker {worker.worker} has an empty batch"
            held = sum(kv for batch in worker.batches.values() for kv in batch.rids.values())
            assert worker.kv_held == held, f"worker {worker.worker} holds {worker.kv_held} of its cache, owes {held}"
            seats.update((batch.batch, rid) for batch in worker.batches.values() for rid in batch.rids)
            long += sum(batch.long for batch in worker.batches.values())
        running = sum(worker.running for worker in service.fleet.workers.values())
        assert service.fleet.running == running, f"{service!r} counts {service.fleet.running} running, has {running}"
        assert service.fleet.long_running == long, f"{service!r} counts {service.fleet.long_running} long, has {long}"
    for request in core.book.running.values():
        assert (request.batch, request.rid) in seats, f"request {request.rid} runs on no worker"
