"""Single faults and what they may cost: who is refused, how often others run, how many workers go. All at once, and
drawn by a seed: test_fault_storm.py."""

import pytest

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
