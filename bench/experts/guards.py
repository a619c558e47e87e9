"""What the guards of the predictor are worth: against a poisoning tenant, one that rotates its name, a change."""

from collections.abc import Sequence

import numpy as np

from headway.bench.experts.prediction import mixed_tenants, r2
from headway.bench.experts.routings import Routed, Routings, device_loads
from headway.policies.experts.placement import Placement
from headway.policies.experts.predictor import Predictor

HOSTILE = 0.1  # of all reports


def held_out(predictor: Predictor, test: Sequence[Routed], placement: Placement, tenants: dict[int, str]) -> float:
    """R2 over `test`, asked for each request's own tenant."""
    truth = device_loads(test, placement)
    guesses = np.stack([predictor.predict(one.prompt, tenants[id(one)]) for one in test])
    return r2(guesses, truth, truth.mean(0))


def poisoned(routings: Routings, devices: int, *, how: str, seed: int, held: int = 400) -> float:
    """R2 of honest tenants while HOSTILE of all reports say that everything went to one device.

    `how`: none (nobody does), steady (one tenant, one device), random (one tenant, any device), rotating (a new tenant
    name each time).
    """
    placement = routings.placement(devices)
    tenants = mixed_tenants(routings.all, max(3, routings.domains // 2), own=0.6, seed=3)
    predictor, rng = Predictor(placement.share.shape[0], devices), np.random.default_rng(seed)
    for at, one in enumerate(routings.train):
        load = placement.project(one.counts)
        if how == "none" or rng.random() >= HOSTILE:
            predictor.learn(one.prompt, load, tenants[id(one)])
            continue
        wrong = np.zeros_like(load)
        wrong[:, int(rng.integers(devices)) if how == "random" else 0] = load.sum(1)
        predictor.learn(one.prompt, wrong, f"hostile-{at}" if how == "rotating" else "hostile")
    return held_out(predictor, routings.test[:held], placement, tenants)


def newcomer(routings: Routings, devices: int, domain: int, *, seen: int = 120) -> float:
    """R2 on a domain that came late, of another tenant than the one that brought it, after `seen` of its requests."""
    placement = routings.placement(devices)
    predictor = Predictor(placement.share.shape[0], devices)
    known = [one for one in routings.all if one.domain != domain]
    fresh = [one for one in routings.all if one.domain == domain]
    tenants = {id(one): str(one.domain) for one in known}
    seen = min(seen, 2 * len(fresh) // 3)
    settled = len(known) // 2
    for one in known[:settled]:
        predictor.learn(one.prompt, placement.project(one.counts), tenants[id(one)])
    for at, one in enumerate(known[settled:]):
        predictor.learn(one.prompt, placement.project(one.counts), tenants[id(one)])
        if at % 8 == 0 and at // 8 < seen:
            late = fresh[at // 8]
            predictor.learn(late.prompt, placement.project(late.counts), "newcomer")
    truth = device_loads(fresh[seen:], placement)
    mean = device_loads(routings.all, placement).mean(0)
    return r2(np.stack([predictor.predict(one.prompt, "somebody") for one in fresh[seen:]]), truth, mean)


def swapped(
    routings: Routings, devices: int, *, renewed: bool, after: int = 200, held: int = 400
) -> tuple[float, float]:
    """R2 before a revision that moves half of every load one device on, and `after` reports of it later."""
    placement = routings.placement(devices)
    predictor = Predictor(placement.share.shape[0], devices)
    tenants = {id(one): "" for one in routings.all}
    test, cut = routings.test[:held], len(routings.train) - after
    for one in routings.train[:cut]:
        predictor.learn(one.prompt, placement.project(one.counts))
    before = held_out(predictor, test, placement, tenants)
    moved = Placement(0.5 * placement.share + 0.5 * np.roll(placement.share, 1, axis=2), 1)
    if renewed:
        predictor.renew()
    for one in routings.train[cut:]:
        predictor.learn(one.prompt, moved.project(one.counts))
    return before, held_out(predictor, test, moved, tenants)


def exchanged(routings: Routings, devices: int, *, after: int = 200, held: int = 400) -> float:
    """R2 after `after` reports since all devices changed places, which nobody announced."""
    placement = routings.placement(devices)
    predictor = Predictor(placement.share.shape[0], devices)
    cut = len(routings.train) - after
    for one in routings.train[:cut]:
        predictor.learn(one.prompt, placement.project(one.counts))
    moved = Placement(np.roll(placement.share, 1, axis=2), placement.revision)
    for one in routings.train[cut:]:
        predictor.learn(one.prompt, moved.project(one.counts))
    test = routings.test[:held]
    return held_out(predictor, test, moved, {id(one): "" for one in test})
