"""How long answers are: a slowly forgetting mean, and a length that three of four answers have at least.

For what has to be guessed before it is known: the cache a request will need, when a row becomes free, whether a
deadline can be kept at all.
"""

KNOWN_FROM = 8  # answers; before that nothing is claimed
FORGET = 1 / 64
QUARTER = 0.25
STEP = 0.1  # relative step of the quantile: settles within some 50 answers


class Answers:
    """`mean` and `least`, in tokens; both 0 while unknown.

    The quantile is followed by stochastic approximation (Robbins and Monro, 1951) in relative steps.
    """

    __slots__ = ("_least", "_mean", "_seen")

    def __init__(self) -> None:
        self._seen = 0
        self._mean = 0.0
        self._least = 0.0

    def __repr__(self) -> str:
        return f"<Answers of {self.mean:.0f} tokens, three of four {self.least:.0f} or more>"

    def observe(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self._seen += 1
        self._mean += max(FORGET, 1 / self._seen) * (tokens - self._mean)
        if self._seen == 1:
            self._least = float(tokens)
        elif self._seen <= KNOWN_FROM:
            self._least = min(self._least, tokens)
        else:
            self._least *= 1.0 + STEP * (QUARTER if tokens > self._least else QUARTER - 1.0)

    @property
    def mean(self) -> float:
        return self._mean if self._seen >= KNOWN_FROM else 0.0

    @property
    def least(self) -> float:
        return self._least if self._seen >= KNOWN_FROM else 0.0
