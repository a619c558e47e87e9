"""Expert-aware scheduling inside the core: batches are composed, the door refuses, the books add up under faults."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policies.experts.composer import PASSES, WINDOW
from headway.policies.experts.cost import Work
from headway.policies.experts.policy import ExpertAware
from headway.policies.experts.values import Learned
from headway.policies.experts.worth import REPORTS_MIN
from headway.policies.fair import Shares
from headway.policies.forecast import ExpertFacts, LoadForecast, LoadReport
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.book import NEVER_NS, Request
from headway.scheduler.fleet import Worker
from headway.scheduler.queue import Lane
from tests.sim import MS, World

DEVICES = 4


def forecast(device: int, tokens: int = 10, decode: float = 0.0) -> LoadForecast:
    """All tokens go to one device."""
    load = np.zeros(DEVICES, "<f4")
    load[device] = tokens
    return LoadForecast(load.tobytes(), tokens, decode)


def hottest(world: World, rid: int) -> int:
    made = world.asked[rid].forecast
    assert made is not None
    return int(np.frombuffer(made.load, "<f4").argmax())


def world_of(policy: ExpertAware, seed: int = 0) -> World:
    """A world whose services are scheduled by `policy`."""
    return World(seed, experts=lambda _facts: policy)


def facts(slots: int = 4, *, groups: int = DEVICES, joining: bool = False) -> ExpertFacts:
    return ExpertFacts(1, groups, slots, joining=joining)


def known(slots: int, *, joining: bool = False, slo_ns: int = 0) -> ExpertAware:
    """A policy that has seen that loads are predictable and batches uneven, and what a slot costs (0.01 ms)."""
    policy = ExpertAware(1, DEVICES, slots, joining=joining, slo_ns=slo_ns)
    policy.hear(Learned((), 0.9, REPORTS_MIN))
    rng = np.random.default_rng(0)
    for _ in range(30):
        policy.worth.observe(3.0, composed=False)
        work = Work(*rng.uniform(10, 100, 2))
        policy.hear(Learned(work=work, spent_ns=int(10_000 * work.critical)))
    return policy


def test_a_run_of_one_kind_is_mixed() -> None:
    policy = known(4)
    world = world_of(policy)
    world.join(max_batch=4, experts=facts())
    world.submit(forecast=forecast(0))  # runs alone at first, so that the rest queues up
    for at in range(32):
        world.submit(forecast=forecast(at // 4 % 4))
    world.run(10_000 * MS)
    whole = [one for one in world.dispatched if one.composed == "composed"]
    assert len(whole) >= 5
    for dispatch in whole[:3]:
        assert sorted(hottest(world, rid) for rid in dispatch.rids) == [0, 1, 2, 3]
    assert {one.composed for one in world.dispatched} <= {"composed", "explored", "shallow"}
    assert len(world.endings) == 33
    assert (policy.backlog.requests, policy._running) == (0, {})


def test_without_experts_nothing_is_said_of_them() -> None:
    world = World(0)
    world.join(max_batch=4)
    for _ in range(9):
        world.submit()
    world.run(1_000 * MS)
    assert {one.composed for one in world.dispatched} == {""}
    assert next(iter(world.core.services.values())).experts is None


def test_the_door_names_the_hottest_device() -> None:
    world = world_of(known(4, slo_ns=100 * MS))
    world.join(max_batch=4, experts=facts())
    for _ in range(20):
        world.submit(tokens=1_000, tenant="hot", forecast=forecast(2, 1_000))
    refused = [one for one in world.endings.values() if isinstance(one, act.Refuse)]
    assert refused
    assert {one.code for one in refused} == {"expert_saturated"}
    assert "device 2" in refused[-1].message
    assert (refused[-1].retry_after_ms or 0) > 0
    assert world.core.counters["refusal.expert_saturated"] == len(refused)
    before = len(refused)
    world.submit(tokens=10, tenant="other", forecast=forecast(0, 10))  # cold: it fits into a valley
    world.submit(tokens=1_000, tenant="hot", priority=-1, forecast=forecast(2, 1_000))  # of the reserve
    assert sum(isinstance(one, act.Refuse) for one in world.endings.values()) == before
    running = world.core.services[("m", "k")].running
    world.run(60_000 * MS)
    assert running
    assert all(not one.code for one in world.endings.values() if isinstance(one, act.End))


def test_a_tenant_with_one_request_is_not_held_up_by_one_with_many() -> None:
    world = world_of(known(4))
    world.join(max_batch=4, experts=facts())
    for _ in range(80):
        world.submit(tenant="flood", forecast=forecast(0))
    world.submit(tenant="small", forecast=forecast(0))
    world.run(100_000 * MS)
    order = [rid for one in world.dispatched for rid in one.rids]
    assert order.index(81) <= 12


def test_nobody_starves_though_everybody_fits_better() -> None:
    """One request on the device that all long for is overtaken by a bounded number only."""
    world = world_of(known(4, joining=True))
    world.join(iteration=True, max_batch=1, max_num_seqs=6, experts=facts(joining=True))
    for at in range(400):
        world.submit(max_new=3, forecast=forecast(0 if at == 30 else 1 + at % 3, decode=3))
    world.run(1_000_000 * MS)
    order = [rid for one in world.dispatched for rid in one.rids]
    worst = max(order.index(rid) - (rid - 1) for rid in range(1, 401))
    assert worst <= (PASSES + 1) * WINDOW * 4
    assert any(one.composed == "composed" for one in world.dispatched)


def test_reports_reach_the_policy_and_late_ones_harm_nobody() -> None:
    policy = known(4)
    world = world_of(policy)
    told = (LoadReport(77, 5, True, 10, forecast(1).load), LoadReport(77, 6, True, 10, b"of another size"))
    world.step(ev.Routed("m", "k", told))  # nobody serves it yet
    world.join(max_batch=4, experts=facts())
    steps = policy.cost.steps
    world.step(ev.Routed("m", "k", told, r2=0.5, learned=70, tokens=9, critical=20, spent_ns=1_000))
    assert (policy.worth.r2, policy.worth.reports, policy.cost.steps) == (0.5, 70, steps + 1)
    assert policy.counters["reports"] == 1
    world.step(ev.Routed("other", "k", told))


def test_what_is_said_of_experts_can_be_recorded_and_run_again() -> None:
    """Each event and action as the flight recorder writes it; a second core decides the same from what it reads."""
    one, other = (world_of(known(4)) for _ in range(2))
    submits = [ev.Submit(rid, 1, "m", "k", 10, forecast=forecast(rid // 4 % 4)) for rid in range(1, 40)]
    ready = ev.WorkerReady(1, "w", "m", "k", False, 4, 4, experts=facts())
    told = ev.Routed("m", "k", (LoadReport(1, 1, True, 10, forecast(1).load),), r2=0.8, learned=80)
    done = [ev.BatchDone(1, batch, 1_000, 40) for batch in range(1, 6)]
    for at, event in enumerate([ready, *submits, told, *done]):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=ev.Event)
        assert again == event
        assert other.core.step(again, at) == one.core.step(event, at)
    assert one.core.counters["batches"] == 6


def test_a_moved_placement_takes_those_who_wait_along() -> None:
    policies = [known(4), ExpertAware.of(facts(groups=2))]
    second, made = policies[1], iter(policies)
    world = World(0, experts=lambda _facts: next(made))
    world.join(max_batch=4, experts=facts())
    world.join(max_batch=4, experts=facts())  # the same again: nothing new is made
    for _ in range(12):
        world.submit(forecast=forecast(0))
    world.join(max_batch=4, experts=facts(groups=2))  # a forecast for four devices says nothing of two
    world.submit(forecast=LoadForecast(np.array([5.0, 5.0], "<f4").tobytes(), 10))
    world.run(10_000 * MS)
    assert len(world.endings) == 13
    assert second.backlog.requests == 0


@pytest.mark.parametrize("seed", range(12))
def test_the_books_add_up_under_faults(seed: int) -> None:
    """Random requests, tenants, priorities, deadlines, cancels, lost workers; after all of it nothing is left over."""
    rng = random.Random(seed)
    iteration = seed % 2 == 0
    policy = known(4, joining=iteration, slo_ns=rng.choice([0, 400 * MS]))
    world = world_of(policy, seed)
    make = {
        "iteration": iteration,
        "max_batch": 4,
        "experts": facts(joining=iteration),
        "padded": not iteration and seed % 3 == 0,
    }
    if iteration:
        make["kv_tokens"] = 400
    for _ in range(2):
        world.join(**make)  # type: ignore[arg-type]
    world.beat()
    for _ in range(250):
        tokens, new = rng.randint(1, 60), rng.randint(1, 6)
        rid = world.submit(
            tokens=tokens,
            max_new=new if iteration else 0,
            tenant=rng.choice(["a", "a", "a", "b", "c"]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            deadline_ns=world.now_ns + rng.randint(50, 3_000) * MS if rng.random() < 0.3 else None,
            forecast=forecast(rng.choice([0, 0, 1, 2, 3]), tokens, new) if rng.random() < 0.9 else None,
        )
        if rng.random() < 0.1:
            world.step(ev.Cancel(rng.randint(1, rid)))
        if rng.random() < 0.02:
            world.lose(max(world.machines))
            world.join(**make)  # type: ignore[arg-type]
        if rng.random() < 0.2:
            batch = rng.randint(1, 99)
            told = (LoadReport(batch, rid, True, tokens, forecast(0, tokens).load),)
            world.step(ev.Routed("m", "k", told, r2=0.9, learned=99))
        if rng.random() < 0.3:
            world.run(world.now_ns + rng.randint(1, 40) * MS)
    world.run(world.now_ns + 1_000_000 * MS)
    assert len(world.endings) == 250
    assert (policy.backlog.requests, float(policy.backlog.load.sum()), policy._running) == (0, 0.0, {})
    assert world.core.counters["launched.on_trial"] >= 0


# ---------------------------------------------------------------- whom the composer is shown


def lane_of(rows: list[tuple[int, int, int]], padded: bool) -> Lane:
    """Requests of (tenant, key, tokens)."""
    lane = Lane("short", Shares({"t1": 2.0}))
    for rid, (tenant, key, tokens) in enumerate(rows):
        bucket = tokens.bit_length() if padded else 0
        request = Request(rid, 1, None, False, tokens, NEVER_NS, rid, key, rid, f"t{tenant}", bucket, 0, tokens)
        lane.arrive(request, rid)
    return lane


rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=40)


@settings(deadline=None)
@given(rows, st.integers(1, 50))
def test_the_window_is_who_would_be_taken_in_turn(rows: list[tuple[int, int, int]], count: int) -> None:
    worker = Worker(1, "w", False, 64, 64, 0)
    lane = lane_of(rows, padded=False)
    first = lane.first()
    assert first is not None
    shown = [one.rid for one in lane.upcoming(first, count, worker)]
    again = [one.rid for one in lane.upcoming(first, count, worker)]
    taken = [one.rid for one in lane.take(count, 0, worker)]
    assert shown == again == taken


@given(rows)
def test_a_padded_window_is_of_one_length_class(rows: list[tuple[int, int, int]]) -> None:
    worker = Worker(1, "w", False, 64, 64, 0)
    lane = lane_of(rows, padded=True)
    first = lane.first()
    assert first is not None
    shown = lane.upcoming(first, 64, worker)
    assert shown[0] is first
    assert {one.rid for one in shown} == {one.rid for one in lane.waiting.values() if one.bucket == first.bucket}


def test_many_tenants_do_not_make_the_window_slow_or_empty() -> None:
    lane = lane_of([(tenant, 0, 5) for tenant in range(500)], padded=False)
    first = lane.first()
    assert first is not None
    assert len(lane.upcoming(first, 32, Worker(1, "w", False, 64, 64, 0))) == 32


def test_a_suspect_is_shown_to_nobody_and_chosen_are_taken_as_far_as_they_fit() -> None:
    lane = lane_of([(0, at, 5) for at in range(8)], padded=False)
    everybody = list(lane.waiting.values())
    everybody[3].suspect = True
    worker = Worker(1, "w", True, 64, 64, 0, kv_total=100, running=1)
    for one in everybody:
        one.kv = 120 if one.rid == 5 else 30
    shown = lane.upcoming(everybody[0], 64, worker)
    assert [one.rid for one in shown] == [0, 1, 2, 4, 6, 7]
    assert [one.rid for one in lane.take(8, 0, worker, chosen=[shown[4], shown[1], shown[0], shown[2]])] == [6, 1, 0]
