"""A window held by the core: whatever it says, the core goes on, nobody waits too long, and it is counted."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policies.views import Cost, LaneView, Launch, Wait, WindowChoice
from headway.scheduler import actions as act
from headway.scheduler.held import REASONS_MAX, WINDOW_FAULT, HeldWindow
from tests.sim import MS, World
from tests.test_policies import STEADY, view

BOUND = 50 * MS
KNOWN = Cost(8 * MS, 0, 0, known=True)


def held(window: Any) -> HeldWindow:
    return HeldWindow(WindowChoice("mine", window, BOUND))


def saying(answer: Any) -> Callable[[LaneView, int], Any]:
    return lambda _view, _now_ns: answer


def raising(_view: LaneView, _now_ns: int) -> Launch:
    raise ValueError("no idea")


class Unspeakable(Exception):  # noqa: N818 - it is not said
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def unspeakable(_view: LaneView, _now_ns: int) -> Launch:
    raise Unspeakable


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (raising, "ValueError: no idea"),
        (unspeakable, "Unspeakable"),
        (saying(None), "NoneType, which is neither"),
        (saying(True), "bool, which is neither"),
        (saying((5, "x")), "tuple, which is neither"),
        (saying(Launch), "type, which is neither"),
        (saying(Wait(math.nan, "x")), "until_ns is nan"),  # type: ignore[arg-type]
        (saying(Wait(math.inf, "x")), "until_ns is inf"),  # type: ignore[arg-type]
        (saying(Wait("soon", "x")), "until_ns is 'soon'"),  # type: ignore[arg-type]
        (saying(Wait(5 * MS, "x")), "0 ns in the past"),
        (saying(Wait(-1, "x")), f"{5 * MS + 1} ns in the past"),
        (saying(Launch(None)), "reason is no text"),  # type: ignore[arg-type]
        (saying(Launch("")), "reason is no text"),
        (saying(Launch("x" * 65)), "reason is no text"),
        (saying(Launch("x", -1)), "most is -1"),
        (saying(Launch("x", 1.5)), "most is 1.5"),  # type: ignore[arg-type]
        (lambda: None, "TypeError"),
    ],
)
def test_nonsense_is_a_launch_and_is_counted(window: Any, says: str) -> None:
    asked = held(window)
    assert asked.ask(view(STEADY), 10, 5 * MS) is WINDOW_FAULT
    assert asked.effective_ns(view(STEADY), 5 * MS) == 0
    assert asked.faults == 1
    assert says in asked.fault
    assert repr(asked) == "<HeldWindow mine, 1 faults>"


def test_reasons_are_counters_and_so_not_any_number_of_them() -> None:
    answers = iter([Launch(f"after_{count}") for count in range(REASONS_MAX + 1)])
    asked = held(lambda _view, _now_ns: next(answers))
    assert [asked.ask(view(STEADY), 10, 0).reason for _ in range(REASONS_MAX)][-1] == f"after_{REASONS_MAX - 1}"
    assert asked.ask(view(STEADY), 10, 0) is WINDOW_FAULT
    assert "different reasons" in asked.fault


@pytest.mark.parametrize(
    ("until_ns", "deadline_ns", "cost", "now_ns", "says"),
    [
        (20 * MS, None, Cost(), 0, Wait(20 * MS, "x")),
        (50 * MS, None, Cost(), 0, Wait(50 * MS, "x")),
        (51 * MS, None, Cost(), 0, Wait(50 * MS, "x")),
        (1 << 70, None, Cost(), 49 * MS, Wait(50 * MS, "x")),
        (1 << 70, None, Cost(), 50 * MS, Launch("window_over")),
        (20 * MS, 40 * MS, Cost(), 0, Launch("cost_unknown")),
        (20 * MS, 40 * MS, KNOWN, 0, Wait(20 * MS, "x")),
        (20 * MS, 33 * MS, KNOWN, 0, Wait(20 * MS, "x")),  # 33 less 1.5 x 8 less 1
        (20 * MS, 32 * MS, KNOWN, 0, Wait(19 * MS, "x")),
        (20 * MS, 13 * MS, KNOWN, 0, Launch("deadline_near")),
        (20 * MS, 5 * MS, KNOWN, 0, Launch("deadline_near")),
    ],
)
def test_a_wait_ends_at_the_bound_and_before_the_deadline_is_in_danger(
    until_ns: int, deadline_ns: int | None, cost: Cost, now_ns: int, says: Launch | Wait
) -> None:
    lane = view(STEADY, tightest_deadline_ns=deadline_ns, cost=cost)
    assert held(saying(Wait(until_ns, "x"))).ask(lane, 10, now_ns) == says


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.integers(), st.floats(), st.none(), st.text()),
    st.none() | st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_whatever_it_says_is_bounded(until: Any, deadline_in: int | None, age_ns: int, now_ns: int) -> None:
    deadline_ns = None if deadline_in is None else now_ns + deadline_in
    lane = view(STEADY, oldest_arrival_ns=now_ns - age_ns, tightest_deadline_ns=deadline_ns, cost=KNOWN)
    answer = held(saying(Wait(until, "x"))).ask(lane, 10, now_ns)
    if isinstance(answer, Wait):
        assert now_ns < answer.until_ns <= lane.oldest_arrival_ns + BOUND
        assert deadline_ns is None or answer.until_ns + 1.5 * 8 * MS <= deadline_ns


class Counting:
    """A window that learns, and one day no more."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[tuple[int, int]] = []
        self.fails = fails

    def __call__(self, view: LaneView, now_ns: int) -> Launch:
        del view, now_ns
        return Launch("two_at_most", most=2)

    def observe(self, requests: int, compute_ns: int) -> None:
        self.seen.append((requests, compute_ns))
        if self.fails:
            raise KeyError("lost")


def test_a_window_that_learns_is_told_of_batches_and_can_make_them_smaller() -> None:
    window = Counting()
    world = World(0, window=window)
    world.join()
    for _ in range(5):
        world.submit()
    world.submit(tokens=5_000)  # a long input says nothing about batches
    world.run(200 * MS)
    assert [requests for requests, _ in window.seen] == [1, 2, 2]
    assert window.seen[0][1] == 8 * MS + 10 * 10_000
    assert len(world.endings) == 6


def test_a_window_that_cannot_learn_is_counted_and_nothing_else_happens() -> None:
    world = World(0, window=Counting(fails=True))
    world.join()
    for _ in range(3):
        world.submit()
    world.run(200 * MS)
    assert all(isinstance(ending, act.End) and not ending.code for ending in world.endings.values())
    window = world.core.services[("m", "k")].window
    assert (window.faults, window.fault) == (2, "KeyError: 'lost'")


@pytest.mark.parametrize("window", [raising, saying(None), saying(Wait(math.nan, "x"))])  # type: ignore[arg-type]
def test_the_core_goes_on_with_a_window_that_does_not(window: Any) -> None:
    world = World(3, window=window)
    world.join()
    for _ in range(20):
        world.run(world.now_ns + world.rng.randrange(20) * MS)
        world.submit()
    world.run(1_000 * MS)
    assert len(world.endings) == 20
    assert world.core.counters["launched.window_fault"] == world.core.counters["batches"] > 0


def test_a_window_that_never_ends_is_ended_by_its_bound() -> None:
    world = World(0, window=saying(Wait(1 << 61, "for ever")))
    world.join()
    world.beat()
    world.submit()
    world.run(9_999 * MS)
    assert not world.endings
    world.run(10_100 * MS)
    assert world.core.counters["launched.window_over"] == 1
