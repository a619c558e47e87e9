"""How much of a prompt may be read beside running answers: their next token waits for it.

A step that only decodes takes a time that is learned from such steps; what a token of a prompt adds is learned from the
others. Beside decode rows prompts get so many tokens that the step takes about STRETCH times as long as without them,
at least LEAST, so that reading always goes on; with no answer running they get the whole budget. Where more requests
wait for their first token than for their next one, they weigh that much more: after a burst it is they who wait. Nobody
reads a clock here: times are arguments.
"""

STRETCH = 2.0  # a step with prompts over one without: above, streams stutter; below, first tokens wait for long
CROWD_MAX = 8.0  # and at most so many times that, while more requests read than answer
LEAST = 8  # tokens of prompts in every step, whatever they cost; room is given in multiples of it
SURPRISE = 2.0  # one step moves what is believed by this factor at most: it may have been held up by anything
RISE, FALL = 0.5, 0.2  # how fast belief follows; fast up, because each later piece of a prompt costs more


class Pace:
    """Learns from steps. `prior_ns`: a first guess of a step's cost: fixed, per token, per request."""

    def __init__(self, prior_ns: tuple[float, float, float]) -> None:
        fixed, per_token, per_row = prior_ns
        self._fixed_ns, self._row_ns = max(1.0, fixed), per_token + per_row
        self._scale = 1.0  # of decoding, over the guess
        self._token_ns = max(1.0, per_token)

    def __repr__(self) -> str:
        return f"<Pace decode x{self._scale:.2f}, {self._token_ns / 1e3:.0f} us a prompt token>"

    def decode_ns(self, rows: int) -> float:
        """What a step of `rows` decode rows takes alone."""
        return self._scale * (self._fixed_ns + self._row_ns * rows)

    def room(self, rows: int, budget: int, reading: int = 1) -> int:
        """Tokens of prompts of `reading` requests beside `rows` decode rows, of a step's `budget`; at least one."""
        left = max(1, budget - rows)
        if not rows:
            return left
        crowd = min(CROWD_MAX, max(1.0, reading / rows))
        fit = int((STRETCH * crowd - 1) * self.decode_ns(rows) / self._token_ns)
        return min(left, max(LEAST, fit // LEAST * LEAST))

    def observe(self, rows: int, tokens: int, spent_ns: int) -> None:
        """A step of `rows` decode rows and `tokens` tokens of prompts took `spent_ns`."""
        if not tokens:
            self._scale = _followed(self._scale, spent_ns / (self.decode_ns(rows) / self._scale))
        elif rows:
            self._token_ns = _followed(self._token_ns, max(1.0, spent_ns - self.decode_ns(rows)) / tokens)


def _followed(believed: float, seen: float) -> float:
    seen = min(max(seen, believed / SURPRISE), believed * SURPRISE)
    return believed + (RISE if seen > believed else FALL) * (seen - believed)
