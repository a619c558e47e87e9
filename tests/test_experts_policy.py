"""The policy as the core uses it: when it composes and why not, what it counts, how decoding is followed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headway.policies.experts.cost import Work
from headway.policies.experts.decode import Running
from headway.policies.experts.policy import BATCHES_KEPT, NEVER_NS, ExpertAware
from headway.policies.experts.shedding import RETRY_MS_MAX, RETRY_MS_MIN
from headway.policies.experts.values import Forecast, Learned, Observed
from headway.policies.experts.worth import EXPLORED, REPORTS_MIN, Worth

DEVICES = 4
MS = 1_000_000
KNOWN = Learned((), 0.9, REPORTS_MIN)


@dataclass
class One:
    rid: int
    forecast: object | None
    tenant: str = "t"
    arrived_ns: int = 0
    deadline_ns: int = NEVER_NS
    passed: int = 0


def on(device: int, rid: int, *, tokens: int = 10, decode: float = 0.0, **more: Any) -> One:
    """A request all of whose tokens go to one device."""
    load = np.zeros((1, DEVICES), np.float32)
    load[0, device] = tokens
    return One(rid, Forecast(load, tokens, decode), **more)


def run(policy: ExpertAware, members: list[One], batch: int, reason: str, *, tell: bool = True) -> None:
    """A batch of `members` runs and is reported as it was forecast."""
    policy.started(members, take=len(members), batch=batch, worker=1, reason=reason)
    if tell:
        policy.hear(Learned([seen(batch, one) for one in members], 0.9, REPORTS_MIN))
    for one in members:
        policy.ended(one.rid)


def seen(batch: int, one: One) -> Observed:
    assert isinstance(one.forecast, Forecast)
    return Observed(batch, one.rid, True, one.forecast.tokens, one.forecast.load)


def ready(policy: ExpertAware | None = None, *, device: int = 0) -> ExpertAware:
    """Loads are predictable, and batches first come, first served have been seen to be one-sided."""
    policy = policy or ExpertAware(1, DEVICES, 4)
    for batch in range(1, 5):
        run(policy, [on(device, 100 * batch + at) for at in range(4)], batch, "unmeasured")
    return policy


def batch_that(policy: ExpertAware, *, explores: bool) -> int:
    return next(at for at in range(10, 999) if (policy.worth.skipped(99, 1, at) == "explored") == explores)


def test_it_composes_once_it_knows_that_it_can_and_that_it_pays() -> None:
    queue = [on(at // 4, at) for at in range(16)]
    cold = ExpertAware(1, DEVICES, 4)
    assert cold.choose(queue, 16, 4, 10, 1, 0) == ([0, 1, 2, 3], "unpredictable")
    cold.hear(KNOWN)
    assert cold.choose(queue, 16, 4, 10, 1, 0).reason == "unmeasured"
    warm = ready()
    choice = warm.choose(queue, 16, 4, batch_that(warm, explores=False), 1, 0)
    assert choice.reason == "composed"
    assert sorted(at // 4 for at in choice.taken) == [0, 1, 2, 3]
    assert warm.choose(queue[:4], 4, 4, 11, 1, 0) == ([0, 1, 2, 3], "shallow")


def test_one_eligible_batch_in_twenty_stays_as_it_came() -> None:
    warm = ready()
    skipped = [warm.worth.skipped(99, 4, batch) for batch in range(20_000)]
    assert set(skipped) == {"", "explored"}
    assert skipped.count("explored") == pytest.approx(20_000 * EXPLORED / 256, rel=0.1)


@pytest.mark.parametrize(("r2", "sides", "why"), [(0.1, 1, "unpredictable"), (0.9, 4, "flat")])
def test_it_switches_itself_off(r2: float, sides: int, why: str) -> None:
    policy = ExpertAware(1, DEVICES, 4)
    for batch in range(1, 20):
        run(policy, [on(at % sides, 100 * batch + at) for at in range(4)], batch, "explored")
    policy.hear(Learned((), r2, REPORTS_MIN))
    assert policy.choose([on(0, at) for at in range(16)], 16, 4, 999, 1, 0).reason == why


def test_what_composing_brings_is_measured_by_what_is_left_alone() -> None:
    policy = ready()
    assert policy.worth.gain == 0.0
    run(policy, [on(at, at) for at in range(4)], 50, "composed")
    assert policy.worth.gain == pytest.approx(0.75)
    run(policy, [on(0, at) for at in range(2)], 51, "shallow", tell=False)  # never reported: no harm
    assert policy.report()["gain"] == 0.75
    assert repr(policy.worth) == "<Worth fifo 4.000, composed 1.000, R2 0.90>"


def test_age_and_pass_overs_force() -> None:
    policy = ready()
    batch = batch_that(policy, explores=False)
    queue = [on(0, at, arrived_ns=at, deadline_ns=at + 100) for at in range(16)]
    assert policy.choose(queue, 16, 4, batch, 1, 75).taken == [0, 1, 2, 3]  # 70% of 100 ns is over for the first six
    assert policy.counters["forced"] == 4
    queue = [on(0, at, passed=50 * (at in (5, 6, 7, 8))) for at in range(16)]
    assert policy.choose(queue, 16, 4, batch, 1, 0).taken == [5, 6, 7, 8]
    assert [one.passed for one in queue[:10]] == [4] * 5 + [50] * 4 + [0]
    assert policy.report()["passed_over"] == {"0": 4, "12": 4}


def test_a_request_that_nobody_could_forecast_is_served_like_any_other() -> None:
    policy = ready()
    queue = [One(at, None) for at in range(16)]
    choice = policy.choose(queue, 16, 4, batch_that(policy, explores=False), 1, 0)
    assert len(set(choice.taken)) == 4
    for one in queue:
        policy.enter(one)
        policy.leave(one)
    policy.started(queue[:4], take=4, batch=77, worker=1, reason="composed")
    assert policy.backlog.requests == 0
    assert policy.refusal(None, "t", 1, workers=1, reserved=False, rid=1) is None


def test_reports_that_belong_to_nothing_change_nothing() -> None:
    policy = ready()
    before = policy.report()
    policy.hear(Learned([seen(999, on(0, 5))]))
    policy.ended(12345)
    after = policy.report()
    assert {key for key in after if after[key] != before[key]} == {"counters"}


def test_batches_that_are_never_reported_are_given_up() -> None:
    policy = ready()
    for batch in range(1000, 1000 + 2 * BATCHES_KEPT):
        run(policy, [on(0, batch)], batch, "shallow", tell=False)
    assert len(policy._launched) == BATCHES_KEPT


# ---------------------------------------------------------------- decoding


def test_who_joins_is_chosen_by_what_those_who_run_decode() -> None:
    policy = ready(ExpertAware(1, DEVICES, 4, joining=True))
    running = [on(0, 900 + at, decode=50) for at in range(4)]
    policy.started(running, take=4, batch=60, worker=1, reason="shallow")
    queue = [on(at % 2, at, decode=50) for at in range(8)]
    batch = batch_that(policy, explores=False)
    joins = policy.choose(queue, 8, 3, batch, 1, 0).taken
    assert [queue[at].rid % 2 for at in joins] == [1, 1, 1]  # not whoever is on device 0
    for one in running:  # they turn out to use device 1
        counts = np.zeros((1, DEVICES), np.float32)
        counts[0, 1] = 10
        policy.hear(Learned([Observed(60, one.rid, True, 10, counts)]))
    joins = policy.choose(queue, 8, 3, batch, 1, 0).taken
    assert [queue[at].rid % 2 for at in joins] == [0, 0, 0]
    other_worker = policy.choose(queue, 8, 4, batch, 2, 0).taken
    assert sorted(queue[at].rid % 2 for at in other_worker) == [0, 0, 1, 1]


def test_what_is_decoded_takes_over_from_the_prompt() -> None:
    one = Running(np.array([[8.0, 0.0]]), 8)
    assert one.demand.tolist() == [[1.0, 0.0]]
    one.prefilled(np.array([[4.0, 4.0]]), 8)
    assert one.demand.tolist() == [[0.5, 0.5]]
    one.decoded(np.array([[0.0, 64.0]]), 64)
    assert one.demand.tolist() == [[0.25, 0.75]]
    one.decoded(np.array([[0.0, 0.0]]), 0)
    one.prefilled(np.zeros((1, 2)), 0)  # all of it was cached: nothing was seen
    assert one.demand.tolist() == [[0.25, 0.75]]


def read_weights(policy: ExpertAware, worth: int) -> None:
    """Steps in which reading an expert's weights takes as long as `worth` of its tokens."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        tokens, active = int(rng.integers(8, 60)), int(rng.integers(1, 4))
        policy.hear(Learned(work=Work(tokens, 0.0, active), spent_ns=1_000 * tokens + 1_000 * worth * active))


def test_one_device_groups_similar_requests() -> None:
    policy = ready(ExpertAware(1, DEVICES, 4, grouping=True))
    queue = [on(at % 2, at) for at in range(8)]
    assert policy.choose(queue, 8, 3, batch_that(policy, explores=False), 1, 0).reason == "unmeasured"
    read_weights(policy, 1)
    assert policy.choose(queue, 8, 3, batch_that(policy, explores=False), 1, 0).reason == "bound_by_work"
    read_weights(policy, 60)
    queue = [on(at % 2, at) for at in range(8)]
    choice = policy.choose(queue, 8, 3, batch_that(policy, explores=False), 1, 0)
    assert choice.reason == "grouped"
    assert [queue[at].rid % 2 for at in choice.taken] == [0, 0, 0]
    policy.started([queue[1]], take=1, batch=70, worker=1, reason="shallow")
    queue[1:2] = []
    choice = policy.choose(queue, 7, 2, batch_that(policy, explores=False), 1, 0)
    assert choice.taken[0] == 0
    assert (policy.window, ExpertAware(1, 2, 4).window, ExpertAware(1, 2, 4, joining=True).window) == (32, 16, 8)


# ---------------------------------------------------------------- the door


def saturated(tenant: str = "hot", **more: Any) -> ExpertAware:
    policy = ready()
    rng = np.random.default_rng(0)
    for _ in range(30):
        work = Work(*rng.uniform(100, 1000, 2))
        policy.hear(Learned(work=work, spent_ns=int(1_000 * work.critical)))
    for at in range(200):
        policy.enter(on(0, 5_000 + at, tokens=5_000, tenant=tenant, **more))
    policy.enter(on(1, 9_000, tokens=10, tenant="other"))
    return policy


def test_the_door_refuses_whom_the_hottest_device_cannot_bear() -> None:
    policy = saturated()
    ask: dict[str, Any] = {"left_ns": 1_400 * MS, "workers": 1, "reserved": False}
    refused = policy.refusal(on(0, 1, tokens=10_000).forecast, "hot", rid=1, **ask)
    assert refused is not None
    assert (refused.reason, refused.hottest) == ("saturated", 0)
    assert refused.share > 0.99
    assert RETRY_MS_MIN <= refused.retry_after_ms < RETRY_MS_MAX
    assert policy.refusal(on(2, 2).forecast, "hot", rid=2, **ask) is None
    report = policy.report()
    assert report["shed"] == [{"tenant": "hot", "reason": "saturated", "count": 1}]
    assert report["counters"]["door.cold"] == 1
    assert report["hot_device_share"] > 0.99
    assert report["device_backlog_s"][0] == pytest.approx(1.0, rel=0.05)
    assert report["tenant_dominant_share"]["hot"] > 0.99


def test_the_door_is_open_while_nothing_is_known_or_no_limit_is_set() -> None:
    hot = on(0, 1, tokens=10_000).forecast
    ask: dict[str, Any] = {"workers": 1, "reserved": False, "rid": 1}
    assert saturated().refusal(hot, "hot", None, **ask) is None
    assert saturated().refusal(hot, "hot", 1_000 * MS, **ask) is not None
    unknown = saturated()
    unknown.worth = Worth()
    assert unknown.refusal(hot, "hot", MS, **ask) is None
