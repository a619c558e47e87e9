"""The cost model: it finds the numbers in noise, follows a change, and never says anything that cannot be."""

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.scheduler.latency import SEEN_MIN, CostModel

E1, E2, E3 = (8.0, 0.01, 0.1), (8.0, 0.001, 0.05), (3.0, 0.1, 0.3)
SEED = 1
REPORTS = 8000


def reports(cost: tuple[float, float, float], seed: int, noise: float = 0.1) -> Iterator[tuple[int, int, int]]:
    """Batches of 1 to 32 like lengths, 8 to 1024, in time that errs by a tenth; one in a hundred takes three times."""
    a, b, m = cost
    rng = random.Random(seed)
    while True:
        requests = rng.randint(1, 32)
        tokens = int(requests * math.exp(rng.uniform(math.log(8), math.log(1024))))
        took_ms = (a + b * tokens + m * requests) * math.exp(rng.gauss(0, noise)) * (3 if rng.random() < 0.01 else 1)
        yield requests, tokens, int(took_ms * 1e6)


def learned(cost: tuple[float, float, float], seed: int, count: int = REPORTS) -> CostModel:
    model = CostModel()
    for _, report in zip(range(count), reports(cost, seed), strict=False):
        model.observe(*report)
    return model


@pytest.mark.parametrize("cost", [E1, E2, E3], ids=["e1", "e2", "e3"])
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_it_finds_the_numbers_in_noise(cost: tuple[float, float, float], seed: int) -> None:
    found = learned(cost, seed).cost
    assert found.known
    for value, true in zip((found.a_ns, found.b_ns, found.m_ns), cost, strict=True):
        assert value / 1e6 == pytest.approx(true, rel=0.1), f"seed {seed}: {found}"


@pytest.mark.parametrize("cost", [E1, E2, E3], ids=["e1", "e2", "e3"])
def test_the_fixed_cost_is_underestimated_rather_than_over(cost: tuple[float, float, float]) -> None:
    """With few reports, where it matters: at most a third of the estimates are above the truth by a tenth."""
    over = [learned(cost, seed, 30).cost.a_ns / 1e6 > 1.1 * cost[0] for seed in range(40)]
    under = [learned(cost, seed, 30).cost.a_ns / 1e6 < cost[0] for seed in range(40)]
    assert sum(over) <= 40 // 3
    assert sum(under) >= sum(over)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_cost_that_doubles_or_halves_is_learned_anew_within_200_reports(factor: float) -> None:
    model = learned(E1, SEED, 3000)
    source = reports((E1[0] * factor, E1[1] * factor, E1[2] * factor), SEED + 1)
    for _ in range(200):
        model.observe(*next(source))
    assert model.changes == 1
    assert model.cost.a_ns / 1e6 == pytest.approx(E1[0] * factor, rel=0.15)
    for requests, tokens in ((1, 20), (8, 400), (32, 16_000)):
        true_ms = factor * (E1[0] + E1[1] * tokens + E1[2] * requests)
        assert model.cost.batch_ns(requests, tokens) / 1e6 == pytest.approx(true_ms, rel=0.1)


def test_noise_alone_is_no_change() -> None:
    assert sum(learned(cost, seed, 4000).changes for cost in (E1, E2, E3) for seed in range(3)) == 0


@pytest.mark.parametrize(("requests", "tokens"), [(1, 10), (8, 80), (32, 6400), (1, 0)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_batches_all_alike_stay_bounded_and_are_predicted(requests: int, tokens: int, noise: float) -> None:
    model, rng = CostModel(), random.Random(SEED)
    true_ms = E1[0] + E1[1] * tokens + E1[2] * requests
    for _ in range(5000):
        model.observe(requests, tokens, int(true_ms * math.exp(rng.gauss(0, noise)) * 1e6))
        if model.cost.known:
            assert 0 <= model.cost.a_ns <= 1.5e6 * true_ms
            assert model.cost.batch_ns(requests, tokens) / 1e6 == pytest.approx(true_ms, rel=0.02 + noise)
    assert model.cost.batch_ns(requests, tokens) / 1e6 == pytest.approx(true_ms, rel=0.02)
    if noise:
        assert model.cost.a_ns <= true_ms * 1e6 / 3, "a fixed cost was claimed that nothing shows"


def test_a_slow_start_and_stragglers_say_little() -> None:
    model, source = CostModel(), reports(E1, SEED, 0.02)
    model.observe(4, 400, 60_000_000_000)
    for index in range(60):
        requests, tokens, took_ns = next(source)
        model.observe(requests, tokens, took_ns * (50 if index in (2, 30) else 1))
    assert model.cost.a_ns / 1e6 == pytest.approx(E1[0], rel=0.25)


def test_where_a_coefficient_would_be_negative_the_others_are_fitted_again() -> None:
    """Times that fall with the tokens: b is zero, and the rest predicts the mean, not the mean plus what b took off."""
    model = CostModel()
    for index in range(400):
        tokens = 100 + 100 * (index % 10)
        model.observe(4, tokens, int((10 - 0.004 * tokens) * 1e6))
    assert model.cost.b_ns == 0
    assert model.cost.batch_ns(4, 550) / 1e6 == pytest.approx(7.6, rel=0.1)


def test_a_prior_stands_until_enough_was_seen_and_where_nothing_else_is_known() -> None:
    model = CostModel((8e6, 1e4, 1e5))
    assert model.cost.a_ns == 8e6
    assert not model.cost.known
    for _ in range(SEEN_MIN):
        model.observe(1, 10, 8_200_000)
    assert model.cost.known
    assert model.cost.a_ns / 1e6 == pytest.approx(8, rel=0.2)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 1 << 22), st.integers(-5, 10**13)), min_size=1, max_size=120
    ),
    st.just(()) | st.tuples(*[st.floats(-1e9, 1e9)] * 3),
)
@example([(1, 10, 5)] * 100, ())
@example([(1, 0, 0)] * 100, ())
@example([(0, 0, 10**13), (4096, 1 << 22, 1)] * 60, ())
def test_it_never_says_what_cannot_be(seen: list[tuple[int, int, int]], prior: tuple[float, ...]) -> None:
    model = CostModel(prior)
    longest = max([0, *(took for _, _, took in seen)])
    for report in seen:
        model.observe(*report)
        for value in model.cost[:3]:
            assert math.isfinite(value)
            assert value >= 0
    if not prior and model.cost.known:
        assert model.cost.a_ns <= 11 * longest + 1e4
