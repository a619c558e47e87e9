"""Who runs how many tokens in a step. Pure: requests in, shares out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from headway.workers.generate.pace import Pace

if TYPE_CHECKING:  # it imports torch, which these rules do not need
    from headway.workers.generate.request import Request

OLDEST_SHARE = 4  # the oldest prompt gets at least one part in so many of a step's token budget

Portion: TypeAlias = "tuple[Request, int]"


def shares_of(running: Sequence["Request"], pace: Pace, budget: int, limit: int, step: int) -> list[Portion]:
    """The shares of step number `step`, those that decode first; `running`: oldest first.

    Every decoding request one token, long texts first, then prompts in what the pace leaves of `budget`; `limit` tokens
    at most, because memory holds no more. The prompt with the least left to read goes first, so that a long one does
    not hold up the short ones behind it; the oldest has OLDEST_SHARE of the budget for its own, so that they do not
    hold it up for ever.
    """
    if len(running) > limit:
        return _few(running, limit, step)
    decoding = [(request, 1) for request in running if request.pending == 1]
    decoding.sort(key=lambda share: -len(share[0].tokens))  # equal lengths side by side read alike
    reading = [request for request in running if request.pending > 1]
    if not reading:
        return decoding
    room = pace.room(len(decoding), budget, len(reading), max(request.written for request in reading))
    budget = max(1, min(room, limit - len(decoding)))  # a prompt always goes on
    shares = divided([request.pending for request in reading], budget)
    return decoding + [(request, share) for request, share in zip(reading, shares, strict=True) if share]


def divided(pending: Sequence[int], budget: int) -> list[int]:
    """How many of its `pending` tokens each prompt reads, oldest first, where all together may read `budget`."""
    shares = [0] * len(pending)
    shortest_first = sorted(range(len(pending)), key=pending.__getitem__)
    for at, most in [(0, max(1, budget // OLDEST_SHARE)), *((at, budget) for at in shortest_first)]:
        if not budget:
            break
        taken = min(most, budget, pending[at] - shares[at])
        shares[at] += taken
        budget -= taken
    return shares


def _few(running: Sequence["Request"], limit: int, step: int) -> list[Portion]:
    """Memory is too short for all who run: a token each for those who have waited longest for a step."""
    chosen = sorted(running, key=lambda request: request.served)[:limit]
    for request in chosen:
        request.served = step
    chosen.sort(key=lambda request: (request.pending > 1, -len(request.tokens)))
    return [(request, 1) for request in chosen]
