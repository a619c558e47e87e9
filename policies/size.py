"""How many: the size of a one-shot batch, from what batches cost.

With n requests waiting for w workers, batches of k cost (n/k) fixed parts a, which everybody behind them waits for, and
make each request wait for the k - 1 others of its own batch, c = m + b x tokens each. Per request the first is
a x n / (2 k w) and the second c x k / 2, so their sum is least at

    k = sqrt(a x n / (c x w))

where a counts what a batch costs beyond computing, too: the time between a worker's answer and its next batch. Those
who have yet to come wait behind the backlog as well, which by the load rho weighs a as 1 / (1 - rho):

    k = sqrt(a x n / (c x w x (1 - rho)))

On a CPU, where c is everything, 32 waiting texts go in batches of a few, and the first are done after an eighth of the
time; on a launch-bound GPU k exceeds what waits and the batch is full. The batches of a backlog are made equally large,
of the number of them nearest to n / k.
Iteration-level engines take whom they can: a request there waits for nobody else of its batch.

Source: the square-root rule is that of the economic lot size (Harris, 1913): set-up cost against holding cost.
"""

from math import ceil, sqrt

from headway.policies.views import BatchView

LOAD_MAX = 0.95  # beyond it 1 / (1 - rho) says more about the estimate than about the queue


def by_cost(view: BatchView) -> int:
    """The default: the least mean wait by the learned cost; as many as fit while nothing is known."""
    cost, waiting = view.cost, view.waiting
    most = min(view.most, waiting)
    each_ns = cost.m_ns + cost.b_ns * view.mean_tokens
    if most <= 1 or not cost.known or each_ns <= 0:
        return most
    fixed_ns = cost.a_ns + view.turnaround_ns
    load = min(LOAD_MAX, view.arrivals_per_ns * (each_ns + fixed_ns / view.most) / view.workers)
    best = sqrt(fixed_ns * waiting / (each_ns * view.workers * (1.0 - load)))
    if best >= most:
        return most
    batches = max(1, round(waiting / max(1.0, best)))
    return min(most, ceil(waiting / batches))


def largest(view: BatchView) -> int:
    """As many as the worker takes."""
    return min(view.most, view.waiting)
