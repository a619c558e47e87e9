"""The policies as tables: what they see, what they say. Pure functions, so each case is one line."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policies.admit import bounded, retry_after_ms
from headway.policies.intervals import KEPT, Intervals
from headway.policies.order import PATIENCE_NS, PRIORITY_STEP_NS, due_time
from headway.policies.place import least_loaded
from headway.policies.views import Arrival, Cost, DoorView, LaneView, Launch, Seat, Wait
from headway.policies.windows import MAKERS, WindowSettings, adaptive, fixed, greedy, make, p95, p95_clamped
from headway.scheduler.events import Submit

MS = 1_000_000
GPU = Cost(8 * MS, 1_000, 50_000, known=True)


def seen(*gaps_ms: float) -> Intervals:
    """Intervals of these lengths."""
    intervals = Intervals()
    now = 0
    intervals.observe(now)
    for gap in gaps_ms:
        now += int(gap * MS)
        intervals.observe(now)
    return intervals


def view(intervals: Intervals, **changes: object) -> LaneView:
    """One request waiting since 0, an idle worker, the cost of a launch-bound GPU."""
    fields: dict[str, object] = {
        "waiting": 1,
        "oldest_arrival_ns": 0,
        "last_arrival_ns": 0,
        "arrivals_sum_ns": 0,
        "tightest_deadline_ns": None,
        "max_batch": 32,
        "other_idle": False,
        "cost": GPU,
        "intervals": intervals,
    }
    return LaneView(**(fields | changes))  # type: ignore[arg-type]


STEADY = seen(*[1.0] * 40)
SPARSE = seen(*[500.0] * 40)
PULSES = seen(*[1.0, 1.0, 800.0] * 20)
CAP = 100 * MS
ADAPTIVE = adaptive(cap_ns=CAP)


@pytest.mark.parametrize(
    ("window", "seen_by_it", "now_ns", "says"),
    [
        (greedy, view(STEADY), 0, Launch("greedy")),
        (greedy, view(STEADY, waiting=32), 0, Launch("full")),
        (fixed(wait_ns=5 * MS), view(STEADY), 0, Wait(5 * MS, "fixed_window")),
        (fixed(wait_ns=5 * MS), view(STEADY, last_arrival_ns=4 * MS), 4 * MS, Wait(5 * MS, "fixed_window")),
        (fixed(wait_ns=5 * MS), view(STEADY), 5 * MS, Launch("window_over")),
        (fixed(wait_ns=5 * MS), view(STEADY, waiting=32), 0, Launch("full")),
        (p95(), view(seen(*[1.0] * 15)), 0, Launch("too_few_intervals")),
        (p95(), view(seen(*[1.0] * 16)), 0, Wait(int(1.5 * MS), "p95_window")),
        (p95(), view(PULSES), 0, Wait(1200 * MS, "p95_window")),
        (p95(), view(seen(*[3_600_000.0] * 20)), 0, Wait(10_000 * MS, "p95_window")),
        (p95_clamped(cap_ns=CAP), view(PULSES), 0, Wait(CAP, "p95_window")),
        (p95_clamped(cap_ns=CAP), view(PULSES), CAP, Launch("window_over")),
        (ADAPTIVE, view(STEADY), 0, Wait(int(1.5 * MS), "adaptive_window")),
        (ADAPTIVE, view(STEADY, last_arrival_ns=MS, waiting=2), MS, Wait(int(2.5 * MS), "adaptive_window")),
        (ADAPTIVE, view(STEADY), 2 * MS, Launch("window_over")),
        (ADAPTIVE, view(STEADY, waiting=32), 0, Launch("full")),
        (ADAPTIVE, view(seen(*[1.0] * 15)), 0, Launch("too_few_intervals")),
        (ADAPTIVE, view(SPARSE), 0, Launch("only_idle_gaps")),
        (ADAPTIVE, view(seen(*[0.2] * 40)), 0, Launch("window_too_short")),
        (ADAPTIVE, view(STEADY, cost=Cost(2_000, 0, 0, known=True)), 0, Launch("only_idle_gaps")),
        (ADAPTIVE, view(STEADY, cost=Cost()), 0, Launch("only_idle_gaps")),
        (ADAPTIVE, view(seen(*[7.0] * 40), waiting=4), 0, Launch("waiting_does_not_pay")),
        (ADAPTIVE, view(STEADY, tightest_deadline_ns=5 * MS), 0, Launch("only_idle_gaps")),
    ],
)
def test_windows(window: object, seen_by_it: LaneView, now_ns: int, says: Launch | Wait) -> None:
    assert window(seen_by_it, now_ns) == says  # type: ignore[operator]


def test_the_timer_of_a_fixed_window_starts_at_the_oldest_and_is_never_extended() -> None:
    window = fixed(wait_ns=100 * MS)
    assert window(view(STEADY, waiting=2, last_arrival_ns=60 * MS), 60 * MS) == Wait(100 * MS, "fixed_window")


gaps = st.lists(st.integers(0, 10**13), max_size=200)
costs = st.builds(Cost, st.floats(0, 1e12), st.floats(0, 1e9), st.floats(0, 1e11), st.booleans())


@settings(max_examples=200, deadline=None)
@given(
    gaps,
    costs,
    st.integers(1, 40),
    st.integers(0, 10**12),
    st.none() | st.integers(0, 10**12),
    st.booleans(),
    st.sampled_from(sorted(MAKERS)),
)
def test_a_window_is_never_longer_than_its_limit_and_never_lies_in_the_past(
    gap_list: list[int], cost: Cost, waiting: int, age_ns: int, deadline_ns: int | None, other_idle: bool, name: str
) -> None:
    intervals = Intervals()
    at = 0
    for gap in [0, *gap_list]:
        at += gap
        intervals.observe(at)
    oldest, now = at - age_ns, at
    lane = view(
        intervals,
        waiting=waiting,
        oldest_arrival_ns=oldest,
        last_arrival_ns=now,
        cost=cost,
        other_idle=other_idle,
        tightest_deadline_ns=None if deadline_ns is None else now + deadline_ns,
    )
    answer = make(name, WindowSettings(cap_ns=CAP, fixed_ns=5 * MS)).window(lane, now)
    if isinstance(answer, Wait):
        limit = {"fixed": 5 * MS, "p95": 10_000 * MS}.get(name, CAP)
        assert now < answer.until_ns <= oldest + limit
        assert math.isfinite(answer.until_ns)
        assert waiting < 32
        if deadline_ns is not None and name in ("adaptive", "efficiency"):
            assert answer.until_ns <= now + deadline_ns


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=400))
def test_intervals_agree_with_a_plain_list(gap_list: list[int]) -> None:
    intervals, at = Intervals(), 5
    intervals.observe(at)
    for gap in gap_list:
        at += gap
        intervals.observe(at)
    kept = sorted(gap_list[-KEPT:])
    limit = kept[len(kept) // 2]
    assert len(intervals) == len(kept)
    assert intervals.total_ns == sum(kept)
    assert intervals.count_upto(limit) == sum(gap <= limit for gap in kept)
    assert intervals.sum_upto(limit) == sum(gap for gap in kept if gap <= limit)
    assert intervals.p95_ns(None) == kept[math.ceil(0.95 * len(kept)) - 1]


def test_a_clock_that_steps_back_counts_as_no_time() -> None:
    intervals = Intervals()
    for at in (10, 20, 15, 30):
        intervals.observe(at)
    assert (len(intervals), intervals.total_ns, intervals.p95_ns(None)) == (3, 25, 15)


def arrival(**changes: object) -> Arrival:
    fields: dict[str, object] = {"rid": 1, "client": 1, "model": "m", "kind": "k", "tokens": 10}
    return Submit(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sooner", "later"),
    [
        ((arrival(), 0), (arrival(), 1)),
        ((arrival(priority=-1), 5), (arrival(), 0)),
        ((arrival(), 0), (arrival(priority=-1), PRIORITY_STEP_NS + 1)),
        ((arrival(deadline_ns=50 * MS), 5), (arrival(), 0)),
        ((arrival(deadline_ns=50 * MS), 0), (arrival(deadline_ns=60 * MS), 0)),
        ((arrival(), 0), (arrival(deadline_ns=3 * PATIENCE_NS), 0 + 1)),
        ((arrival(priority=10), 0), (arrival(priority=-10), PATIENCE_NS + 20 * PRIORITY_STEP_NS + 1)),
    ],
)
def test_who_is_due_first(sooner: tuple[Arrival, int], later: tuple[Arrival, int]) -> None:
    assert due_time(*sooner) < due_time(*later)


def door(**changes: object) -> DoorView:
    fields: dict[str, object] = {"waiting": 0, "waiting_tokens": 0, "workers": 1, "max_batch": 8, "cost": GPU}
    return cast(DoorView, SimpleNamespace(**(fields | changes)))


ADMIT = bounded(queue_max=100, queue_tokens_max=1000)


@pytest.mark.parametrize(
    ("who", "at_the_door", "code"),
    [
        (arrival(), door(), None),
        (arrival(), door(waiting=99), None),
        (arrival(), door(waiting=100), "queue_full"),
        (arrival(tokens=5000), door(), None),
        (arrival(tokens=501), door(waiting=1, waiting_tokens=500), "queue_full"),
        (arrival(tokens=500), door(waiting=1, waiting_tokens=500), None),
        (arrival(deadline_ns=0), door(), "deadline_exceeded"),
        (arrival(deadline_ns=MS), door(waiting=80), "deadline_unreachable"),
        (arrival(deadline_ns=1000 * MS), door(waiting=80), None),
        (arrival(deadline_ns=MS), door(waiting=80, cost=Cost()), None),
        (arrival(deadline_ns=MS), door(waiting=80, workers=0), None),
    ],
)
def test_the_door(who: Arrival, at_the_door: DoorView, code: str | None) -> None:
    refusal = ADMIT(who, at_the_door, 0)
    assert (refusal.code if refusal else None) == code


def test_the_retry_hint_grows_with_the_queue_and_is_bounded() -> None:
    hints = [retry_after_ms(door(waiting=waiting)) for waiting in (0, 1_000, 10_000, 10**9)]
    assert hints == sorted(hints)
    assert hints[0] == 20
    assert hints[-1] == 30_000


@pytest.mark.parametrize(
    ("seats", "chosen"),
    [
        ([Seat(1, 0, 0, 5)], 0),
        ([Seat(1, 3, 0, 1), Seat(2, 1, 0, 2)], 1),
        ([Seat(1, 0, 2, 1), Seat(2, 9, 0, 2)], 1),
        ([Seat(1, 0, 0, 7), Seat(2, 0, 0, 3)], 1),
        ([Seat(1, 0, 0, 3), Seat(2, 0, 0, 3)], 0),
    ],
)
def test_where(seats: list[Seat], chosen: int) -> None:
    assert least_loaded(seats, GPU) == chosen
