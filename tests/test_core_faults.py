"""Single faults and what they may cost: who is refused, how often others run, how many workers go. All at once, and
drawn by a seed: test_fault_storm.py."""

import pytest

from headway.bench.storm.plan import Ask, Down, Drain, Happening, Join, draw
from headway.bench.storm.world import Storm
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.spec import PolicySpec
from tests.sim import MS, World


@pytest.mark.parametrize("iteration", [False, True])
def test_only_the_poison_request_is_refused(iteration: bool) -> None:
    world = World(0)
    world.poison = {5}
    world.join(iteration=iteration, max_batch=16)
    world.beat()
    for _ in range(16):
        world.submit(max_new=4)
    world.run(60_000 * MS)
    codes = {rid: ending.code for rid, ending in world.endings.items()}
    assert codes == {rid: "poison_request" if rid == 5 else "" for rid in range(1, 17)}


def test_a_failed_batch_costs_each_good_request_one_more_run() -> None:
    world = World(0)
    world.culprits = {4}
    number = world.join()
    world.submit()  # runs alone at first, so that the next eight share a batch
    for _ in range(8):
        world.submit()
    world.beat()
    world.run(10_000 * MS)
    codes = {rid: ending.code for rid, ending in world.endings.items()}
    assert codes == {rid: "engine_error" if rid == 4 else "" for rid in range(1, 10)}
    assert world.core.counters["requeued"] == 8
    assert world.core.counters["batches"] == 1 + 1 + 8
    assert number in world.machines


def test_a_request_that_kills_later_and_later_does_not_take_the_service_along() -> None:
    """It dies after its first new token each time, so no trial catches it: its losses in company are bounded."""
    world = World(0)
    world.join(iteration=True)
    world.beat()
    killer = world.submit(max_new=10_000)
    for _ in range(20):
        if killer in world.endings:
            break
        world.submit(max_new=10_000)
        world.run(world.now_ns + 30 * MS)
        world.lose(max(world.machines))
        world.join(iteration=True)
    assert world.endings[killer].code == "poison_request"
    assert world.core.counters["workers_lost"] <= 4


def test_after_ten_thousand_requests_that_ended_in_every_way_four_run_at_once() -> None:
    """No permit leaks on any way out: answered, failed, cancelled, late, client gone, refused, worker killed."""
    plan = draw(6, 6_000)
    kept: list[Happening] = []
    for one in plan.happenings:
        if isinstance(one, (Ask, Down)):
            kept.append(one._replace(service=0))
        elif isinstance(one, Join):
            kept.append(one._replace(service=0, max_batch=4, max_num_seqs=4, kv_tokens=0))
        elif not isinstance(one, Drain):
            kept.append(one)
    policy = PolicySpec(window="greedy", in_flight_fraction=1.0, queue_max=8)
    services = (("chat", "generate", True),)
    over = Storm(plan._replace(policy=policy, services=services, happenings=tuple(kept))).run()
    ways = ("ok", "cancelled", "deadline_exceeded", "engine_error", "out_of_memory", "poison_request")
    assert {"Refuse queue_full", *(f"End {code}" for code in ways)} <= set(over.seen)
    assert over.core.counters["received"] > 10_000
    fleet = over.core.services["chat", "generate"].fleet
    worker = next(worker for worker in fleet.workers.values() if worker.cap == 4)
    for other in [number for number in fleet.workers if number != worker.worker]:
        over.core.step(ev.WorkerLost(other, "not needed", orderly=True), over.now_ns)
    assert (fleet.running, fleet.long_running, worker.running) == (0, 0, 0)
    asks: list[ev.Event] = [ev.Submit(1_000_000 + index, 1, "chat", "generate", 10, 5) for index in range(4)]
    actions = over.core.step(ev.Together(asks), over.now_ns)
    assert [len(action.rids) for action in actions if isinstance(action, act.Dispatch)] == [4]


def test_expired_work_is_told_on_time_and_never_run() -> None:
    """One worker is busy for ten seconds; behind it wait deadlines of 1 s, 30 s, 0 and less."""
    world = World(0)
    world.join(max_batch=1)
    world.beat()
    world.submit(tokens=1_000_000)  # 10 s
    soon, later, now, past = (world.submit(deadline_ns=at * MS) for at in (1_000, 30_000, 0, -5))
    told = {rid: ending.code for rid, ending in world.endings.items()}
    assert told == {now: "deadline_exceeded", past: "deadline_exceeded"}
    world.run(999 * MS)
    assert soon not in world.endings
    world.run(1_000 * MS)
    assert world.endings[soon].code == "deadline_exceeded"
    world.run(11_000 * MS)
    assert world.endings[later].code == ""
    ran = {rid for action in world.dispatched for rid in action.rids}
    assert ran == {1, later}


def test_what_expires_as_it_runs_is_dropped_and_its_tokens_end() -> None:
    world = World(0)
    number = world.join(iteration=True)
    late = world.submit(max_new=500, deadline_ns=252 * MS)
    world.submit(max_new=500)
    world.run(262 * MS)  # two steps of 5 ms later
    assert world.endings[late].code == "deadline_exceeded"
    assert [rid for _, rid in world.machines[number].running] == [2]
