"""Choosing the next token of each row of a mixed batch.

A greedy row takes the largest logit. A sampled row draws one uniform number made from its own seed and the index of the
token, and walks its own distribution with it: nothing a neighbour does, and nothing about where or when the step runs,
enters the draw, so that a request continued on another worker goes on with the tokens it would have had. Biases first,
then temperature, top_k, top_p, as Transformers orders them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from headway.scheduler.wire import Params

CANDIDATES = 1024  # sorted first; a row whose top_p reaches past them sorts its whole vocabulary
_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """How one request chooses: its params, narrowed, with a seed that is always there."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    bias: tuple[tuple[int, float], ...]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """The largest logit, nothing else to look at."""
        return self.greedy and not self.bias


def choice_of(params: Params, seed: int) -> Choice:
    """`params` as a Choice; `seed` is used where they name none."""
    return Choice(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed if params.seed is not None else seed,
        bias=tuple(params.logit_bias.items()),
    )


def choose(logits: Any, choices: Sequence[Choice], indices: Sequence[int]) -> list[int | None]:
    """The next token of each row of `logits` [rows, vocabulary]; None where the logits are not finite.

    `indices[i]`: how many tokens row i has had; with its seed it fixes the draw.
    """
    if not all(choice.plain for choice in choices):
        logits = logits.float()  # a copy, or float32 already: biases are written into it below
        logits = _biased(logits, choices)
    best, tokens = logits.max(-1)
    finite: list[bool] = torch.isfinite(best).tolist()
    chosen: list[int] = tokens.tolist()
    for row, choice in enumerate(choices):
        if finite[row] and not choice.greedy:
            chosen[row] = _sample(logits[row], best[row], choice, uniform(choice.seed, indices[row]))
    return [token if good else None for token, good in zip(chosen, finite, strict=True)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of `seed` and `index` alone (two rounds of splitmix64)."""
    state = _mix(seed & _MASK)
    return (_mix((state + index) & _MASK) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _biased(logits: Any, choices: Sequence[Choice]) -> Any:
    entries = [(row, token, value) for row, choice in enumerate(choices) for token, value in choice.bias]
    if not entries:
        return logits
    rows, tokens, values = zip(*entries, strict=True)
    where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    return logits.index_put(where, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def _sample(logits: Any, best: Any, choice: Choice, draw: float) -> int:
    """One token of one row. `best`, its largest logit, is subtracted first, so that no temperature overflows."""
    weights = ((logits - best) / choice.temperature).double().exp()
    size = weights.shape[0]
    if not 0 < choice.top_k < size and choice.top_p >= 1.0:
        return _walk(weights, draw)
    total = weights.sum()
    ranked, order = weights.topk(min(choice.top_k or CANDIDATES, size))
    if choice.top_k:
        total = ranked.sum()
    elif bool(ranked.sum() < choice.top_p * total):
        ranked, order = weights.sort(descending=True)
    above = ranked.cumsum(0) - ranked  # what more likely tokens weigh together
    return int(order[_walk(ranked[above < choice.top_p * total], draw)])


def _walk(weights: Any, draw: float) -> int:
    """The first entry at which the running sum passes `draw` x the total."""
    reached = weights.cumsum(0)
    at = int(torch.searchsorted(reached, reached[-1] * draw, right=True))
    return min(at, weights.shape[0] - 1)
