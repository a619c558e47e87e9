"""How well are loads predicted? The online regression beside what else could be used, on held-out requests.

R2 is the share of a request's deviation from the global mean that is explained: what a mean predicts (the share that is
the same for everybody) is of no use in choosing who runs together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headway.bench.experts.routings import Routed, Routings, device_loads
from headway.policies.experts.arrays import Floats, Loads
from headway.policies.experts.placement import Placement
from headway.policies.experts.predictor import Predictor

Guess = Callable[[Routed], Loads]
TABLE_PRIOR = 1.0  # tokens' worth of the mean in a table's row; between 0.5 and 2 is best


class Score(NamedTuple):
    """One predictor's R2 on held-out requests after `requests` requests (`tokens` tokens)."""

    name: str
    requests: int
    tokens: int
    r2: float


def r2(guesses: Loads, truth: Loads, mean: Loads) -> float:
    """Explained share of the deviations, in tokens, as they add up in a batch: arrays [requests, layers, groups].

    `mean`: how who knows nothing divides a request's tokens, [layers, groups], at any scale.
    """
    flat = truth.sum(-1, keepdims=True) * (mean / mean.sum(-1, keepdims=True))
    return float(1.0 - np.square(guesses - truth).sum() / np.square(flat - truth).sum())


class Table:
    """The baseline of the literature: how often each token id went to each device, with a prior of the mean."""

    def __init__(self, vocabulary: int, placement: Placement) -> None:
        self._placement = placement
        layers = placement.share.shape[0]
        self._sums = np.zeros((vocabulary, layers, placement.devices), np.float32)
        self._seen = np.zeros(vocabulary, np.float32)

    def learn(self, one: Routed) -> None:
        """It needs to know where each single token went: [tokens, layers, top_k]."""
        for layer in range(one.indices.shape[1]):
            shares = self._placement.share[layer][one.indices[:, layer]].sum(1)
            np.add.at(self._sums[:, layer], one.ids, shares)
        np.add.at(self._seen, one.ids, 1.0)

    def predict(self, one: Routed) -> Loads:
        mean = self._sums.sum(0) / max(1.0, float(self._seen.sum()))
        rows = (self._sums[one.ids] + TABLE_PRIOR * mean) / (self._seen[one.ids] + TABLE_PRIOR)[:, None, None]
        total: Loads = rows.sum(0)
        return total


class TenantMean:
    """The mean load of a token of each tenant; of all, where the tenant is new."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._sums: dict[str, Floats] = {}
        self._tokens: dict[str, int] = {}

    def learn(self, one: Routed, tenant: str) -> None:
        self._sums[tenant] = self._sums.get(tenant, np.float32(0.0)) + self._placement.project(one.counts)
        self._tokens[tenant] = self._tokens.get(tenant, 0) + one.tokens

    def predict(self, one: Routed, tenant: str) -> Loads:
        known = [tenant] if tenant in self._sums else list(self._sums)
        loads: Loads = np.sum([self._sums[name] for name in known], axis=0)
        return loads * np.float32(one.tokens / sum(self._tokens[name] for name in known))


def mixed_tenants(requests: Sequence[Routed], tenants: int, *, own: float, seed: int) -> dict[int, str]:
    """A tenant for each request (by id): its domain's own with probability `own`, else any."""
    rng = np.random.default_rng(seed)
    return {
        id(one): str(one.domain % tenants if rng.random() < own else int(rng.integers(tenants))) for one in requests
    }


def compare(routings: Routings, devices: int, marks: Sequence[int], *, held_out: int = 400) -> list[Score]:
    """Learning curves of all predictors: R2 on `held_out` test requests after each of `marks` training requests."""
    placement = routings.placement(devices)
    test = routings.test[:held_out]
    truth = device_loads(test, placement)
    mean = placement.project(np.sum([one.counts for one in routings.train], axis=0))
    tenants = mixed_tenants(routings.all, max(3, routings.domains // 2), own=0.6, seed=3)
    layers = placement.share.shape[0]
    predictor, table, by_tenant = (
        Predictor(layers, devices),
        Table(1 + max(int(one.ids.max()) for one in routings.all), placement),
        TenantMean(placement),
    )
    guesses: dict[str, Guess] = {
        "ours": lambda one: predictor.predict(one.prompt),
        "token table": table.predict,
        "tenant mean": lambda one: by_tenant.predict(one, tenants[id(one)]),
        "oracle": lambda one: placement.project(one.counts),
    }
    scores, tokens = [], 0
    for at, one in enumerate(routings.train, 1):
        predictor.learn(one.prompt, placement.project(one.counts))
        table.learn(one)
        by_tenant.learn(one, tenants[id(one)])
        tokens += one.tokens
        if at in marks:
            scores += [
                Score(name, at, tokens, r2(np.stack([guess(each) for each in test]), truth, mean))
                for name, guess in guesses.items()
            ]
    return scores
