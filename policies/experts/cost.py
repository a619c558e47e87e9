"""What a step takes: fixed, per token, per token slot of the hottest device, per expert that is used.

time = c0 + c1 x tokens + alpha x critical + beta x active, all positive, learned from measured steps by recursive
least squares with forgetting. `critical` is the sum over layers of the hottest device's tokens, `active` the number of
distinct experts used, summed over layers (0 where that is not known). With one device `critical` is proportional to
tokens and takes nothing; what a grouped batch saves is then in beta.
"""

from typing import NamedTuple

import numpy as np

from headway.policies.experts.arrays import Floats

KEPT = 0.99  # of what was known, with each step: about the last hundred count
KNOWN_AFTER = 16  # steps
RIDGE = 1e-4  # of each feature's own power: holds what the steps seen do not tell apart
STRAGGLER = 3.0  # a step that took so much longer than predicted (a pause, a compile) is seen as only so long


class Work(NamedTuple):
    """What a step, or a queue, asks for."""

    tokens: float
    critical: float
    active: float = 0.0


class StepCost:
    """The model of one service's steps, in nanoseconds."""

    def __init__(self) -> None:
        self._power: Floats = np.zeros((4, 4))
        self._seen: Floats = np.zeros(4)
        self._weights: Floats = np.zeros(4)
        self.steps = 0
        self.error = 0.0  # |predicted - measured| / measured, lately

    def __repr__(self) -> str:
        c0, c1, alpha, beta = self._weights
        return f"<StepCost {c0 / 1e6:.2f} ms + {c1:.0f} ns x tokens + {alpha:.0f} x critical + {beta:.0f} x active>"

    @property
    def known(self) -> bool:
        return self.steps >= KNOWN_AFTER

    @property
    def slots_worth(self) -> float:
        """beta / alpha: how many token slots reading one more expert's weights is worth; 0 while not known.

        On one device the slots are in the price of a token: beta is then compared with that.
        """
        alpha = self._weights[2] or self._weights[1]
        return float(self._weights[3] / alpha) if self.known and alpha > 0 else 0.0

    def ns(self, work: Work, steps: float = 1.0) -> float:
        """Predicted time of `work` done in `steps` steps."""
        return float(self._weights @ np.array([steps, *work]))

    def observe(self, work: Work, spent_ns: float) -> None:
        """A step did `work` in `spent_ns`."""
        if self.known:
            predicted = self.ns(work)
            self.error += 0.05 * (abs(predicted - spent_ns) / max(spent_ns, 1.0) - self.error)
            spent_ns = min(spent_ns, STRAGGLER * max(predicted, 1.0))
        features = np.array([1.0, *work])
        self._power = KEPT * self._power + np.outer(features, features)
        self._seen = KEPT * self._seen + features * spent_ns
        self.steps += 1
        self._weights = _positive(self._power, self._seen)


def _positive(power: Floats, seen: Floats) -> Floats:
    """Least squares with positive weights: features that come out negative are left out, worst first."""
    scale = np.sqrt(np.maximum(np.diag(power), 1e-30))
    matrix = power / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
    target = seen / scale
    used = np.diag(power) > 0
    weights: Floats = np.zeros(len(scale))
    while used.any():
        found = np.linalg.solve(matrix[np.ix_(used, used)], target[used])
        if (found >= 0).all():
            weights[used] = found / scale[used]
            break
        worst = np.flatnonzero(used)[found.argmin()]
        used[worst] = False
    return weights
