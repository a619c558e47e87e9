"""Optimal stopping: wait exactly as long as the observed intervals say that waiting for one more request pays.

The intervals between arrivals are taken for independent draws from one distribution (a renewal process), and the last
128 of them for that distribution. With x passed since the last arrival, n waiting, a and m the learned costs, and
s = a x (eta + [no other worker idle]) as in `adaptive`, waiting up to an interval of g is expected to gain

    G(g) = p x (s - n x m) - (n + [no other worker idle]) x e - n x (g - x) x (1 - p)
    p = share of the intervals over x that are at most g;  e = the mean of min(interval - x), over those, else 0

and the window closes where G is largest, if that is above zero. G is largest at one of the intervals. One more request
makes waiting dearer and saves no more, so looking one arrival ahead is all there is to look at (the monotone case).

An upper bound, here to be compared with: nothing that waits by the clock can do better if the estimate is right. On
real traffic, which changes, 128 intervals are a noisy estimate of a whole distribution, and G follows the noise;
`adaptive` uses one quantile of it and is no worse. With Poisson arrivals what has passed says nothing, and it waits to
the end of its bound or not at all.

Source: Chow, Robbins and Siegmund, Great Expectations: The Theory of Optimal Stopping, 1971 (the monotone case).
"""

from headway.policies.views import LaneView, Launch, Wait, Window
from headway.policies.windows.adaptive import GRAIN_NS, longest_ns
from headway.policies.windows.p95 import SEEN_MIN


def best_stop_ns(view: LaneView, passed_ns: int, limit_ns: float, eta: float) -> int:
    """The interval up to which waiting gains most, at most `limit_ns` after the last arrival; 0 if none gains."""
    left = view.intervals.above(passed_ns)
    waiting, alone = view.waiting, 0 if view.other_idle else 1
    saved_ns = view.cost.a_ns * (eta + alone) - waiting * view.cost.m_ns
    best_ns, most, waited_ns = 0, 0.0, 0
    for count, gap in enumerate(left, 1):
        if gap > limit_ns:
            break
        waited_ns += gap - passed_ns
        chance = count / len(left)
        in_vain_ns = waiting * (gap - passed_ns) * (1 - chance)
        gain = chance * saved_ns - (waiting + alone) * waited_ns / len(left) - in_vain_ns
        if gain > most:
            best_ns, most = gap, gain
    return best_ns


def optimal_stopping(*, cap_ns: int, eta: float = 0.5) -> Window:
    """The rule, within the bounds of `adaptive`: at most the cap and the fixed cost of a batch after the oldest."""

    def window(view: LaneView, now_ns: int) -> Launch | Wait:
        if view.waiting >= view.max_batch:
            return Launch("full")
        if len(view.intervals) < SEEN_MIN:
            return Launch("too_few_intervals")
        limit_ns = view.oldest_arrival_ns + longest_ns(view, now_ns, cap_ns, 1.0) - view.last_arrival_ns
        best_ns = best_stop_ns(view, now_ns - view.last_arrival_ns, limit_ns, eta)
        if not best_ns:
            return Launch("waiting_does_not_pay")
        if best_ns < GRAIN_NS:
            return Launch("window_too_short")
        return Wait(view.last_arrival_ns + best_ns, "optimal_stopping_window")

    return window
