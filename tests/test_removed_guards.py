"""Each guard of the core is taken out, one at a time, and the storms must notice: a test that cannot fail is a defect.

The core's own audit is not asked here, so it is the referee that sees it. The seeds are always the same.
"""

from collections.abc import Callable
from heapq import heappush
from typing import Any

import pytest
from msgspec.structs import replace

from headway.bench.storm.plan import draw
from headway.bench.storm.shrink import play
from headway.bench.storm.world import Storm
from headway.policies.fair import Tenant
from headway.scheduler import actions as act
from headway.scheduler import chosen
from headway.scheduler import events as ev
from headway.scheduler.book import NEVER_NS, Book, DueHeap, Request
from headway.scheduler.core import Core
from headway.scheduler.fleet import Fleet, Worker
from headway.scheduler.queue import Lane
from headway.scheduler.service import Service
from headway.scheduler.turns import Flow

SEEDS = 300
SLIPS = ("AttributeError", "NameError", "TypeError")  # a core that cannot even run proves nothing

Change = tuple[Any, str, Any]


def reports_are_taken_by_batch_alone() -> list[Change]:
    """Whoever reports it: another worker's answer counts, too."""

    def current(core: Core, worker_id: int, batch_id: int, now_ns: int) -> object:
        core._seen(worker_id, now_ns)
        found = [
            (service, worker, worker.batches[batch_id])
            for service, worker in core.roster._entries.values()
            if batch_id in worker.batches
        ]
        return found[0] if found else None

    return [(Core, "_current_batch", current)]


def a_row_of_an_old_run_counts_for_the_new_one() -> list[Change]:
    step_done = Core._step_done

    def by_request(core: Core, event: ev.StepDone, now_ns: int) -> None:
        batches = {rid: request.batch for rid, request in core.book.running.items()}
        rows = [replace(row, batch=batches.get(row.rid, row.batch)) for row in event.rows]
        step_done(core, replace(event, rows=tuple(rows)), now_ns)

    return [(Core, "_step_done", by_request)]


def deadlines_of_the_waiting_are_forgotten() -> list[Change]:
    return [(Lane, "deadline_ns", lambda _lane: NEVER_NS), (Lane, "expired", lambda _lane, _now_ns: [])]


def deadlines_of_the_running_are_forgotten() -> list[Change]:
    return [(Book, "overdue", lambda _book, _now_ns: None), (Book, "deadline_ns", property(lambda _book: NEVER_NS))]


def a_request_ends_twice() -> list[Change]:
    def refuse_too(core: Core, service: Service) -> None:
        for lane in service.lanes:
            core._out += [act.End(rid, 0, "no_worker") for rid in lane.waiting]
        abandon(core, service)

    abandon = Core._abandon
    return [(Core, "_abandon", refuse_too)]


def a_worker_takes_one_too_many() -> list[Change]:
    room = Worker.room.fget
    assert room is not None
    return [(Worker, "room", property(lambda worker: room(worker) + (room(worker) > 0)))]


def a_requeued_request_is_lost() -> list[Change]:
    return [(Lane, "restore", lambda _lane, _request: None)]


def nobody_tells_those_who_wait_for_no_worker() -> list[Change]:
    return [(Core, "_abandon", lambda _core, _service: None)]


def a_cancelled_request_runs_on() -> list[Change]:
    return [(Core, "_drop_on_worker", lambda _core, _request: None)]


def a_cancel_is_a_prefix() -> list[Change]:
    def cancel(core: Core, event: Any, _now_ns: int) -> None:
        hit = [rid for rid in core.book.live if str(rid).startswith(str(event.rid))]
        core.counters["late_cancels"] += not hit
        for rid in hit:
            core._leave(core.book.live[rid], "cancel", event.code, event.message)

    return [(Core, "_cancel", cancel)]


def late_cancels_are_not_counted() -> list[Change]:
    cancel = Core._cancel

    def known_only(core: Core, event: Any, now_ns: int) -> None:
        if event.rid in core.book.live:
            cancel(core, event, now_ns)

    return [(Core, "_cancel", known_only)]


def lost_workers_get_batches() -> list[Change]:
    return [(Fleet, "part", lambda _fleet, _worker: None)]


def a_long_input_holds_its_permit() -> list[Change]:
    return [(Fleet, "prefilled", lambda _fleet, _batch: None)]


def a_seat_is_not_given_back() -> list[Change]:
    vacate = Fleet.vacate

    def keep(fleet: Fleet, worker: Worker, batch: Any, rid: int) -> bool:
        had = vacate(fleet, worker, batch, rid)
        worker.running += had and not rid % 5
        return had

    return [(Fleet, "vacate", keep)]


def suspects_run_in_company() -> list[Change]:
    start = Fleet.start
    return [(Fleet, "start", lambda fleet, worker, batch, _suspect: start(fleet, worker, batch, 0))]


def equals_go_in_any_order() -> list[Change]:
    """The last of those who came together goes first."""

    def push(heap: DueHeap, at: int, request: Request) -> None:
        heappush(heap._heap, (at, -request.order, request.seq, request))

    return [(DueHeap, "push", push)]


def waiting_is_no_ageing() -> list[Change]:
    return [(chosen, "due_time", lambda arrival, arrived_ns: arrived_ns + (arrival.priority << 50))]


def nobody_is_charged_for_what_he_gets() -> list[Change]:
    return [(Tenant, "charge", lambda _tenant, _tokens: None)]


def whoever_is_due_is_padded_along() -> list[Change]:
    return [(Flow, "like", lambda flow, _first: flow.first())]


def the_cache_holds_anything() -> list[Change]:
    return [(Worker, "holds", lambda _worker, _kv: True)]


def padding_has_no_limit() -> list[Change]:
    take = Lane.take
    return [(Lane, "take", lambda lane, most, _tokens_max, worker, worth: take(lane, most, 0, worker, worth))]


def silence_wakes_nobody() -> list[Change]:
    def wakeup(core: Core) -> int:
        return min([core.book.deadline_ns, *(service.wakeup_ns for service in core.services.values())])

    return [(Core, "wakeup_ns", property(wakeup))]


def windows_are_slept_through() -> list[Change]:
    return [(Service, "wakeup_ns", property(lambda service: service.abandoned_ns if service.waiting else NEVER_NS))]


def poison_is_never_refused() -> list[Change]:
    return [(Core, "_survive", lambda core, request, **_: core._requeue(request))]


def a_drain_dispatches_first() -> list[Change]:
    finish = Core._finish_drain

    def decide_first(core: Core, now_ns: int) -> None:
        core._decide(now_ns)
        finish(core, now_ns)

    return [(Core, "_finish_drain", decide_first)]


def the_clock_may_step_back() -> list[Change]:
    step = Core.step

    def forget(core: Core, event: Any, now_ns: int) -> list[act.Action]:
        core._now_ns = 0
        return step(core, event, now_ns)

    return [(Core, "step", forget)]


MUTANTS: tuple[Callable[[], list[Change]], ...] = (
    reports_are_taken_by_batch_alone,
    a_row_of_an_old_run_counts_for_the_new_one,
    deadlines_of_the_waiting_are_forgotten,
    deadlines_of_the_running_are_forgotten,
    a_request_ends_twice,
    a_worker_takes_one_too_many,
    a_requeued_request_is_lost,
    nobody_tells_those_who_wait_for_no_worker,
    a_cancelled_request_runs_on,
    a_cancel_is_a_prefix,
    late_cancels_are_not_counted,
    lost_workers_get_batches,
    a_long_input_holds_its_permit,
    a_seat_is_not_given_back,
    suspects_run_in_company,
    equals_go_in_any_order,
    waiting_is_no_ageing,
    nobody_is_charged_for_what_he_gets,
    whoever_is_due_is_padded_along,
    the_cache_holds_anything,
    padding_has_no_limit,
    silence_wakes_nobody,
    windows_are_slept_through,
    poison_is_never_refused,
    a_drain_dispatches_first,
    the_clock_may_step_back,
)


def caught_after(mutant: Callable[[], list[Change]], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """How many seeds it takes, and what is broken; (0, "") if none of them sees it."""
    for owner, name, value in mutant():
        monkeypatch.setattr(owner, name, value)
    for seed in range(SEEDS):
        failure = play(Storm(draw(seed), audit=False))
        if failure is not None:
            assert not failure.law.startswith(SLIPS), f"the change itself is wrong: {failure.text}"
            return seed + 1, failure.text
    return 0, ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_removed_guard_is_missed(mutant: Callable[[], list[Change]], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, law = caught_after(mutant, monkeypatch)
    assert seeds, f"{SEEDS} storms without this guard, and nothing was noticed"
    print(f"{mutant.__name__}: {seeds} seeds, {law[:160]}")
