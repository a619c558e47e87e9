"""What goes into a batch: how many by cost, like lengths together where engines pad, budgets, memory; and what is said
of those who wait."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policies.size import by_cost, largest
from headway.policies.views import BYPASS_AUTO, BYPASS_TOKENS, BatchView, Cost
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.answers import KNOWN_FROM, Answers
from tests.sim import MS, World

GPU = Cost(8e6, 1e3, 5e4, True)  # launch-bound: company is nearly free
CPU = Cost(1e5, 4e5, 0.0, True)  # every token costs, batches save nothing to speak of


def view(**changes: object) -> BatchView:
    fields = {"waiting": 32, "mean_tokens": 50.0, "most": 32, "workers": 1, "arrivals_per_ns": 0.0}
    return BatchView(**(fields | {"turnaround_ns": 0.0, "cost": CPU} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (view(cost=GPU), 32),  # all of them: sqrt(8 x 32 / 0.1) = 50
        (view(cost=GPU, waiting=4), 4),
        (view(), 1),  # nothing is gained by company
        (view(turnaround_ns=5e6), 3),  # unless a batch costs a round trip: sqrt(5.1 x 32 / 20) = 2.9, in 12 batches
        (
            view(turnaround_ns=5e6, arrivals_per_ns=0.9 / 2e7),
            11,
        ),  # and more under load: those to come wait, too: 9.2, in 3 batches
        (view(cost=Cost()), 32),  # nothing known
        (view(cost=Cost(1e6, 0.0, 0.0, True)), 32),  # a request costs nothing
        (view(cost=Cost(0.0, 1e3, 0.0, True)), 1),
        (view(waiting=1), 1),
        (view(most=1), 1),
        (
            view(cost=Cost(1e6, 0.0, 1e6, True), waiting=7, turnaround_ns=2e6),
            4,
        ),  # 4.6: nearer to two batches than to one
    ],
)
def test_how_many(given: BatchView, size: int) -> None:
    assert by_cost(given) == size


@given(
    st.integers(1, 10_000),
    st.integers(1, 512),
    st.integers(1, 64),
    *[st.floats(0, 1e12)] * 3,
    st.floats(0, 1),
    st.floats(0, 1e10),
    st.floats(1, 1e5),
)
def test_a_size_is_always_one_that_can_be_taken(
    waiting: int, most: int, workers: int, a: float, b: float, m: float, rate: float, turn: float, mean: float
) -> None:
    made = BatchView(waiting, mean, most, workers, rate, turn, Cost(a, b, m, True))
    for policy in (by_cost, largest):
        assert 1 <= policy(made) <= min(most, waiting)


def test_padded_batches_are_made_of_like_lengths_around_the_oldest() -> None:
    world = World(0)
    world.join(max_batch=4, padded=True)
    world.submit(tokens=3)  # keeps the worker busy
    sizes = [100, 7, 900, 101, 6, 5, 70, 850, 4, 127, 800]
    rids = {world.submit(tokens=tokens): tokens for tokens in sizes}
    world.run(world.now_ns + 1_000 * MS)
    batches = [[rids[rid] for rid in batch.rids] for batch in world.dispatched[1:]]
    assert batches == [[100, 101, 127, 70], [7, 6, 5, 4], [900, 850, 800]]


def test_classes_are_mixed_when_padding_costs_less_than_another_batch() -> None:
    """The world's machine takes 8 ms and 10 us a token: a batch is worth 800 tokens of padding."""
    world = World(0)
    world.join(max_batch=8, padded=True)
    for tokens in (3, 40, 500, 9, 100, 1000, 200, 60, 30, 12):
        for more in range(tokens % 4 + 1):
            world.submit(tokens=tokens + more)
        world.run(world.now_ns + 100 * MS)
    assert world.core.services[("m", "k")].padding_worth == pytest.approx(800, rel=0.05)
    world.submit(tokens=10)
    for tokens in (100, 60, 900, 950, 910, 110):
        world.submit(tokens=tokens)
    world.run(world.now_ns + 1_000 * MS)
    batches = [[world.asked[rid].tokens for rid in batch.rids] for batch in world.dispatched[-2:]]
    assert batches == [[100, 110, 60], [900, 910, 950]], "60 joins (50 tokens); 3 x 800 tokens are a batch of their own"


@pytest.mark.parametrize("seed", range(4))
def test_the_oldest_is_in_every_padded_batch_and_classes_are_not_mixed_for_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed)
    world.join(max_batch=5, padded=True)
    for _ in range(200):
        world.submit(tokens=int(rng.lognormvariate(4, 1)) + 1, tenant=rng.choice("ab"))
        world.run(world.now_ns + rng.randrange(3) * MS)
    waiting = sorted(world.asked)
    for batch in world.dispatched:
        sizes = [world.asked[rid].tokens for rid in batch.rids]
        padding = max(sizes) * len(sizes) - sum(sizes)
        assert len({size.bit_length() for size in sizes}) == 1 or padding <= 4 * 820, batch
        tenants = {world.asked[rid].tenant for rid in waiting}
        heads = {next(rid for rid in waiting if world.asked[rid].tenant == tenant) for tenant in tenants}
        assert heads & set(batch.rids), "neither tenant's oldest is in the batch"
        waiting = [rid for rid in waiting if rid not in batch.rids]


def test_a_batch_keeps_to_its_token_budget_but_one_too_large_goes_alone() -> None:
    world = World(0, batch_tokens_max=100)
    world.join(max_batch=8)
    world.submit()
    for tokens in (60, 40, 1, 300, 50, 50):
        world.submit(tokens=tokens)
    world.run(world.now_ns + 1_000 * MS)
    sizes = [[world.asked[rid].tokens for rid in batch.rids] for batch in world.dispatched[1:]]
    assert sizes == [[60, 40], [1], [300], [50, 50]]


def test_padding_counts_in_the_budget_of_a_padded_engine() -> None:
    world = World(0, batch_tokens_max=100)
    world.join(max_batch=8, padded=True)
    world.submit(tokens=2)
    for tokens in (20, 20, 20, 30, 30):
        world.submit(tokens=tokens)
    world.run(world.now_ns + 1_000 * MS)
    sizes = [[world.asked[rid].tokens for rid in batch.rids] for batch in world.dispatched[1:]]
    assert sizes == [[20, 20, 20], [30, 30]]


def test_a_request_starts_when_the_cache_has_room_for_it_and_nobody_takes_that_room() -> None:
    world = World(0)
    world.join(iteration=True, max_batch=8, max_num_seqs=20, kv_tokens=100)
    world.submit(tokens=50, max_new=10)
    world.submit(tokens=30, max_new=20)  # 110 > 100: waits
    world.submit(tokens=5, max_new=5)  # would fit, and must not pass
    assert [batch.rids for batch in world.dispatched] == [(1,)]
    assert world.core.counters["held.kv_full"] == 1
    world.run(world.now_ns + 1_000 * MS)
    assert [rid for batch in world.dispatched for rid in batch.rids] == [1, 2, 3]


def test_an_empty_cache_takes_anybody_so_that_its_engine_can_say_no() -> None:
    world = World(0)
    world.join(iteration=True, max_batch=8, max_num_seqs=20, kv_tokens=100)
    world.submit(tokens=500, max_new=10)
    assert len(world.dispatched) == 1


def test_generation_that_cannot_be_in_time_is_refused_at_the_door_and_counted() -> None:
    world = World(0)
    world.join(iteration=True, max_batch=8, max_num_seqs=8)
    for _ in range(KNOWN_FROM + 4):
        world.submit(tokens=10, max_new=50)
        world.run(world.now_ns + 2_000 * MS)
    assert world.core.services[("m", "k")].answer_least == pytest.approx(50, rel=0.3)
    step_ms = world.core.services[("m", "k")].cost.batch_ns(1, 1) / MS
    late = world.submit(tokens=10, max_new=50, deadline_ns=world.now_ns + int(10 * step_ms * MS))
    fine = world.submit(tokens=10, max_new=50, deadline_ns=world.now_ns + int(200 * step_ms * MS))
    short = world.submit(tokens=10, max_new=5, deadline_ns=world.now_ns + int(20 * step_ms * MS))
    refusal = world.endings[late]
    assert isinstance(refusal, act.Refuse)
    assert (refusal.code, refusal.reason) == ("deadline_unreachable", "predicted_miss")
    assert world.core.counters["refusal.predicted_miss"] == 1
    world.run(world.now_ns + 2_000 * MS)
    assert not world.endings[fine].code
    assert not world.endings[short].code


def test_where_the_long_lane_begins_follows_the_cost() -> None:
    world = World(0, bypass_tokens=BYPASS_AUTO)
    bypass = world.core.policies.bypass
    assert bypass(Cost()) == BYPASS_TOKENS
    assert bypass(Cost(8e6, 1e4, 0.0, True)) == 3200
    assert bypass(Cost(8e6, 0.0, 1.0, True)) == float("inf")
    assert bypass(Cost(0.0, 1e4, 0.0, True)) == 0


def test_each_wait_is_said_once_with_its_reason() -> None:
    world = World(0)
    world.submit()
    world.join(max_batch=1)
    for _ in range(3):
        world.submit()
    world.submit(tokens=5_000)
    world.submit(tokens=5_000)
    world.run(world.now_ns + 1_000 * MS)
    counters = world.core.counters
    assert counters["held.no_worker"] == 1
    assert counters["held.no_free_worker"] >= 2
    assert counters["placed.only_one_free"] == counters["batches"] == 6


def test_padding_is_measured() -> None:
    world = World(0)
    number = world.join(max_batch=8, padded=True)
    world.submit(tokens=2)
    world.submit(tokens=9)
    world.submit(tokens=15)
    world.run(world.now_ns + 1_000 * MS)
    assert number == 1
    assert world.core.counters["tokens.input"] == 26
    assert world.core.counters["tokens.computed"] == 2 + 30


def test_answers_are_known_after_a_few_and_follow_a_change() -> None:
    answers = Answers()
    for _ in range(KNOWN_FROM - 1):
        answers.observe(100)
    assert (answers.mean, answers.least) == (0.0, 0.0)
    rng = random.Random(0)
    for _ in range(4_000):
        answers.observe(rng.randint(1, 100))
    assert answers.mean == pytest.approx(50, rel=0.2)
    assert answers.least == pytest.approx(25, rel=0.5)
    for _ in range(400):
        answers.observe(10)
    assert answers.mean == pytest.approx(10, rel=0.1)
    assert answers.least == pytest.approx(10, rel=0.3)


def test_a_report_of_what_is_in_the_cache_bounds_what_is_sent() -> None:
    world = World(0, check=False)
    number = world.join(iteration=True, max_batch=8, max_num_seqs=20, kv_tokens=1_000)
    world.submit(tokens=10, max_new=10)
    world.core.step(ev.StepDone(number, MS, 10, 1, (), kv_used=990, kv_total=1_000), world.now_ns)
    world.submit(tokens=20, max_new=1)
    assert len(world.dispatched) == 1, "the engine says that its cache is nearly full"


def test_a_burst_is_spread_evenly_over_running_engines() -> None:
    world = World(0)
    for _ in range(3):
        world.join(iteration=True, max_batch=16, max_num_seqs=16)
    world.submit(max_new=1_000)
    requests = [ev.Submit(rid, 1, "m", "k", 10, max_new=1_000) for rid in range(100, 111)]
    world.asked.update({request.rid: request for request in requests})
    world.step(ev.Together(list(requests)))
    assert sorted(len(machine.running) for machine in world.machines.values()) == [4, 4, 4]
