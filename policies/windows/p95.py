"""The rule, literally: wait 1.5 x P95 of the observed arrival intervals after the oldest arrival.

Documented as what it is. It is scale-free (under Poisson arrivals it always collects about 5.5 requests, whatever that
costs in time), it takes idle gaps for intervals as soon as pulses are shorter than 20 requests, and with fewer than 20
closed-loop clients it feeds on the waiting that it causes and grows without bound. Hence the ceiling of 10 s, so that
it can be tried at all. `p95_clamped` is the same with the operator's ceiling. Use `adaptive` to serve.
"""

from headway.policies.views import LaneView, Launch, Wait, Window

MULTIPLIER = 1.5
SEEN_MIN = 16  # intervals; with fewer a percentile says nothing
LITERAL_CAP_NS = 10_000_000_000


def rule_ns(view: LaneView) -> float | None:
    """1.5 x P95 over all kept intervals, or None while there are too few."""
    if len(view.intervals) < SEEN_MIN:
        return None
    p95_ns = view.intervals.p95_ns(None)
    return None if p95_ns is None else MULTIPLIER * p95_ns


def p95(*, cap_ns: int = LITERAL_CAP_NS) -> Window:
    """The literal rule, at most `cap_ns`."""

    def window(view: LaneView, now_ns: int) -> Launch | Wait:
        if view.waiting >= view.max_batch:
            return Launch("full")
        wanted = rule_ns(view)
        if wanted is None:
            return Launch("too_few_intervals")
        until = view.oldest_arrival_ns + int(min(wanted, cap_ns))
        return Launch("window_over") if now_ns >= until else Wait(until, "p95_window")

    return window


def p95_clamped(*, cap_ns: int) -> Window:
    """The literal rule under the operator's ceiling."""
    return p95(cap_ns=cap_ns)
