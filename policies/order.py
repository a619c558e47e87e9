"""Which next: priority, then earliest deadline, with ageing so that nothing starves.

All of it in one static number, a virtual due time. A request is due at its deadline or, without one, PATIENCE after it
arrived; a step of priority moves that by PRIORITY_STEP. The lowest due time goes first. Because the time of arrival is
in the key, waiting is ageing: nobody who arrives PATIENCE plus 20 steps later can ever overtake. A static key is what
keeps the queue a heap, so that a decision costs the same with 100 000 waiting as with 10.

Source: earliest deadline first (Liu and Layland, 1973), with priorities as offsets of the due time.
"""

from headway.policies.views import Arrival

PATIENCE_NS = 10_000_000_000  # a request without a deadline counts as due 10 s after it arrived
PRIORITY_STEP_NS = 1_000_000_000  # one step of priority is worth one second of waiting


def due_time(arrival: Arrival, arrived_ns: int) -> int:
    """The virtual due time in nanoseconds: lower goes first."""
    due = arrived_ns + PATIENCE_NS
    if arrival.deadline_ns is not None and arrival.deadline_ns < due:
        due = arrival.deadline_ns
    return due + arrival.priority * PRIORITY_STEP_NS
