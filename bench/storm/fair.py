"""The law of shares: of two tenants that both wait all the time, neither gets more than a few batches ahead.

Service is tokens, read and made, divided by the tenant's weight. Looked at from the moment at which both wait in the
short lane, and no more once requests of the service had to run again: what was charged for a run that came to nothing
is given back as later turns, so that the tenants are even only after those. The bound is two of the largest batches (a
newcomer starts where the last batch began); as many more as long inputs can run at once, which go by due time; and
twice what all seats may still make, which is only guessed when a request starts.
"""

from collections.abc import Mapping
from itertools import combinations


class Shares:
    """One service. `got`: service of each tenant so far; `largest`: tokens of a batch, all it may make included.
    Weights are 1 or more here, so that no batch is worth more."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.got: dict[str, float] = {}
        self.largest = 0
        self.long = 0  # the most long inputs that could run at once, if any did
        self._weights = weights
        self._over = False
        self._since: dict[tuple[str, str], float] = {}
        self._unlike: set[str] = set()  # tenants with a long input since they last had nothing waiting

    def __repr__(self) -> str:
        return f"<Shares {self.got}>"

    def serve(self, tenant: str, tokens: int) -> None:
        """It gets so many tokens."""
        self.got[tenant] = self.got.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def turn(self, tokens: int) -> None:
        """A batch goes, of at most so many tokens."""
        self.largest = max(self.largest, tokens)

    def again(self) -> None:
        """Requests had to run again."""
        self._over = True

    def gap(self, short: set[str], long: set[str]) -> tuple[float, str, str]:
        """The largest distance of two that have both waited since it was last looked; their names."""
        self._unlike = (self._unlike & (short | long)) | long
        waiting = sorted(short - self._unlike)
        pairs = [] if self._over else list(combinations(waiting, 2))
        self._since = {pair: self._since.get(pair, self._ahead(*pair)) for pair in pairs}
        gaps = [(abs(self._ahead(*pair) - since), *pair) for pair, since in self._since.items()]
        return max(gaps, default=(0.0, "", ""))

    def _ahead(self, one: str, other: str) -> float:
        return self.got.get(one, 0.0) - self.got.get(other, 0.0)
