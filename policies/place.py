"""Where: the worker with the least running, one that failed last, and among equals the one unused for longest.

With late binding a batch is only placed on a worker that can take it now, so the least predicted finish is the least
running. A worker whose last batches failed is tried when no other is free.
"""

from headway.policies.views import Cost, Seat


def least_loaded(seats: list[Seat], cost: Cost) -> int:
    """Index of the seat with the fewest failures in a row, then the fewest running requests, then longest unused."""
    del cost
    if len(seats) == 1:
        return 0
    return min(range(len(seats)), key=lambda i: (seats[i].failures, seats[i].running, seats[i].last_used))
