"""Is B worse than A, asked after every request, and still right: an always-valid interval for the effect of B.

Each request goes to B with probability `share`, else to A, by a draw of its own. Of its figure x (the logarithm of its
time) the weighted score (z / share - (1 - z) / (1 - share)) * (x - m) is kept, where z is 1 for B and m the mean of all
x before it: its mean is the effect of B on x, whatever the traffic does, because m was known before the draw and both
weights are 0 on average. Around the mean of the scores lies a confidence sequence: with probability 1 - alpha it holds
the effect at all times at once, so that it may be looked at after every request and acted upon when it leaves 0. A test
of fixed size that is looked at again and again would call B worse sooner or later.

It is asymptotic: nothing is said before START scores. Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas,
Time-uniform central limit theory and asymptotic confidence sequences (2021), theorem 2.2 and section 3, for randomised
sequential experiments; Robbins (1970) for the mixture behind it.
"""

from math import exp, log, sqrt

START = 100  # scores before the interval is looked at
TIGHT_AT = 1000  # scores at which it is tightest


class Effect:
    """The effect of B on x so far. `interval`: None before START."""

    __slots__ = ("_alpha", "_mean", "_rho2", "_share", "_squares", "_sum_x", "count")

    def __init__(self, share: float, alpha: float = 0.05) -> None:
        if not 0.0 < share < 1.0:
            raise ValueError(f"share {share} is not between 0 and 1")
        self._share, self._alpha = share, alpha
        self._rho2 = (-2 * log(alpha) + log(-2 * log(alpha) + 1)) / TIGHT_AT
        self._mean = self._squares = self._sum_x = 0.0
        self.count = 0

    def __repr__(self) -> str:
        return f"<Effect {self._mean:+.3f} of {self.count}, {self.interval}>"

    def observe(self, in_b: bool, x: float) -> None:
        """One more request."""
        before = self._sum_x / self.count if self.count else x
        weight = 1 / self._share if in_b else -1 / (1 - self._share)
        score = weight * (x - before)
        self._sum_x += x
        self.count += 1
        step = score - self._mean
        self._mean += step / self.count
        self._squares += step * (score - self._mean)

    @property
    def mean(self) -> float:
        """x under B less x under A."""
        return self._mean

    @property
    def interval(self) -> tuple[float, float] | None:
        """That holds the effect at all times with probability 1 - alpha."""
        n = self.count
        if n < START:
            return None
        spread = n * self._rho2 + 1
        variance = self._squares / n
        half = sqrt(variance * 2 * spread / (n * n * self._rho2) * log(sqrt(spread) / self._alpha))
        return self._mean - half, self._mean + half

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Of a logarithm: B / A, with its interval."""
        bounds = self.interval
        return (exp(self._mean), exp(bounds[0]), exp(bounds[1])) if bounds else None
