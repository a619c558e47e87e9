"""The policies as tables: what they see, what they say. Pure functions, so each case is one line."""

import math
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policies.admit import bounded, retry_after_ms
from headway.policies.intervals import KEPT, Intervals
from headway.policies.order import PATIENCE_NS, PRIORITY_STEP_NS, due_time
from headway.policies.place import least_loaded
from headway.policies.views import Arrival, Cost, DoorView, LaneView, Launch, Placed, Seat, Wait, Window
from headway.policies.windows import (
    MAKERS,
    WindowSettings,
    adaptive,
    aimd,
    fixed,
    greedy,
    make,
    optimal_stopping,
    p95,
    p95_clamped,
    ski_rental,
)
from headway.policies.windows.optimal_stopping import best_stop_ns
from headway.scheduler.events import Submit
from headway.scheduler.held import HeldWindow

MS = 1_000_000
GPU = Cost(8 * MS, 1_000, 50_000, known=True)


def seen_ns(*gap_list: int) -> Intervals:
    """Intervals of these lengths."""
    intervals = Intervals()
    for now in accumulate(gap_list, initial=0):
        intervals.observe(now)
    return intervals


def seen(*gaps_ms: float) -> Intervals:
    return seen_ns(*[int(gap * MS) for gap in gaps_ms])


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
SKI = ski_rental(cap_ns=CAP)
STOPPING = optimal_stopping(cap_ns=CAP)
PAIRS = seen(*[2.0, 300.0] * 20)  # somebody comes 2 ms later, or nobody for long
FREE = Cost(8 * MS, 0, 0, known=True)


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
        # together as long as a batch costs: 8 ms for one, 4 each for two that came at once; at the very moment, launch
        (SKI, view(SPARSE), 0, Wait(8 * MS, "ski_rental_window")),
        (SKI, view(SPARSE), 8 * MS - 1, Wait(8 * MS, "ski_rental_window")),
        (SKI, view(SPARSE), 8 * MS, Launch("break_even")),
        (SKI, view(SPARSE, waiting=2), 0, Wait(4 * MS, "ski_rental_window")),
        (SKI, view(SPARSE, waiting=2, arrivals_sum_ns=6 * MS), 6 * MS, Wait(7 * MS, "ski_rental_window")),
        (SKI, view(SPARSE, waiting=3, arrivals_sum_ns=5), 0, Wait(2_666_669, "ski_rental_window")),
        (SKI, view(SPARSE, waiting=8), 0, Wait(MS, "ski_rental_window")),
        (SKI, view(SPARSE, waiting=9), 0, Launch("window_too_short")),
        (SKI, view(SPARSE, cost=Cost()), 0, Launch("window_too_short")),
        (SKI, view(SPARSE, cost=Cost(1000 * MS, 0, 0, known=True)), 0, Wait(CAP, "ski_rental_window")),
        (SKI, view(SPARSE, cost=Cost(1000 * MS, 0, 0, known=True)), CAP, Launch("window_over")),
        (SKI, view(SPARSE, waiting=32), 0, Launch("full")),
        # half of the intervals are 2 ms: 0.5 x 12 saved, 2 x 2/2 waited with, 2/2 in vain; with two waiting 6, 3 and 2
        (STOPPING, view(PAIRS, cost=FREE), 0, Wait(2 * MS, "optimal_stopping_window")),
        (STOPPING, view(PAIRS, cost=FREE), 2 * MS - 1, Wait(2 * MS, "optimal_stopping_window")),
        (STOPPING, view(PAIRS, cost=FREE), 2 * MS, Launch("waiting_does_not_pay")),
        (STOPPING, view(PAIRS, cost=FREE, waiting=2), 0, Wait(2 * MS, "optimal_stopping_window")),
        (STOPPING, view(PAIRS, cost=FREE, waiting=3), 0, Launch("waiting_does_not_pay")),
        # somebody comes for certain: 12 saved, 2 x 8 waited; 2 x 6 is a tie; with another worker idle 4 saved, 4 waited
        (STOPPING, view(seen(*[8.0] * 40), cost=FREE), 0, Launch("waiting_does_not_pay")),
        (STOPPING, view(seen(*[6.0] * 40), cost=FREE), 0, Launch("waiting_does_not_pay")),
        (STOPPING, view(seen(*[5.9] * 40), cost=FREE), 0, Wait(5_900_000, "optimal_stopping_window")),
        (STOPPING, view(seen(*[4.0] * 40), cost=FREE, other_idle=True), 0, Launch("waiting_does_not_pay")),
        (STOPPING, view(seen(*[3.9] * 40), cost=FREE, other_idle=True), 0, Wait(3_900_000, "optimal_stopping_window")),
        (STOPPING, view(seen(*[1.0, 3.0] * 20), cost=FREE), 0, Wait(3 * MS, "optimal_stopping_window")),
        (STOPPING, view(SPARSE), 0, Launch("waiting_does_not_pay")),
        (STOPPING, view(seen(*[0.5] * 40)), 0, Launch("window_too_short")),
        (STOPPING, view(STEADY), 0, Wait(MS, "optimal_stopping_window")),
        (STOPPING, view(STEADY, tightest_deadline_ns=MS), 0, Launch("waiting_does_not_pay")),
        (STOPPING, view(STEADY, cost=Cost()), 0, Launch("waiting_does_not_pay")),
        (STOPPING, view(STEADY, waiting=32), 0, Launch("full")),
        (STOPPING, view(seen(*[1.0] * 15)), 0, Launch("too_few_intervals")),
        (aimd(target_ns=50 * MS), view(STEADY), 0, Launch("aimd", 1)),
        (aimd(target_ns=50 * MS), view(STEADY, waiting=32), 0, Launch("aimd", 1)),
        (aimd(target_ns=50 * MS), view(STEADY, waiting=32, max_batch=1), 0, Launch("full", 1)),
    ],
)
def test_windows(window: object, seen_by_it: LaneView, now_ns: int, says: Launch | Wait) -> None:
    assert window(seen_by_it, now_ns) == says  # type: ignore[operator]


def test_the_timer_of_a_fixed_window_starts_at_the_oldest_and_is_never_extended() -> None:
    window = fixed(wait_ns=100 * MS)
    assert window(view(STEADY, waiting=2, last_arrival_ns=60 * MS), 60 * MS) == Wait(100 * MS, "fixed_window")


@pytest.mark.parametrize(
    ("batches", "size"),
    [
        ([], 1),
        ([(99, 10)] * 9, 10),
        ([(1, 10), (2, 10), (2, 10)], 3),  # a batch below the size shows nothing
        ([(1, 50)], 2),  # at the target is not over it
        ([(1, 50.1)], 1),
        ([(99, 10)] * 19 + [(20, 51)], 18),
        ([(99, 10)] * 9 + [(1, 51)], 9),  # by one at least, whatever the batch's size
        ([(99, 51)] * 40, 1),
        ([(5000, 1)] * 5000, 4096),
    ],
)
def test_aimd_rises_by_one_and_falls_by_a_tenth(batches: list[tuple[int, float]], size: int) -> None:
    window = aimd(target_ns=50 * MS)
    for requests, took_ms in batches:
        window.observe(requests, int(took_ms * MS))
    assert window.size == size
    assert window(view(STEADY, waiting=7), 0) == Launch("aimd", size)
    assert repr(window) == f"<Aimd at most {size}, towards 50 ms>"


def spent_by(window: Window, arrivals: list[int], cost: Cost) -> int:
    """Batches and waiting together, where a worker is always idle."""
    spent, since = 0, 0
    for index, now in enumerate(arrivals, 1):
        mine = arrivals[since:index]
        ages = {"oldest_arrival_ns": mine[0], "last_arrival_ns": now, "arrivals_sum_ns": sum(mine)}
        answer = window(view(SPARSE, waiting=len(mine), cost=cost, **ages), now)
        closes_ns = answer.until_ns if isinstance(answer, Wait) else now
        if index == len(arrivals) or closes_ns <= arrivals[index]:
            spent += int(cost.a_ns) + sum(closes_ns - at for at in mine)
            since = index
    return spent


def least(arrivals: list[int], cost_ns: int) -> int:
    """The same in hindsight: a batch is best closed when its last member comes."""
    best = [0]
    for end in range(1, len(arrivals) + 1):
        last = arrivals[end - 1]
        best.append(min(best[b] + cost_ns + sum(last - at for at in arrivals[b:end]) for b in range(end)))
    return best[-1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40 * MS), min_size=1, max_size=8), st.integers(8 * MS, 60 * MS))
def test_ski_rental_costs_at_most_twice_what_hindsight_does(gap_list: list[int], cost_ns: int) -> None:
    arrivals = list(accumulate(gap_list))
    spent = spent_by(ski_rental(cap_ns=10**12), arrivals, Cost(float(cost_ns), 0, 0, known=True))
    assert spent <= 2 * least(arrivals, cost_ns) + len(arrivals)  # a nanosecond each for rounding up


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40 * MS), min_size=16, max_size=60),
    st.integers(0, 20 * MS),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 100),
)
def test_optimal_stopping_finds_the_best_there_is(
    gap_list: list[int], passed: int, waiting: int, other_idle: bool, percent: int
) -> None:
    """The gain, worked out for a wait at a time from its definition: no wait is better than the one that is chosen."""
    lane = view(seen_ns(*gap_list), waiting=waiting, other_idle=other_idle, cost=GPU)
    alone, left = 0 if other_idle else 1, [gap for gap in gap_list if gap > passed]

    def gain(until: int) -> float:
        came = [gap for gap in left if gap <= until]
        saved = GPU.a_ns * (0.5 + alone) - waiting * GPU.m_ns
        longer = len(left) - len(came)
        cost = (waiting + alone) * sum(gap - passed for gap in came) + waiting * (until - passed) * longer
        return (len(came) * saved - cost) / len(left)

    best = best_stop_ns(lane, passed, 30 * MS, 0.5)
    anything = passed + percent * (30 * MS - passed) // 100
    if left:
        assert (gain(best) if best else 0.0) >= gain(anything) - 1e-3
    if best:
        assert passed < best <= 30 * MS
        assert gain(best) > 0


gaps = st.lists(st.integers(0, 10**13), max_size=200)
costs = st.builds(Cost, st.floats(0, 1e12), st.floats(0, 1e9), st.floats(0, 1e11), st.booleans())


GIVEN = WindowSettings(cap_ns=CAP, fixed_ns=5 * MS, target_ns=50 * MS)


@settings(max_examples=400, deadline=None)
@given(
    gaps,
    costs,
    st.integers(1, 40),
    st.integers(0, 10**12),
    st.none() | st.integers(0, 10**12),
    st.booleans(),
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**12)), max_size=20),
)
def test_laws_of_all_windows(
    gap_list: list[int],
    cost: Cost,
    waiting: int,
    age_ns: int,
    deadline_ns: int | None,
    other_idle: bool,
    name: str,
    batches: list[tuple[int, int]],
) -> None:
    """A full batch is launched; a wait is finite, lies ahead, and ends within the window's bound from the oldest."""
    intervals, now = seen_ns(*gap_list), sum(gap_list)
    oldest = now - age_ns
    lane = view(
        intervals,
        waiting=waiting,
        oldest_arrival_ns=oldest,
        last_arrival_ns=now,
        arrivals_sum_ns=oldest + (waiting - 1) * now,
        cost=cost,
        other_idle=other_idle,
        tightest_deadline_ns=None if deadline_ns is None else now + deadline_ns,
    )
    choice = make(name, GIVEN)
    for batch in batches:
        getattr(choice.window, "observe", lambda *_: None)(*batch)
    answer = choice.window(lane, now)
    assert choice.bound_ns == {"fixed": 5 * MS, "p95": 10_000 * MS}.get(name, CAP)
    assert choice.longest_ns(cost) <= choice.bound_ns
    if isinstance(answer, Launch):
        assert answer.most >= 0
        return
    assert waiting < 32
    assert type(answer.until_ns) is int
    assert now < answer.until_ns <= oldest + choice.bound_ns
    if deadline_ns is not None and name in ("adaptive", "efficiency", "optimal_stopping"):
        assert answer.until_ns <= now + deadline_ns
    held = HeldWindow(choice)
    assert held.ask(lane, 100, now).reason
    assert not held.faults


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
    assert intervals.above(limit) == [gap for gap in kept if gap > limit]
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
    fields |= {"rows_max": 0, "running": 0, "answer_mean": 0.0, "answer_least": 0.0}
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
        ([Seat(1, 0, 0, 5)], Placed(0, "only_one_free")),
        ([Seat(1, 3, 0, 1), Seat(2, 1, 0, 2)], Placed(1, "least_running")),
        ([Seat(1, 0, 2, 1), Seat(2, 9, 0, 2)], Placed(1, "others_failed")),
        ([Seat(1, 0, 0, 7), Seat(2, 0, 0, 3)], Placed(1, "longest_unused")),
        ([Seat(1, 0, 0, 3), Seat(2, 0, 0, 3)], Placed(0, "longest_unused")),
    ],
)
def test_where(seats: list[Seat], chosen: Placed) -> None:
    assert least_loaded(seats, GPU) == chosen
