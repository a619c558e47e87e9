"""Who runs together: from the oldest waiting, the batch whose hottest device is least hot, or whose experts are fewest.

Of a whole batch the oldest is always one; and whoever was overtaken too often goes before all others, so that waiting
is bounded whatever the loads say. Beside them the composer adds, one by one, the request that raises the sum over
layers of the hottest device least, and then looks at each of those again: does another fit better now that all others
are known? It only chooses among who waits already: it never waits for a better mixture.

A device that holds all experts has nothing to balance; where its steps are bound by reading weights, requests that use
the same experts are grouped instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.policies.experts.arrays import Floats, Loads

WINDOW, GROUPING_WINDOW = 4, 8  # batches' worth of the oldest that are looked at
JOINING_WINDOW = 2  # the same where they join one by one: more brings nothing there
OWN_MIX = 0.5  # how much of the window's own imbalance each batch should carry, so that the rest is no worse
PASSES = 3  # windows' worth of younger requests: who was overtaken by so many is overdue
ROUNDS = 2  # of looking again at who was chosen; a third changes one in a hundred
WORK_MAX = 3_000_000  # window x batch x layers x groups: beyond it layers are merged (about 5 ms)


class Waiting(NamedTuple):
    """Who is looked at, oldest first: their predicted `loads` [requests, layers, groups], and who is overdue.

    `overdue`: indices, oldest first. `oldest`: whether the oldest must be among those chosen. It must be in a batch; of
    those who join a running one by one it would leave no choice.
    """

    loads: Loads
    overdue: Sequence[int]
    oldest: bool = True


def overdue_after(window: int) -> int:
    """Younger requests that may overtake one in a window of this size before it is overdue."""
    return PASSES * window


def overtaken(taken: Sequence[int], count: int) -> list[int]:
    """By how many of `taken`, younger than itself, each of `count` indices is overtaken; 0 for those taken."""
    younger = np.bincount(np.asarray(taken, int), minlength=count)[::-1].cumsum()[::-1]
    younger[list(taken)] = 0
    return [int(one) for one in younger]


def balanced(waiting: Waiting, take: int, running: Loads | None = None) -> list[int]:
    """Indices of up to `take` requests, in the order chosen: who is forced first, then who fits.

    `running`: the load [layers, groups] of who is on the devices already (iteration-level engines).
    """
    chosen = _forced(waiting, take)
    count = len(waiting.loads)
    if count <= take:
        return chosen + [at for at in range(count) if at not in set(chosen)]
    excess = _excess(_merged(waiting.loads, take))
    now = excess[:, :, chosen].sum(2)
    if running is not None:
        own = _merged(running[None], take, count) if excess.shape[1] == 1 else running[None]
        now = now + _deviation(own)[:, :, 0]
    free = np.ones(count, bool)
    free[chosen] = False
    forced = len(chosen)
    while len(chosen) < take:
        chosen.append(_coolest(excess, now, free))
    rounds = min(ROUNDS, WORK_MAX // (take * excess.size) - 1)
    for at in [*range(forced, take)] * rounds:
        free[chosen[at]] = True
        now -= excess[:, :, chosen[at]]
        chosen[at] = _coolest(excess, now, free)
    return chosen


def _coolest(excess: Floats, now: Floats, free: npt.NDArray[np.bool_]) -> int:
    """Who of the `free` raises the hottest groups of `now` least: it is added to them, and free no more."""
    hottest = (excess + now[:, :, None]).max(0).sum(0)
    best = int(np.where(free, hottest, np.inf).argmin())
    free[best] = False
    now += excess[:, :, best]
    return best


def grouped(waiting: Waiting, take: int, running: Loads | None = None) -> list[int]:
    """Like `balanced`, but keeps the expected number of distinct experts in a step low.

    `loads` [requests, layers, experts]: here the chance that one token of the request goes to the expert, 0 to 1.
    `running`: the same, summed up as 1 - product(1 - chance) over who runs.
    """
    chosen = _forced(waiting, take)
    count = len(waiting.loads)
    if count <= take:
        return chosen + [at for at in range(count) if at not in set(chosen)]
    misses = 1.0 - np.clip(waiting.loads.reshape(count, -1), 0.0, 1.0)
    now: Floats = misses[chosen].prod(0)
    if running is not None:
        now = now * (1.0 - np.clip(running.reshape(-1), 0.0, 1.0))
    free = np.ones(count, bool)
    free[chosen] = False
    while len(chosen) < take:
        idle = misses @ now  # expected experts that stay unused with each candidate
        best = int(np.where(free, idle, -np.inf).argmax())
        chosen.append(best)
        free[best] = False
        now = now * misses[best]
    return chosen


def grouping_pays(tokens: float, top_k: int, active: float, slots_worth: float) -> bool:
    """Bound by weights, not by work: an active expert has fewer token slots than reading its weights is worth.

    `active`: experts used in a step and layer. `slots_worth`: beta / alpha of the cost model, in token slots.
    """
    return active > 0 and tokens * top_k / active < slots_worth


def _forced(waiting: Waiting, take: int) -> list[int]:
    forced = list(waiting.overdue[:take])
    return forced or ([0] if waiting.oldest and len(waiting.loads) and take else [])


def _merged(loads: Loads, take: int, count: int | None = None) -> Loads:
    """All layers as one, where looking at each would take too long on the path of a decision."""
    requests, layers, groups = loads.shape
    if (count or requests) * take * layers * groups <= WORK_MAX:
        return loads
    merged: Loads = loads.sum(1, keepdims=True)
    return merged


def _deviation(loads: Loads) -> Floats:
    """Each group's load less the mean over groups; as [groups, layers, requests], which numpy reduces fastest."""
    turned = np.ascontiguousarray(loads.transpose(2, 1, 0))
    deviation: Floats = turned - turned.mean(0, keepdims=True)
    return deviation


def _excess(loads: Loads) -> Floats:
    """Deviations, each less its request's part in what the whole window is out of balance by."""
    deviation = _deviation(loads)
    work = loads.sum((1, 2))
    total = float(work.sum())
    if total <= 0:
        return deviation
    own = deviation.sum(2, keepdims=True) / total
    excess: Floats = deviation - np.float32(OWN_MIX) * own * work.astype(np.float32)
    return excess
