"""AIMD: the batch size is raised by one while batches stay under a latency target, and cut by a tenth when one is over.

It never waits: as in Clipper, a batch is launched as soon as a worker is idle, and what adapts is the largest batch.
The size starts at one. It grows only by batches that were as large as it allows, because a smaller one shows nothing.
The latency is what the engine took for the batch, as in Clipper, without the time in the queue.

Here to be compared with. A size bounded below what the worker takes gives throughput away just when a queue is long,
and one slow batch takes away what ten good ones gave: with late binding the queue itself makes batches no larger than
they have to be.

Source: Crankshaw et al., Clipper: A Low-Latency Online Prediction Serving System, NSDI 2017, section 4.3 (dynamic batch
size; its delayed batching is the `fixed` window); the law is that of TCP (Chiu and Jain, 1989).
"""

from headway.policies.views import LaneView, Launch

STEP = 1  # requests more after a full batch within the target
KEPT = 0.9  # of the size after a batch over it: Clipper's back-off of a tenth, smaller than TCP's half
SIZE_MAX = 4096  # no worker takes more (`max_batch`)


class Aimd:
    """The window, and the size it has learned: `size`, requests in a batch."""

    __slots__ = ("_target_ns", "size")

    def __init__(self, target_ns: int) -> None:
        self.size = 1
        self._target_ns = target_ns

    def __repr__(self) -> str:
        return f"<Aimd at most {self.size}, towards {self._target_ns / 1e6:g} ms>"

    def __call__(self, view: LaneView, now_ns: int) -> Launch:
        """Launch, with at most `size`."""
        del now_ns
        return Launch("full" if view.waiting >= view.max_batch <= self.size else "aimd", self.size)

    def observe(self, requests: int, compute_ns: int) -> None:
        """A batch of `requests` took `compute_ns`."""
        if compute_ns > self._target_ns:
            self.size = max(1, int(self.size * KEPT))
        elif requests >= self.size:
            self.size = min(SIZE_MAX, self.size + STEP)


def aimd(*, target_ns: int) -> Aimd:
    """A new one, towards batches of `target_ns`."""
    return Aimd(target_ns)
