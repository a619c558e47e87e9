"""Tenants share by tokens: the account itself, and the gap between tenants as the core serves them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policies.fair import TENANTS_KEPT, Shares
from headway.scheduler import actions as act
from tests.sim import MS, World


def test_who_was_idle_starts_where_the_others_are() -> None:
    shares = Shares({})
    busy = shares.enter("busy")
    busy.charge(1_000)
    shares.reached(busy.served)
    assert shares.enter("new").served == 1_000
    busy.charge(10)
    assert shares.enter("busy").served == 1_010  # it waits already: nothing is lifted


def test_a_weight_of_two_is_twice_the_share() -> None:
    shares = Shares({"gold": 2.0})
    for name in ("gold", "plain"):
        shares.enter(name).charge(100)
    assert (shares.tenants["gold"].served, shares.tenants["plain"].served) == (50.0, 100.0)


def test_what_was_not_delivered_is_given_back_at_the_next_turn_and_the_counter_never_falls() -> None:
    tenant = Shares({}).enter("t")
    tenant.charge(100)
    tenant.correct(-80)
    tenant.charge(30)
    assert (tenant.served, tenant.owed) == (100.0, -50.0)
    tenant.charge(60)
    assert (tenant.served, tenant.owed) == (110.0, 0.0)


def test_names_cost_nothing() -> None:
    shares = Shares({})
    for number in range(3 * TENANTS_KEPT):
        shares.enter(f"t{number}").waiting -= number != 5
    assert len(shares.tenants) <= TENANTS_KEPT
    assert "t5" in shares.tenants, "one that waits is kept"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), max_size=60))
def test_an_account_is_finite_and_never_falls(moves: list[tuple[int, int]]) -> None:
    tenant = Shares({}).enter("t")
    last = 0.0
    for kind, tokens in moves:
        tenant.charge(tokens) if kind else tenant.correct(-tokens)
        assert tenant.served >= last
        assert tenant.owed <= 0.0
        last = tenant.served


def served(world: World, tenant_of: dict[int, str]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for rid, action in world.endings.items():
        if isinstance(action, act.End) and not action.code:
            tokens[tenant_of[rid]] += world.asked[rid].tokens
    return tokens


@pytest.mark.parametrize("seed", range(6))
def test_the_gap_between_tenants_that_always_wait_is_bounded(seed: int) -> None:
    """Requests of very different sizes: while all wait, nobody is ahead by more than two of the largest requests, and
    what a batch under way holds back."""
    rng = random.Random(seed)
    world = World(seed)
    world.join(max_batch=4)
    largest = {"flood": 50, "large": 400, "small": 10}
    tenant_of: dict[int, str] = {}
    for tenant, count in (("flood", 400), ("large", 60), ("small", 1600)):
        for _ in range(count):
            tokens = rng.randint(1, largest[tenant])
            tenant_of[world.submit(tokens=tokens, tenant=tenant)] = tenant
    bound = 3 * max(largest.values())
    for _ in range(40):
        world.run(world.now_ns + 20 * MS)
        if {request.tenant for request in world.core.book.live.values()} == set(largest):
            got = served(world, tenant_of)
            assert max(got.values()) - min(got[name] for name in largest) <= bound, got
    assert sum(served(world, tenant_of).values()) > 3 * bound, "too little was served for the bound to mean anything"


def test_a_newcomer_does_not_wait_behind_a_flood() -> None:
    world = World(1)
    world.join(max_batch=1)
    for _ in range(500):
        world.submit(tenant="flood")
    world.run(world.now_ns + 30 * MS)
    late = world.submit(tenant="other")
    before = len(world.endings)
    while late not in world.endings:
        world.run(world.now_ns + MS)
    assert len(world.endings) - before <= 3, "the one that runs, one turn of the flood's, its own"


def test_priority_orders_a_tenants_own_requests_and_takes_nothing_from_others() -> None:
    world = World(2)
    world.join(max_batch=1)
    world.submit(tenant="a")  # keeps the worker busy
    first = [world.submit(tenant="a", priority=-100) for _ in range(4)]
    second = [world.submit(tenant="b") for _ in range(4)]
    urgent = world.submit(tenant="b", priority=-1)
    world.run(world.now_ns + 1_000 * MS)
    order = list(world.endings)[1:]
    halves = [rid in second or rid == urgent for rid in order[:8]]
    assert halves.count(True) == 4, f"turns alternate: {order}"
    assert next(rid for rid in order if rid in second or rid == urgent) == urgent
    assert [rid for rid in order if rid in first] == first


def test_with_iteration_a_tenant_pays_for_what_it_got() -> None:
    """Equal demands, but one tenant's answers end early: it is given more turns, until the tokens are even."""
    world = World(3)
    world.join(iteration=True, max_batch=8, max_num_seqs=6)
    tenant_of: dict[int, str] = {}
    for _ in range(150):
        for tenant, new in (("long", 40), ("short", 4)):
            tenant_of[world.submit(tokens=10, max_new=new, tenant=tenant)] = tenant
    tokens: Counter[str] = Counter()
    for _ in range(400):
        world.run(world.now_ns + 20 * MS)
        waiting = Counter(r.tenant for r in world.core.book.live.values() if not r.batch)
        if min(waiting["long"], waiting["short"]) < 5:
            break
        tokens = Counter()
        for rid in world.endings:
            tokens[tenant_of[rid]] += 10 + world.asked[rid].max_new
    assert tokens["short"] > 500
    assert 0.7 < tokens["short"] / tokens["long"] < 1.4, tokens
