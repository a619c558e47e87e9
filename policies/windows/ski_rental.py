"""Ski rental: wait until those who wait have together waited as long as a batch costs, then launch.

Waiting is renting: a nanosecond for each request that waits. A batch is buying: its learned fixed cost a. Launch when

    sum of the ages of those waiting >= a

Nothing is guessed about arrivals. Whatever comes, waiting and batches together cost at most twice what they would if
the future were known, and no deterministic rule can promise less. A single request waits at most a, the cost that it
may save; with n waiting the window closes after a / n, so nothing is opened once that is under GRAIN_NS.

The promise is for the worst case, and paid for in the usual one: it waits just as long when nobody can be expected.

Source: Karlin, Manasse, Rudolph and Sleator, Competitive snoopy caching, Algorithmica 1988 (break-even costs at most
twice the least); where all members of a batch wait: Dooly, Goldman and Scott, On-line analysis of the TCP
acknowledgment delay problem, J. ACM 2001.
"""

from headway.policies.views import LaneView, Launch, Wait, Window
from headway.policies.windows.adaptive import GRAIN_NS


def ski_rental(*, cap_ns: int) -> Window:
    """Break-even, and at most `cap_ns` after the oldest arrival."""

    def window(view: LaneView, now_ns: int) -> Launch | Wait:
        if view.waiting >= view.max_batch:
            return Launch("full")
        cost_ns = int(view.cost.a_ns)
        if cost_ns < view.waiting * GRAIN_NS:
            return Launch("window_too_short")
        even_ns = -(-(view.arrivals_sum_ns + cost_ns) // view.waiting)  # when the ages add up to the cost, rounded up
        if now_ns >= even_ns:
            return Launch("break_even")
        until = min(even_ns, view.oldest_arrival_ns + cap_ns)
        return Launch("window_over") if now_ns >= until else Wait(until, "ski_rental_window")

    return window
