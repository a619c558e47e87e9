"""Where: the worker with the least running, one that failed last, and among equals the one unused for longest.

With late binding a batch is only placed on a worker that can take it now, so the least predicted finish is the least
running. A worker whose last batches failed is tried when no other is free.
"""

from headway.policies.views import Cost, Placed, Seat


def least_loaded(seats: list[Seat], cost: Cost) -> Placed:
    """The seat with the fewest failures in a row, then the fewest running requests, then longest unused."""
    del cost
    if len(seats) == 1:
        return Placed(0, "only_one_free")
    ranked = [(seat.failures, seat.running, seat.last_used, index) for index, seat in enumerate(seats)]
    best, second = sorted(ranked)[:2]
    if best[0] < second[0]:
        return Placed(best[3], "others_failed")
    return Placed(best[3], "least_running" if best[1] < second[1] else "longest_unused")
