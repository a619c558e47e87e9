"""The one file that reads a clock.

Everything that decides takes `now_ns` as an argument, so that the same code runs live, in tests and under a virtual
clock. Shells call `now_ns()` once for each turn of their loop.
"""

import time

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def now_ns() -> int:
    """Monotonic time in nanoseconds; only differences mean anything."""
    return time.monotonic_ns()


def cpu_ns() -> int:
    """What this thread has computed, in nanoseconds: for measurements that others on the machine must not disturb."""
    return time.thread_time_ns()


def wall_s() -> float:
    """Seconds since the epoch, for records that a person reads; never for a decision."""
    return time.time()
