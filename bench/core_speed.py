"""How fast the core is, alone: steps per second, and what one decision costs with 10, 1 000 and 100 000 waiting.

    python -m headway.bench.core_speed

A decision is: a batch comes back, and the next one is closed and dispatched, at a full queue. The core has no I/O, so
this needs no server and no model. Sizes alternate in one run; medians are shown.
"""

import argparse
import gc
import statistics

from rich.console import Console
from rich.table import Table

from headway.policies.views import Policies
from headway.scheduler import actions as act
from headway.scheduler import clock
from headway.scheduler import events as ev
from headway.scheduler.chosen import policies_of
from headway.scheduler.core import Core
from headway.scheduler.spec import PolicySpec

SIZES = (10, 1_000, 100_000)
ROUNDS = 5
DECISIONS = 400


def _policies() -> Policies:
    return policies_of(PolicySpec(queue_max=1 << 20, queue_tokens_max=1 << 30))


def _core(max_batch: int) -> Core:
    core = Core(_policies())
    core.step(ev.WorkerReady(1, "w", "m", "call", False, max_batch, 1024), 0)
    return core


class Queue:
    """A core with `size` requests waiting, kept at that size."""

    def __init__(self, size: int) -> None:
        self.core = _core(max_batch=1)
        self.now_ns = 1
        self.rid = 0
        self.dispatch: act.Dispatch | None = None
        for _ in range(size + 1):
            self._submit()

    def _submit(self) -> None:
        self.rid += 1
        self.now_ns += 1000
        for action in self.core.step(ev.Submit(self.rid, 1, "m", "call", 8), self.now_ns):
            if isinstance(action, act.Dispatch):
                self.dispatch = action

    def decisions(self, count: int) -> float:
        """Seconds for `count` decisions; the queue is filled up again outside the measured time."""
        spent_ns = 0
        for _ in range(count):
            assert self.dispatch is not None
            self.now_ns += 1_000_000
            done = ev.BatchDone(1, self.dispatch.batch, 900_000, 8)
            begin = clock.now_ns()
            actions = self.core.step(done, self.now_ns)
            spent_ns += clock.now_ns() - begin
            self.dispatch = next(action for action in actions if isinstance(action, act.Dispatch))
            self._submit()
        return spent_ns / clock.NS_PER_S


def steps_per_second(requests: int = 50_000, in_flight: int = 256, max_batch: int = 32) -> float:
    """Closed loop at full speed: submits and batches that come back."""
    core = _core(max_batch)
    now_ns, rid, steps = 1, 0, 0
    dispatch: act.Dispatch | None = None
    begin = clock.now_ns()
    for _ in range(in_flight):
        rid += 1
        for action in core.step(ev.Submit(rid, 1, "m", "call", 8), now_ns):
            dispatch = action if isinstance(action, act.Dispatch) else dispatch
        steps += 1
    while rid < requests:
        assert dispatch is not None
        now_ns += 1_000_000
        ended = len(dispatch.rids)
        actions = core.step(ev.BatchDone(1, dispatch.batch, 900_000, 8 * ended), now_ns)
        dispatch = next(action for action in actions if isinstance(action, act.Dispatch))
        for _ in range(ended):
            rid += 1
            now_ns += 1000
            core.step(ev.Submit(rid, 1, "m", "call", 8), now_ns)
        steps += 1 + ended
    return steps * clock.NS_PER_S / (clock.now_ns() - begin)


def measure() -> tuple[dict[int, float], float]:
    """Median microseconds of a decision by queue length, and median steps per second."""
    queues = {size: Queue(size) for size in SIZES}
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        for size, queue in queues.items():
            found[size].append(queue.decisions(DECISIONS) / DECISIONS * 1e6)
    rates = [steps_per_second() for _ in range(3)]
    return {size: statistics.median(times) for size, times in found.items()}, statistics.median(rates)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m headway.bench.core_speed", description=__doc__).parse_args()
    show()


def show() -> None:
    """Measure, and print the table."""
    costs, rate = measure()
    table = Table(title="One decision of the core")
    table.add_column("waiting", justify="right")
    table.add_column("µs", justify="right")
    table.add_column(f"ratio to {SIZES[0]}", justify="right")
    for size, cost in costs.items():
        table.add_row(f"{size:,}", f"{cost:.1f}", f"{cost / costs[SIZES[0]]:.2f}")
    console = Console()
    console.print(table)
    console.print(f"steps per second, 256 in flight, batches of 32: {rate:,.0f}")


if __name__ == "__main__":
    main()
