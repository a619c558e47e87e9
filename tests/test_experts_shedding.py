"""The door of an expert-parallel service: prices, protected shares, and what a step is learned to cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policies.experts.cost import KNOWN_AFTER, StepCost, Work
from headway.policies.experts.shedding import (
    TENANTS_MAX,
    Backlog,
    Drain,
    Usage,
    Verdict,
    verdict,
)

LIMIT_NS = 1_000_000_000.0


def learned_cost(slot_ns: float = 1_000.0, fixed_ns: float = 0.0) -> StepCost:
    """Only the hottest device's slots cost anything."""
    cost, rng = StepCost(), np.random.default_rng(0)
    for _ in range(200):
        tokens, critical = rng.uniform(100, 1000, 2)
        cost.observe(Work(tokens, critical), fixed_ns + slot_ns * critical)
    return cost


COST = learned_cost()


def load(*devices: float) -> np.ndarray:
    return np.array([devices], np.float32)


def ask(
    backlog: Backlog,
    wanted: np.ndarray,
    *,
    tenant: str = "a",
    usage: Usage | None = None,
    reserved: bool = False,
    jitter: float = 0.5,
    workers: int = 1,
) -> Verdict:
    return verdict(
        backlog,
        wanted,
        float(wanted.sum()),
        1 / 16,
        tenant,
        cost=COST,
        drain=1.0,
        usage=usage or used({"a": 9.0, "b": 1.0}),
        workers=workers,
        limit_ns=LIMIT_NS,
        reserved=reserved,
        jitter=jitter,
    )


def used(by: dict[str, float]) -> Usage:
    usage = Usage(2)
    for tenant, work in by.items():
        usage.add(tenant, load(work, work))
    return usage


def waiting(*devices: float) -> Backlog:
    backlog = Backlog(1, len(devices))
    backlog.add(load(*devices), sum(devices), 1 / 16)
    return backlog


def test_under_the_target_everybody_is_let_in() -> None:
    assert ask(waiting(500_000, 100_000), load(50_000, 0)).reason == "room"


def test_beyond_it_who_loads_the_hottest_device_is_refused_and_told_why() -> None:
    found = ask(waiting(590_000, 100_000), load(50_000, 0))
    assert (found.admitted, found.reason, found.hottest) == (False, "saturated", 0)
    assert found.share == pytest.approx(640 / 740)
    assert found.retry_after_ms == pytest.approx(40, abs=1)


def test_who_fits_into_the_valley_is_let_in() -> None:
    assert ask(waiting(650_000, 100_000), load(0, 50_000)).reason == "cold"
    assert not ask(waiting(850_000, 100_000), load(0, 50_000)).admitted  # but not for ever


def test_who_had_less_than_half_its_share_is_protected() -> None:
    full = waiting(700_000, 700_000)
    assert ask(full, load(9_000, 9_000), tenant="b").reason == "protected"
    assert not ask(full, load(9_000, 9_000), tenant="a").admitted
    assert ask(full, load(9_000, 9_000), tenant="new").reason == "protected"
    assert not ask(waiting(1_200_000, 1_200_000), load(9_000, 9_000), tenant="b").admitted


def test_the_reserve_has_no_price_but_a_limit() -> None:
    assert ask(waiting(700_000, 700_000), load(9_000, 9_000), reserved=True).reason == "reserved"
    assert not ask(waiting(1_200_000, 1_200_000), load(9_000, 9_000), reserved=True).admitted


def test_more_workers_hold_more() -> None:
    assert not ask(waiting(700_000, 700_000), load(9_000, 9_000)).admitted
    assert ask(waiting(700_000, 700_000), load(9_000, 9_000), workers=2).reason == "room"


def test_times_to_come_back_are_spread_by_a_fifth() -> None:
    times = [ask(waiting(700_000, 700_000), load(100_000, 100_000), jitter=at).retry_after_ms for at in (0.0, 1.0)]
    assert times == [pytest.approx(160, abs=1), pytest.approx(240, abs=1)]


def test_a_backlog_that_is_gone_leaves_nothing_behind() -> None:
    backlog = waiting(0.1, 0.7)
    backlog.add(load(1e6, 3e-5), 1e6, 0.1)
    backlog.remove(load(1e6, 3e-5), 1e6, 0.1)
    backlog.remove(load(0.1, 0.7), 0.8, 1 / 16)
    assert (backlog.requests, backlog.tokens, backlog.steps, backlog.load.tolist()) == (0, 0.0, 0.0, [[0.0, 0.0]])


def test_uneven_batches_make_a_backlog_last_longer() -> None:
    drain, backlog = Drain(), waiting(10_000, 10_000)
    for _ in range(200):
        drain.launched(backlog, load(5_000, 0), 5_000, 0.5, COST)
    assert 1.5 < drain.factor <= 2.0
    drain.launched(waiting(1, 1), load(5_000, 0), 5_000, 0.5, COST)  # nothing else waited: it could not be otherwise
    assert drain.factor > 1.5


# ---------------------------------------------------------------- shares


def test_shares_fade_with_every_batch() -> None:
    usage = used({"a": 1.0})
    for _ in range(60):
        usage.decay()
    usage.add("b", load(1.0, 0.0))
    assert usage.dominant("b") > 0.7
    assert usage.dominant("a") == 1.0  # of the other device it had all
    assert usage.report() == {"a": 1.0, "b": usage.dominant("b")}


def test_who_is_gone_is_forgotten() -> None:
    usage = used({"a": 1.0, "b": 1.0})
    for _ in range(1_000):
        usage.add("b", load(1.0, 1.0))
        usage.decay()
    assert usage.active == 1
    assert usage.dominant("b") == pytest.approx(1.0)
    assert usage.dominant("a") == 0.0


def test_long_running_books_do_not_overflow() -> None:
    usage = Usage(2)
    for _ in range(40_000):
        usage.decay()
        usage.add("a", load(1.0, 2.0))
    assert usage.dominant("a") == pytest.approx(1.0)


def test_no_crowd_of_tenants_fills_the_memory() -> None:
    usage = Usage(2)
    for at in range(TENANTS_MAX + 100):
        usage.add(f"tenant-{at}", load(1.0, 1.0))
    assert usage.active == TENANTS_MAX
    assert len(usage.report()) == 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1))
def test_shares_add_up(uses: list[tuple[str, float, float]]) -> None:
    usage = Usage(2)
    for tenant, one, other in uses:
        usage.add(tenant, load(one, other))
        usage.decay()
    assert all(0.0 <= usage.dominant(tenant) <= 1.0 + 1e-6 for tenant in "abcd")


# ---------------------------------------------------------------- what a step costs


def test_costs_are_learned_from_steps() -> None:
    cost, rng = StepCost(), np.random.default_rng(1)
    assert (cost.known, cost.slots_worth, cost.ns(Work(100, 100))) == (False, 0.0, 0.0)
    for _ in range(300):
        work = Work(*rng.uniform(100, 1000, 3))
        spent = (5e6 + 200 * work.tokens + 900 * work.critical + 27_000 * work.active) * rng.normal(1, 0.01)
        cost.observe(work, spent)
    assert cost.ns(Work(500, 500, 100)) == pytest.approx(5e6 + 1e5 + 4.5e5 + 2.7e6, rel=0.02)
    assert cost.slots_worth == pytest.approx(30, rel=0.3)
    assert cost.error < 0.03


def test_a_pause_is_not_a_cost() -> None:
    cost = learned_cost()
    before = cost.ns(Work(500, 500))
    cost.observe(Work(500, 500), 1e12)
    assert cost.ns(Work(500, 500)) < 1.3 * before


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3, st.floats(0, 1e12)), min_size=KNOWN_AFTER, max_size=40))
def test_predicted_times_are_never_negative(steps: list[tuple[float, ...]]) -> None:
    cost = StepCost()
    for *work, spent in steps:
        cost.observe(Work(*work), spent)
    for *work, _ in steps:
        assert 0.0 <= cost.ns(Work(*work)) < float("inf")
