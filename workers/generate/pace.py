"""How much of a prompt may be read beside running answers: their next token waits for it.

A step that only decodes takes a time that is learned from such steps. What a prompt adds is learned from the others, as
two costs: of each of its tokens, and of looking back at each earlier one, so that the later pieces of a long prompt are
known to be dearer before they are read. The past of a prompt is fetched once for each piece, and that costs about what
FETCH tokens pay for looking at it. Both costs are a weighted least-squares fit over the last few dozen steps, in which
one step counts for twice or half of what was expected at most: anything may have held it up.

Beside decode rows prompts get so many tokens that the step takes about STRETCH times as long as without them, at least
LEAST, so that reading always goes on; with no answer running they get the whole budget. How long the streams are held
up in all does not depend on the size of the pieces, only how evenly, while first tokens come the sooner the larger the
pieces are: they are as large as the stretch allows. Where more requests wait for their first token than for their next
one, they weigh that much more: after a burst it is they who wait. Nobody reads a clock here: times are arguments.
"""

import math
from collections.abc import Iterable

STRETCH = 2.5  # a step with prompts over one without: above, streams stutter; below, first tokens wait for long
CROWD_MAX = 8.0  # and at most so many times that, while more requests read than answer
LEAST = 8  # tokens of prompts in every step, whatever they cost; room is given in multiples of it
SURPRISE = 2.0  # a step counts for at most so many times, or at least so small a part, of what was expected
FOLLOW = 0.2  # how fast the time of decoding follows what is seen
MEMORY = 0.95  # what a step still counts one step with prompts later: about twenty of them are remembered
FETCH = 20  # tokens; SmolLM2-135M in float32 on a CPU: 19 with one thread, 20 with two
GUESSED = 64  # tokens of the step that the guess counts as
FAR = 1024  # tokens looked back at: the unit in which the second cost is fitted
TRUST = (
    0.5  # in the guess of a token's cost, against all that is remembered: one prompt's pieces tell two costs ill apart
)
DOUBT = 0.05  # that looking back costs anything, against what is remembered


class Pace:
    """Learns from steps. `prior_ns`: a first guess of a step's cost: fixed, per token, per request."""

    def __init__(self, prior_ns: tuple[float, float, float]) -> None:
        fixed, per_token, per_row = prior_ns
        self._fixed_ns, self._row_ns = max(1.0, fixed), per_token + per_row
        self._scale = 1.0  # of decoding, over the guess
        self._guess_ns = self._token_ns = max(1.0, per_token)
        self._far_ns = 0.0
        # Weighted sums: tokens², tokens × far, far², tokens × ns, far × ns. At first the guess, as if it were a step.
        square = GUESSED * GUESSED / (self.decode_ns(1) + GUESSED * self._guess_ns) ** 2
        self._sums = [square, 0.0, 0.0, square * self._guess_ns, 0.0]

    def __repr__(self) -> str:
        costs = f"{self._token_ns / 1e3:.0f} us a prompt token, {self._far_ns / 1e3:.0f} more {FAR} tokens on"
        return f"<Pace decode x{self._scale:.2f}, {costs}>"

    def decode_ns(self, rows: int) -> float:
        """What a step of `rows` decode rows takes alone."""
        return self._scale * (self._fixed_ns + self._row_ns * rows)

    def room(self, rows: int, budget: int, reading: int = 1, read: int = 0) -> int:
        """Tokens of prompts beside `rows` decode rows, of a step's `budget`; at least one. `reading` requests wait for
        them, of which `read` tokens were read before."""
        left = max(1, budget - rows)
        if not rows:
            return left
        crowd = min(CROWD_MAX, max(1.0, reading / rows))
        spare_ns = (STRETCH * crowd - 1) * self.decode_ns(rows) - FETCH * read / FAR * self._far_ns
        if spare_ns <= 0:
            return min(left, LEAST)
        first_ns, growth_ns = self._token_ns + self._far_ns * read / FAR, self._far_ns / FAR
        # first × n + growth × n² / 2 = spare, solved for n in the form that does not cancel
        fit = int(2 * spare_ns / (first_ns + math.sqrt(first_ns**2 + 2 * growth_ns * spare_ns)))
        return min(left, max(LEAST, fit // LEAST * LEAST))

    def observe(self, rows: int, tokens: int, spent_ns: int, looked_back: int = 0) -> None:
        """A step of `rows` decode rows and `tokens` tokens of prompts took `spent_ns`. `looked_back`: see parts_of."""
        decode_ns, far = self.decode_ns(rows) if rows else 0.0, looked_back / FAR
        expected_ns = decode_ns + self._token_ns * tokens + self._far_ns * far
        seen_ns = min(max(float(spent_ns), expected_ns / SURPRISE), expected_ns * SURPRISE)
        if not tokens:
            self._scale *= (seen_ns / expected_ns) ** FOLLOW
        elif rows:
            self._fit(tokens, far, seen_ns - decode_ns, expected_ns**-2)

    def _fit(self, tokens: int, far: float, added_ns: float, weight: float) -> None:
        row = (tokens * tokens, tokens * far, far * far, tokens * added_ns, far * added_ns)
        self._sums = [MEMORY * old + weight * new for old, new in zip(self._sums, row, strict=True)]
        square, mixed, far_square, token_sum, far_sum = self._sums
        far_square += DOUBT * square
        token_sum += TRUST * square * self._guess_ns
        square *= 1 + TRUST
        self._far_ns = max(0.0, (far_sum * square - token_sum * mixed) / (far_square * square - mixed * mixed))
        self._token_ns = max(1.0, (token_sum - self._far_ns * mixed) / square)


def parts_of(pieces: Iterable[tuple[int, int]]) -> tuple[int, int, int]:
    """Of (tokens before it, tokens) of all pieces of a step, what Pace.observe wants: decode rows, which are pieces of
    one token; tokens of the others; and how far those look back: the tokens before each of them, summed, and FETCH
    times those before each piece."""
    rows = tokens = looked_back = 0
    for start, count in pieces:
        if count == 1:
            rows += 1
            continue
        tokens += count
        looked_back += (count + FETCH) * start + count * (count - 1) // 2
    return rows, tokens, looked_back
