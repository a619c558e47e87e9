"""What composing batches is worth: hottest device over mean, of the true loads, on a queue that is always full.

Beside ours: FIFO, a blind composer (sorted by length, as padding would have it), and an oracle that composes by truth.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.bench.experts.routings import Routed, device_loads
from headway.policies.experts.arrays import Loads
from headway.policies.experts.composer import WINDOW, Waiting, balanced, overdue_after, overtaken
from headway.policies.experts.placement import Placement
from headway.policies.experts.predictor import Predictor

POLICIES = ("fifo", "blind", "ours", "oracle")


class Composed(NamedTuple):
    """One run. `imbalance`: sum over batches of the hottest, over that of the mean; waits are in batches."""

    policy: str
    imbalance: float
    wait_mean: float
    wait_max: int
    hottest: list[float]  # of each batch, over its mean
    share: Loads  # [devices] of the first layer's tokens, mean over batches of the sorted shares

    def step_over(self, other: "Composed") -> float:
        """Relative change of the expert part of a step against `other`: -0.2 is 20% less time."""
        return self.imbalance / other.imbalance - 1.0


def run(policy: str, true: Loads, guessed: Loads, tokens: Sequence[int], take: int) -> Composed:
    """Batches of `take` from requests in order of arrival; the queue holds WINDOW batches all the time.

    `true`, `guessed`: [requests, layers, devices].
    """
    window = WINDOW * take
    passes = overdue_after(window)
    arrivals = deque(range(len(true)))
    queue: list[int] = []
    born: dict[int, int] = {}
    passed = np.zeros(len(true), int)
    hottest, sums, waits, shares = [], np.zeros(2), [], []
    for batch in range((len(true) - window) // take + 1):
        while len(queue) < window:
            born[arrivals[0]] = batch
            queue.append(arrivals.popleft())
        overdue = [at for at, one in enumerate(queue) if passed[one] >= passes]
        chosen = _choose(policy, queue, Waiting(true[queue], overdue), Waiting(guessed[queue], overdue), tokens, take)
        picked = [queue[at] for at in chosen]
        load = true[picked].sum(0)
        here = np.array([load.max(-1).sum(), load.mean(-1).sum()])
        sums += here
        hottest.append(float(here[0] / here[1]))
        shares.append(np.sort(load[0])[::-1] / load[0].sum())
        waits += [batch - born[one] for one in picked]
        passed[queue] += overtaken(chosen, window)
        gone = set(picked)
        queue = [one for one in queue if one not in gone]
    mean = np.mean(shares, axis=0).astype(np.float32)
    return Composed(policy, float(sums[0] / sums[1]), float(np.mean(waits)), max(waits), hottest, mean)


def _choose(
    policy: str, queue: list[int], true: Waiting, guessed: Waiting, tokens: Sequence[int], take: int
) -> list[int]:
    if policy == "fifo":
        return list(range(take))
    if policy == "blind":  # the oldest, and who is nearest to it in length
        nearest = sorted(range(len(queue)), key=lambda at: (abs(tokens[queue[at]] - tokens[queue[0]]), at))
        forced = list(true.overdue[:take])
        return (forced + [at for at in nearest if at not in set(forced)])[:take]
    return balanced({"ours": guessed, "oracle": true}[policy], take)


def learned(train: Sequence[Routed], placement: Placement) -> Predictor:
    """A predictor that has seen `train`."""
    predictor = Predictor(placement.share.shape[0], placement.devices)
    for one in train:
        predictor.learn(one.prompt, placement.project(one.counts))
    return predictor


def compare(
    requests: Sequence[Routed],
    placement: Placement,
    predictor: Predictor,
    take: int,
    policies: Sequence[str] = POLICIES,
) -> dict[str, Composed]:
    """All policies on the same arrivals."""
    guesses = {id(one): one for one in requests}
    by_id = {key: predictor.predict(one.prompt) for key, one in guesses.items()}
    guessed = np.stack([by_id[id(one)] for one in requests])
    true = device_loads(requests, placement)
    tokens = [one.tokens for one in requests]
    return {policy: run(policy, true, guessed, tokens, take) for policy in policies}
