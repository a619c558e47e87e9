"""Seeds draw faults; whatever happens, every law holds, and once healed, every request ends. The seed is the report."""

import os
import random

import pytest

from headway.policies.windows import adaptive, fixed, greedy
from headway.scheduler import events as ev
from tests.sim import MS, World

SEEDS = [*range(60), *(int(os.environ.get("HEADWAY_SEED", "0")) + i for i in range(40))]
WINDOWS = (greedy, fixed(wait_ns=5 * MS), adaptive(cap_ns=100 * MS))


def test_a_step_says_how_much_of_its_workers_cache_is_taken() -> None:
    core = World(0).core
    core.step(ev.WorkerReady(1, "w", "m", "k", True, 8, 8, kv_tokens=4096), 0)
    [worker] = core.services["m", "k"].fleet.workers.values()
    assert (worker.kv_used, worker.kv_total) == (0, 4096)
    core.step(ev.StepDone(1, 5, 5, 1, (), kv_used=160, kv_total=2048), 1)
    assert (worker.kv_used, worker.kv_total) == (160, 2048)


def _storm(world: World, rng: random.Random) -> None:
    """One thing that may happen."""
    live = sorted(set(world.asked) - set(world.endings))
    draw = rng.random()
    if draw < 0.62:
        deadline = world.now_ns + rng.randrange(1, 400) * MS if rng.random() < 0.3 else None
        world.submit(
            rng.choice((5, 50, 500, 2000)),
            client=rng.randrange(4),
            max_new=rng.randrange(1, 12),
            deadline_ns=deadline,
            priority=rng.randrange(-3, 4),
        )
    elif draw < 0.72 and live:
        world.step(ev.Cancel(rng.choice(live)))
    elif draw < 0.75:
        world.step(ev.Cancel(rng.randrange(1, 10_000)))
    elif draw < 0.78:
        world.step(ev.ClientGone(rng.randrange(4)))
    elif draw < 0.82 and world.machines:
        world.lose(rng.choice(sorted(world.machines)))
    elif draw < 0.88 and len(world.machines) < 4:
        world.join(iteration=world.iteration, max_batch=rng.choice((1, 4, 8)))  # type: ignore[attr-defined]
    elif draw < 0.92:
        world.step(ev.BatchDone(rng.randrange(1, 9), rng.randrange(1, 200), 5, 5))  # late, duplicate or invented
    elif draw < 0.95:
        row = ev.RowDone(rng.randrange(1, 200), rng.randrange(1, 400), 1, rng.choice(("", "stop")))
        if not world.iteration:  # type: ignore[attr-defined]
            world.step(ev.StepDone(rng.randrange(5, 99), 5, 5, 1, (row,)))
    elif live:
        world.step(ev.Satisfied(rng.choice(live)))


@pytest.mark.parametrize("seed", SEEDS)
def test_laws_hold_under_faults_and_everything_ends(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed, window=rng.choice(WINDOWS))
    world.iteration = seed % 2 == 0  # type: ignore[attr-defined]
    if rng.random() < 0.5:
        world.culprits = set(rng.sample(range(1, 300), 5))
    if rng.random() < 0.5:
        world.poison = set(rng.sample(range(1, 300), 3))
    world.beat()
    for _ in range(400):  # safety: anything may fail
        _storm(world, rng)
        world.run(world.now_ns + rng.choice((0, 1, 7, 40)) * MS)
    while len(world.machines) < 2:  # liveness: heal everything
        world.join(iteration=world.iteration)  # type: ignore[attr-defined]
    world.run(world.now_ns + 60_000 * MS)
    assert set(world.endings) == set(world.asked), f"seed {seed}: no ending for {set(world.asked) - set(world.endings)}"


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
