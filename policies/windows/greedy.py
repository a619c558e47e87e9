"""Greedy: never wait. With late binding this is work-conserving dynamic batching: batches grow by themselves while
the workers are busy, because whoever arrives meanwhile is taken together when one becomes free. It is the baseline
that every window has to beat, and what the adaptive window falls back to.
"""

from headway.policies.views import LaneView, Launch


def greedy(view: LaneView, now_ns: int) -> Launch:
    """Launch, always."""
    del now_ns
    return Launch("full" if view.waiting >= view.max_batch else "greedy")
