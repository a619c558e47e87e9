"""Stories: what happens and what the core does about it, as text a person reads. `--rewrite` writes them anew; the
difference is what a reviewer reads. Times are milliseconds of virtual time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.policies.windows import adaptive, aimd, fixed, ski_rental
from headway.scheduler import events as ev
from headway.scheduler.latency import CostModel
from headway.scheduler.lifecycle import MOVES, WORKER_MOVES, IllegalMoveError, move
from tests.sim import MS, World

STORIES = Path(__file__).parent / "stories"


def late_binding_makes_one_batch_of_those_who_came_while_the_worker_was_busy() -> World:
    world = World(0)
    world.join()
    for _ in range(5):
        world.submit()
        world.run(world.now_ns + MS)
    world.run(40 * MS)
    return world


def a_burst_noticed_together_is_one_batch() -> World:
    world = World(0)
    world.join()
    requests = [ev.Submit(rid, 1, "m", "k", 10) for rid in range(1, 5)]
    world.asked.update({request.rid: request for request in requests})
    world.step(ev.Together(list(requests)))
    world.run(20 * MS)
    return world


def a_fixed_window_of_100_ms_and_a_batch_of_four() -> World:
    """Idle, then four spaced 5 ms; one alone; four at once; three spaced 60 ms: batches of 4, 1, 4 at once, 2 and 1."""
    world = World(0, window=fixed(wait_ns=100 * MS))
    world.join(max_batch=4)
    world.beat()
    for start, gaps in ((1_000, (0, 5, 5, 5)), (2_000, (0,)), (3_000, (0, 0, 0, 0)), (4_000, (0, 60, 60))):
        world.run(start * MS)
        for gap in gaps:
            world.run(world.now_ns + gap * MS)
            world.submit()
    world.run(4_500 * MS)
    world.log = [line for line in world.log if "Beat" not in line]
    return world


def ski_rental_launches_when_those_who_wait_have_waited_as_long_as_a_batch_costs() -> World:
    """8 ms: one alone for 8 ms; two that came 2 ms apart after 2 + 3 + 3."""
    world = World(0, window=ski_rental(cap_ns=100 * MS))
    world.join()
    world.core.services[("m", "k")].learned = CostModel((8.0 * MS, 0.0, 0.0))
    world.submit()
    world.run(40 * MS)
    world.submit()
    world.run(42 * MS)
    world.submit()
    world.run(80 * MS)
    return world


def aimd_takes_one_more_after_each_batch_in_time_and_fewer_after_a_slow_one() -> World:
    """Batches of 1 and 2 take about 8 ms, the one of 3 takes over the target of 10: then 2 again, and 3."""
    world = World(0, window=aimd(target_ns=10 * MS))
    world.join()
    for tokens in [10] * 3 + [80] * 3 + [10] * 5:
        world.submit(tokens=tokens)
    world.run(80 * MS)
    return world


def a_deadline_closes_the_window_before_it_is_missed() -> World:
    world = World(0, window=fixed(wait_ns=100 * MS))
    world.join()
    world.submit(deadline_ns=60 * MS)
    world.run(120 * MS)
    return world


def a_waiting_request_is_told_on_time_and_never_reaches_the_worker() -> World:
    world = World(0)
    world.join(max_batch=1)
    world.submit(tokens=100_000)
    world.submit(deadline_ns=500 * MS)
    world.submit()
    world.run(2_000 * MS)
    return world


def a_lost_worker_gives_its_requests_back_and_its_late_answer_says_nothing() -> World:
    world = World(0)
    first = world.join()
    world.submit()
    world.submit(tokens=20)
    world.lose(first)
    world.step(ev.BatchDone(first, 1, 8 * MS, 10))
    world.join()
    world.run(60 * MS)
    return world


def a_long_input_goes_alone_and_at_once_but_takes_one_worker_only() -> World:
    world = World(0)
    world.join()
    world.join()
    for tokens in (2_000, 2_000, 10, 10):
        world.submit(tokens=tokens)
    world.run(80 * MS)
    return world


def a_long_input_does_not_take_the_last_worker_from_one_that_waits_for_its_window() -> World:
    world = World(0, window=fixed(wait_ns=20 * MS))
    world.join()
    world.submit()
    world.run(5 * MS)
    world.submit(tokens=2_000)
    world.run(80 * MS)
    return world


def an_answer_found_complete_just_as_its_worker_dies_is_complete() -> World:
    world = World(0)
    number = world.join(iteration=True)
    world.submit(max_new=50)
    world.run(12 * MS)
    world.step(ev.Together([ev.WorkerLost(number, "killed"), ev.Satisfied(1)]))
    return world


def requests_join_a_running_engine_and_leave_it() -> World:
    world = World(0, window=adaptive(cap_ns=100 * MS))
    world.join(iteration=True, max_num_seqs=4)
    world.submit(max_new=3)
    world.run(7 * MS)
    for _ in range(3):
        world.submit(max_new=2)
    world.step(ev.Cancel(2))
    world.run(60 * MS)
    return world


def draining_finishes_what_is_here_and_refuses_what_comes() -> World:
    world = World(0)
    world.join(max_batch=1)
    world.submit()
    world.submit()
    world.step(ev.Drain(1_000 * MS))
    world.submit()
    world.run(100 * MS)
    return world


def a_drain_that_takes_too_long_ends_everything() -> World:
    world = World(0)
    world.join(max_batch=1)
    world.submit(tokens=1_000_000)
    world.submit()
    world.step(ev.Drain(50 * MS))
    world.run(100 * MS)
    return world


def what_a_drain_ends_is_not_dispatched_first() -> World:
    world = World(0)
    world.submit()
    world.step(ev.Drain(50 * MS))
    world.now_ns = 700 * MS  # the shell itself stood still
    world.join()
    return world


def a_clock_that_steps_back_stands_still() -> World:
    world = World(0, window=fixed(wait_ns=10 * MS))
    world.join()
    world.run(100 * MS)
    world.submit()
    world.now_ns = 20 * MS
    world.submit(deadline_ns=90 * MS)
    world.submit()
    world.run(150 * MS)
    return world


def who_waited_for_a_worker_joins_where_its_cache_has_room() -> World:
    """A cache of 300 tokens: one alone may need more, two together may not."""
    world = World(0)
    for tokens in (400, 100, 100, 100):
        world.submit(tokens=tokens, max_new=2)
    world.join(iteration=True, kv_tokens=300)
    world.run(60 * MS)
    return world


def nobody_waits_for_ever_for_a_worker() -> World:
    world = World(0)
    world.submit()
    world.run(11_000 * MS)
    world.submit()
    return world


def a_silent_worker_is_given_up() -> World:
    world = World(0)
    world.join(iteration=True)
    world.machines.clear()
    world.core.step(ev.Tick(), 0)
    world.run(6_000 * MS)
    return world


ALL: tuple[Callable[[], World], ...] = (
    late_binding_makes_one_batch_of_those_who_came_while_the_worker_was_busy,
    a_burst_noticed_together_is_one_batch,
    a_fixed_window_of_100_ms_and_a_batch_of_four,
    ski_rental_launches_when_those_who_wait_have_waited_as_long_as_a_batch_costs,
    aimd_takes_one_more_after_each_batch_in_time_and_fewer_after_a_slow_one,
    a_deadline_closes_the_window_before_it_is_missed,
    a_waiting_request_is_told_on_time_and_never_reaches_the_worker,
    a_lost_worker_gives_its_requests_back_and_its_late_answer_says_nothing,
    a_long_input_goes_alone_and_at_once_but_takes_one_worker_only,
    a_long_input_does_not_take_the_last_worker_from_one_that_waits_for_its_window,
    an_answer_found_complete_just_as_its_worker_dies_is_complete,
    requests_join_a_running_engine_and_leave_it,
    draining_finishes_what_is_here_and_refuses_what_comes,
    a_drain_that_takes_too_long_ends_everything,
    what_a_drain_ends_is_not_dispatched_first,
    a_clock_that_steps_back_stands_still,
    who_waited_for_a_worker_joins_where_its_cache_has_room,
    nobody_waits_for_ever_for_a_worker,
    a_silent_worker_is_given_up,
)


@pytest.mark.parametrize("story", ALL, ids=lambda story: story.__name__)
def test_story(story: Callable[[], World], rewrite: bool) -> None:
    told = "\n".join([story.__name__.replace("_", " "), "", *story().log]) + "\n"
    path = STORIES / f"{story.__name__}.txt"
    if rewrite:
        path.parent.mkdir(exist_ok=True)
        path.write_text(told)
    assert path.read_text() == told


@pytest.mark.parametrize("table", [MOVES, WORKER_MOVES], ids=["request", "worker"])
def test_only_the_moves_of_the_table_are_legal(table: dict[str, dict[str, str]]) -> None:
    events = {event for moves in table.values() for event in moves} | {"nonsense"}
    for state, moves in table.items():
        for event in events:
            if event in moves:
                assert move(state, event, table) == moves[event]
            else:
                with pytest.raises(IllegalMoveError):
                    move(state, event, table)


def test_an_unknown_event_is_refused() -> None:
    world = World(0)
    with pytest.raises(TypeError, match="not an event"):
        world.core.step("hello", 0)  # type: ignore[arg-type]


def test_a_repr_is_one_line_that_says_the_state() -> None:
    world = World(0)
    world.join(max_batch=1)
    world.submit()
    world.submit()
    assert repr(world.core) == "<Core 1 waiting, 1 running, 1 workers>"
