"""The sequential test: seldom wrong at any time when there is nothing to find, quick where there is."""

import random

import pytest

from headway.bench.ab.sequential import START, Effect

RUNS, REQUESTS = 200, 1500


def looked_at(share: float, effect: float, seed: int, drift: float = 0.0) -> int | None:
    """After how many requests the interval first left 0, looked at after each; None: never."""
    rng, made = random.Random(seed), Effect(share)
    for number in range(REQUESTS):
        in_b = rng.random() < share
        made.observe(in_b, rng.gauss(3.0 + drift * number / REQUESTS, 0.8) ** 2 / 4 + effect * in_b)
        bounds = made.interval
        if bounds and not bounds[0] <= 0.0 <= bounds[1]:
            return number + 1
    return None


@pytest.mark.parametrize(("share", "drift"), [(0.5, 0.0), (0.2, 0.0), (0.5, 2.0)])
def test_nothing_is_found_where_nothing_is(share: float, drift: float) -> None:
    """Looked at 1500 times each, at 5 %: of 200 runs 10 would be allowed, whatever the traffic does meanwhile."""
    assert sum(looked_at(share, 0.0, seed, drift) is not None for seed in range(RUNS)) <= 10


def test_an_effect_is_found_and_its_interval_holds_it() -> None:
    found = [looked_at(0.5, 0.5, seed) for seed in range(20)]
    assert all(found), found
    rng, made = random.Random(3), Effect(0.3)
    for _ in range(4000):
        in_b = rng.random() < 0.3
        made.observe(in_b, rng.gauss(1.0, 0.5) + 0.2 * in_b)
    assert made.ratio is not None
    middle, low, high = made.ratio
    assert 1.0 < low < middle < high
    assert low < 2.718281828**0.2 < high


def test_little_says_nothing() -> None:
    made = Effect(0.5)
    for number in range(START - 1):
        made.observe(bool(number % 2), 100.0 * (number % 2))
    assert made.interval is None
    assert made.ratio is None
    with pytest.raises(ValueError, match="share 1 is not between 0 and 1"):
        Effect(1)
