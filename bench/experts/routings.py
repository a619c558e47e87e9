"""Recorded routings as requests: token ids, and how many of their tokens each expert of each layer received.

A recording is an npz file with, for each domain and split, `<split>_<domain>_ids` (token ids, documents one after the
other), `_len` (their lengths) and `_idx` (expert indices [tokens, layers, top_k]).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headway.policies.experts.arrays import Floats, Loads
from headway.policies.experts.placement import Placement, packed
from headway.policies.experts.predictor import Prompt, prompt_of


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """One request and its truth: `counts` [layers, experts]; `indices` [tokens, layers, top_k] where they are known."""

    ids: npt.NDArray[np.int64]
    counts: Floats
    domain: int
    prompt: Prompt
    indices: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Routings:
    """Requests of one model: to learn from, and held out."""

    name: str
    train: list[Routed]
    test: list[Routed]
    domains: int

    @property
    def all(self) -> list[Routed]:
        return self.train + self.test

    def placement(self, devices: int) -> Placement:
        """Experts packed onto `devices` by the load of the training requests."""
        return packed(np.sum([one.counts for one in self.train], axis=0), devices)


def routed(ids: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], experts: int, domain: int) -> Routed:
    """One request from its indices [tokens, layers, top_k]."""
    layers = indices.shape[1]
    flat = (indices + np.arange(layers)[None, :, None] * experts).reshape(-1)
    counts = np.bincount(flat, minlength=layers * experts).astype(np.float32).reshape(layers, experts)
    return Routed(ids, counts, domain, prompt_of(ids), indices)


def recorded(path: Path, *, seed: int = 0) -> Routings:
    """A recording, its requests shuffled. Raises FileNotFoundError if it is not there."""
    with np.load(path, allow_pickle=False) as file:
        stored = {name: file[name] for name in file.files}
    domains = sum(name.startswith("train_") and name.endswith("_ids") for name in stored)
    experts = 1 + max(int(array.max()) for name, array in stored.items() if name.endswith("_idx"))
    splits = {split: _split(stored, split, domains, experts) for split in ("train", "test")}
    rng = np.random.default_rng(seed)
    for requests in splits.values():
        rng.shuffle(requests)
    return Routings(path.stem, splits["train"], splits["test"], domains)


def _split(stored: dict[str, npt.NDArray[np.int64]], split: str, domains: int, experts: int) -> list[Routed]:
    requests = []
    for domain in range(domains):
        ids, indices, lengths = (stored[f"{split}_{domain}_{what}"] for what in ("ids", "idx", "len"))
        cuts = np.cumsum(lengths)[:-1]
        for one, routes in zip(np.split(ids, cuts), np.split(indices, cuts), strict=True):
            requests.append(routed(one.astype(np.int64), routes.astype(np.int64), experts, domain))
    return requests


def stream(
    requests: Sequence[Routed], count: int, *, burst: int, seed: int, weights: Sequence[float] | None = None
) -> list[Routed]:
    """`count` requests drawn with replacement; domains come in runs of `burst` on average (1: independent)."""
    rng = np.random.default_rng(seed)
    by_domain: dict[int, list[Routed]] = {}
    for one in requests:
        by_domain.setdefault(one.domain, []).append(one)
    domains = sorted(by_domain)
    share = np.ones(len(domains)) if weights is None else np.asarray(weights, float)
    share = share / share.sum()
    drawn: list[Routed] = []
    while len(drawn) < count:
        pool = by_domain[domains[rng.choice(len(domains), p=share)]]
        run = 1 if burst <= 1 else int(rng.geometric(1 / burst))
        drawn += [pool[rng.integers(len(pool))] for _ in range(run)]
    return drawn[:count]


def device_loads(requests: Sequence[Routed], placement: Placement) -> Loads:
    """True device loads [requests, layers, devices]."""
    distinct = {id(one): one for one in requests}
    loads = dict(zip(distinct, placement.project(np.stack([one.counts for one in distinct.values()])), strict=True))
    return np.stack([loads[id(one)] for one in requests])
