"""The composer: what it lowers, and that nobody waits longer than the bound, whatever the loads and whoever arrives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policies.experts import composer
from headway.policies.experts.arrays import imbalance
from headway.policies.experts.composer import (
    PASSES,
    WINDOW,
    WORK_MAX,
    Waiting,
    balanced,
    grouped,
    grouping_pays,
    overdue_after,
    overtaken,
)

rng = np.random.default_rng


def one_sided(order: list[int], devices: int = 4) -> np.ndarray:
    """Requests that each load one device only."""
    loads = np.zeros((len(order), 1, devices), np.float32)
    loads[np.arange(len(order)), 0, order] = 10.0
    return loads


def test_a_run_of_one_kind_is_mixed_with_what_came_behind_it() -> None:
    waiting = Waiting(one_sided([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4), [])
    taken = balanced(waiting, 4)
    assert taken[0] == 0
    assert imbalance(waiting.loads[taken].sum(0)) == 1.0
    assert imbalance(waiting.loads[:4].sum(0)) == 4.0


def test_who_runs_already_is_counted_in() -> None:
    waiting = Waiting(one_sided([0, 0, 1, 1, 2, 2, 3, 3]), [])
    running = np.array([[0.0, 60.0, 60.0, 60.0]], np.float32)
    assert sorted(balanced(waiting, 2, running)) == [0, 1]
    assert sorted(balanced(waiting, 2)) != [0, 1]


def test_overdue_go_first_in_their_order() -> None:
    waiting = Waiting(one_sided([0, 1, 0, 0, 0, 1, 2, 3]), [2, 3, 4])
    assert balanced(waiting, 2) == [2, 3]
    assert balanced(waiting, 4)[:3] == [2, 3, 4]
    assert grouped(Waiting(waiting.loads / 10, [2, 3]), 3)[:2] == [2, 3]


def test_similar_requests_are_grouped_on_one_device() -> None:
    chances = np.zeros((6, 1, 8), np.float32)
    chances[::2, 0, :2], chances[1::2, 0, 4:6] = 0.9, 0.9
    assert sorted(grouped(Waiting(chances, []), 3)) == [0, 2, 4]
    busy = 1.0 - (1.0 - chances[1])  # the other kind runs already
    assert grouped(Waiting(chances, []), 2, busy)[0] == 0
    assert grouped(Waiting(chances, []), 2, np.maximum(busy, chances[0]))[0] == 0


@pytest.mark.parametrize(
    ("tokens", "active", "pays"), [(8, 32, True), (4096, 32, False), (8, 0, False)], ids=["decode", "prefill", "none"]
)
def test_grouping_pays_where_weights_are_what_takes_time(tokens: int, active: int, pays: bool) -> None:
    assert grouping_pays(tokens, 4, active, slots_worth=30.0) == pays


def test_large_models_are_composed_by_the_sum_of_their_layers() -> None:
    deep = rng(0).gamma(2.0, size=(128, 58, 16)).astype(np.float32)
    assert deep.size * 32 > WORK_MAX
    assert balanced(Waiting(deep, []), 32) == balanced(Waiting(deep.sum(1, keepdims=True), []), 32)
    running = deep[0]
    assert balanced(Waiting(deep, []), 32, running) == balanced(
        Waiting(deep.sum(1, keepdims=True), []), 32, running.sum(0, keepdims=True)
    )


def test_random_queues_are_composed_better_than_as_they_came() -> None:
    """And an oracle over all pairs of two is never beaten: the greedy choice is optimal for a batch of two."""
    random = rng(3)
    better = 0
    for _ in range(30):
        loads = random.gamma(0.5, size=(16, 2, 4)).astype(np.float32)
        taken = balanced(Waiting(loads, []), 4)
        better += imbalance(loads[taken].sum(0)) < imbalance(loads[:4].sum(0))
    assert better >= 26


def test_looking_again_at_who_was_chosen_mends_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is left hotter than the greedy choice left it, and on average they are clearly cooler."""
    queues = [rng(seed).gamma(0.7, size=(32, 3, 6)).astype(np.float32) for seed in range(40)]

    def hottest() -> np.ndarray:
        return np.array([imbalance(loads[balanced(Waiting(loads, [5]), 8)].sum(0)) for loads in queues])

    monkeypatch.setattr(composer, "OWN_MIX", 0.0)  # nothing but this batch counts
    again = hottest()
    monkeypatch.setattr(composer, "ROUNDS", 0)
    once = hottest()
    assert (again - 1).mean() < 0.93 * (once - 1).mean()
    monkeypatch.undo()
    for loads in queues:
        waiting = Waiting(loads, [5])
        excess = composer._excess(loads)
        second = excess[:, :, balanced(waiting, 8)].sum(2).max(0).sum()
        with monkeypatch.context() as patched:
            patched.setattr(composer, "ROUNDS", 0)
            first = excess[:, :, balanced(waiting, 8)].sum(2).max(0).sum()
        assert second <= first * (1 + 1e-5)


def test_looking_again_stays_within_the_bound_on_work(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = rng(1).gamma(0.7, size=(32, 3, 6)).astype(np.float32)
    whole = loads.size * 8
    looked: list[int] = []
    coolest = composer._coolest
    monkeypatch.setattr(composer, "_coolest", lambda *found: looked.append(1) or coolest(*found))
    for budget, rounds in ((whole, 0), (2 * whole, 1), (9 * whole, composer.ROUNDS)):
        monkeypatch.setattr(composer, "WORK_MAX", budget)
        looked.clear()
        balanced(Waiting(loads, []), 8)
        assert len(looked) == 7 * (1 + rounds)


sizes = st.tuples(
    st.integers(1, 24), st.integers(1, 8), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32 - 1)
)


@settings(deadline=None)
@given(sizes, st.sampled_from([balanced, grouped]), st.booleans(), st.data())
def test_a_choice_is_a_choice(sizes: tuple[int, ...], compose: object, busy: bool, data: st.DataObject) -> None:
    """As many as fit, nobody twice, the oldest or the overdue among them; numbers of any size, zeros too."""
    assert callable(compose)
    count, take, layers, groups, seed = sizes
    scale = data.draw(st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
    loads = (rng(seed).random((count, layers, groups)) * scale).astype(np.float32)
    overdue = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    running = rng(seed + 1).random((layers, groups)).astype(np.float32) if busy else None
    taken = compose(Waiting(loads, overdue), take, running)
    assert len(taken) == len(set(taken)) == min(count, take)
    assert set(taken) <= set(range(count))
    assert set(overdue[:take]) <= set(taken) if overdue else 0 in taken


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from(["hot", "cold", "random"]), st.booleans())
def test_nobody_starves_under_adversarial_arrivals(take: int, seed: int, who: str, oldest: bool) -> None:
    """Nobody is overtaken by more than PASSES windows and a batch: so it waits for them, and for who was before it."""
    random = rng(seed)
    window = WINDOW * take
    passes = overdue_after(window)
    bound = (PASSES + 1) * WINDOW + 1
    queue: list[tuple[int, np.ndarray, int]] = []  # entered, load, passed over
    for batch in range(12 * bound):
        while len(queue) < window:
            load = random.gamma(0.5, size=(1, 4)).astype(np.float32) * 10
            if who != "random" and queue:  # always what fits the queue best, or worst: nobody else should ever go
                rest = np.sum([one[1] for one in queue], axis=0)
                load = np.zeros((1, 4), np.float32)
                load[0, int(rest.argmin() if who == "cold" else rest.argmax())] = 10.0
            queue.append((batch, load, 0))
        overdue = [at for at, one in enumerate(queue) if one[2] >= passes]
        taken = balanced(Waiting(np.stack([one[1] for one in queue]), overdue, oldest), take)
        assert all(batch - one[0] <= bound and one[2] < passes + take for one in queue)
        passed = overtaken(taken, len(queue))
        queue = [(one[0], one[1], one[2] + passed[at]) for at, one in enumerate(queue) if at not in taken]
