"""Who runs how many tokens in a step. Pure: requests in, shares out."""

from collections.abc import Sequence

from headway.workers.generate.pace import FETCH, Pace
from headway.workers.generate.request import Request

OLDEST_SHARE = 4  # the oldest prompt gets at least one part in so many of a step's token budget

Portion = tuple[Request, int]


def shares_of(running: Sequence[Request], pace: Pace, budget: int, limit: int, step: int) -> list[Portion]:
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
    shares = {id(request): 0 for request in reading}
    for request, most in [(reading[0], max(1, budget // OLDEST_SHARE)), *_shortest_first(reading, budget)]:
        taken = min(most, budget, request.pending - shares[id(request)])
        shares[id(request)] += taken
        budget -= taken
    return decoding + [(request, shares[id(request)]) for request in reading if shares[id(request)]]


def work_of(shares: Sequence[Portion]) -> tuple[int, int, int]:
    """Of shares that have not run, what Pace.observe wants: decode rows, tokens of prompts, and how far they look."""
    prompts = [(request.written, count) for request, count in shares if count > 1]
    looked_back = sum((count + FETCH) * start + count * (count - 1) // 2 for start, count in prompts)
    return len(shares) - len(prompts), sum(count for _, count in prompts), looked_back


def _few(running: Sequence[Request], limit: int, step: int) -> list[Portion]:
    """Memory is too short for all who run: a token each for those who have waited longest for a step."""
    chosen = sorted(running, key=lambda request: request.served)[:limit]
    for request in chosen:
        request.served = step
    chosen.sort(key=lambda request: (request.pending > 1, -len(request.tokens)))
    return [(request, 1) for request in chosen]


def _shortest_first(reading: Sequence[Request], budget: int) -> list[Portion]:
    return [(request, budget) for request in sorted(reading, key=lambda request: request.pending)]
