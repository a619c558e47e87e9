"""Fixed: wait a set time from the oldest arrival, or until the batch is full. The classical timeout window.

The time starts at the oldest waiting request and is never extended by later ones. Right for one load and wrong at the
others: it is here because it is what everybody has, and to be compared with.
"""

from headway.policies.views import LaneView, Launch, Wait, Window


def fixed(*, wait_ns: int) -> Window:
    """A window of `wait_ns` after the oldest arrival."""

    def window(view: LaneView, now_ns: int) -> Launch | Wait:
        if view.waiting >= view.max_batch:
            return Launch("full")
        until = view.oldest_arrival_ns + wait_ns
        return Launch("window_over") if now_ns >= until else Wait(until, "fixed_window")

    return window
