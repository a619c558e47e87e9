"""Arrivals that fool an estimator of intervals: a slow start, idle gaps, bursts, a clock that stands, a change of rate.

Every window goes through each of them: it stays within its bound, it makes nobody late, and it forgets.
"""

from itertools import accumulate

import pytest

from headway.policies.intervals import KEPT, Intervals
from headway.policies.views import Cost, LaneView, Launch, Wait, Window
from headway.policies.windows import MAKERS, WindowSettings, make
from headway.scheduler import actions as act
from headway.scheduler.spec import WINDOW_KEYS
from tests.sim import MS, World
from tests.test_policies import view

GIVEN = WindowSettings(cap_ns=100 * MS, fixed_ns=5 * MS, target_ns=50 * MS)
STEADY = [50] * 60  # 20 a second

ARRIVALS = {  # milliseconds between them
    "a gap of ten minutes after three": [0, 5, 5, 600_000, *STEADY],
    "a hundred in one millisecond": [0] * 100,
    "only one ever": [0],
    "two": [0, 7],
    "a clock that repeats its ticks": [0, 0, 0, 15, 0, 0, 0, 0, 15] * 10,
    "from a hundred a second to one": [10] * 150 + [1000] * 30,
    "from one a second to a hundred": [1000] * 20 + [10] * 150,
}


class Watched:
    """A window, and how long after the oldest arrival each of its waits would end."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.observe = getattr(window, "observe", lambda *_: None)
        self.waits_ns: list[int] = []

    def __call__(self, view: LaneView, now_ns: int) -> Launch | Wait:
        answer = self.window(view, now_ns)
        if isinstance(answer, Wait):
            self.waits_ns.append(answer.until_ns - view.oldest_arrival_ns)
        return answer


def played(window: str, gaps_ms: list[int], deadline_ms: int | None = None) -> Watched:
    """One worker, and these arrivals; every answer was good. Not audited at every step: ten minutes have many."""
    watched = Watched(make(window, GIVEN).window)
    world = World(0, window=watched, check=False)
    world.join(max_batch=32)
    world.beat()
    for at_ms in accumulate(gaps_ms):
        world.run(at_ms * MS)
        world.submit(deadline_ns=None if deadline_ms is None else world.now_ns + deadline_ms * MS)
    world.run(world.now_ns + 12_000 * MS)
    world.core.audit()
    assert len(world.endings) == len(gaps_ms)
    assert all(isinstance(ending, act.End) and not ending.code for ending in world.endings.values())
    assert world.core.services[("m", "k")].window.faults == 0
    return watched


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("window", MAKERS)
def test_a_window_stays_within_its_bound_whatever_comes(window: str, arrivals: str) -> None:
    waits_ns = played(window, ARRIVALS[arrivals]).waits_ns
    assert all(0 < wait <= make(window, GIVEN).bound_ns for wait in waits_ns)
    assert not waits_ns or window not in ("greedy", "aimd")


@pytest.mark.parametrize("window", MAKERS)
def test_nobody_misses_a_deadline_for_waiting(window: str) -> None:
    """One in 50 ms, with 60 ms each: the literal rule would wait 75."""
    played(window, [50] * 200, deadline_ms=60)


@pytest.mark.parametrize("window", ["adaptive", "efficiency", "optimal_stopping"])
def test_an_idle_gap_is_no_interval(window: str) -> None:
    """One of ten minutes among many of 2 ms changes nothing; the literal rule follows as soon as 1 in 20 is one."""
    cost = Cost(8 * MS, 0, 0, known=True)

    def says(gaps_ms: list[int], name: str = window) -> Launch | Wait:
        intervals = Intervals()
        for at_ms in accumulate(gaps_ms, initial=0):
            intervals.observe(at_ms * MS)
        return make(name, GIVEN).window(view(intervals, cost=cost), 0)

    assert says([2] * 20 + [600_000] + [2] * 20) == says([2] * 41)
    assert says([2] * 20, "p95") == Wait(3 * MS, "p95_window")
    assert says([2] * 18 + [600_000] * 2, "p95") == Wait(10_000 * MS, "p95_window")


@pytest.mark.parametrize("window", sorted(set(MAKERS) - {"aimd"}))  # which learns from batches, not from arrivals
def test_the_past_is_forgotten_after_as_many_requests_as_are_kept(window: str) -> None:
    fresh, old = Intervals(), Intervals()
    for at_ms in accumulate([0, 1, 600_000] + [1] * 300 + [4000] * 3):
        old.observe(at_ms * MS)
    since = 600_301 + 12_000
    fresh.observe(since * MS)
    for count in range(1, KEPT + 1):
        fresh.observe((since + 5 * count) * MS)
        old.observe((since + 5 * count) * MS)
    assert make(window, GIVEN).window(view(old), 0) == make(window, GIVEN).window(view(fresh), 0)


def test_after_a_fall_of_the_rate_nobody_waits_in_vain_for_long() -> None:
    """From 500 a second, where waiting pays, to two: when three quarters of what is kept are new, it waits no more."""
    intervals, now = Intervals(), 0
    window = make("adaptive", GIVEN).window
    for _ in range(300):
        now += 2 * MS
        intervals.observe(now)
    assert window(view(intervals), 0) == Wait(3 * MS, "adaptive_window")
    said = []
    for _ in range(KEPT):
        now += 500 * MS
        intervals.observe(now)
        said.append(type(window(view(intervals), 0)))
    assert Wait not in said[KEPT * 3 // 4 :]


def test_every_time_that_an_operator_sets_says_its_unit() -> None:
    assert all(key.endswith("_ms") for key in WINDOW_KEYS if key != "window")
