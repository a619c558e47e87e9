"""Whose turn: tenants share each service by tokens. Who has been served least goes first.

Each tenant has a virtual counter of the tokens it was served (input as dispatched, output as generated), divided by its
weight. The tenant with the lowest counter goes next; within a tenant the order policy decides. A tenant that comes back
after having had nothing waiting is lifted to the counter of whoever is being served, so that idleness earns no credit.
The counters of two tenants that both wait all the time therefore never differ by more than two batches of the largest
requests, one of them because a newcomer starts where the last batch began; a request's output is only guessed when it
is dispatched, and the guess is set right when it ends.

With one tenant nothing of this is felt, and nothing is paid.

Source: the virtual token counter of Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), which is
start-time fair queueing (Goyal, Vin and Cheng, 1996) for requests of unknown length.
"""

from collections.abc import Mapping

TENANTS_KEPT = 4096  # past it, the history of tenants without a waiting request is forgotten: names cost nothing


class Tenant:
    """One tenant's account. `served`: virtual tokens; never falls. `owed`: corrections that the next turn settles."""

    __slots__ = ("name", "owed", "served", "waiting", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.served = 0.0
        self.owed = 0.0
        self.waiting = 0  # requests, in all lanes

    def __repr__(self) -> str:
        return f"<Tenant {self.name!r} served {self.served:.0f}, {self.waiting} waiting>"

    def charge(self, tokens: int) -> None:
        """It gets `tokens` of service now."""
        due = tokens / self.weight + self.owed
        if due >= 0.0:
            self.served += due
            self.owed = 0.0
        else:
            self.owed = due

    def correct(self, tokens: int) -> None:
        """It got so many tokens more (or fewer, below 0) than it was charged for."""
        self.owed += tokens / self.weight


class Shares:
    """The accounts of one service. `weights`: what a tenant's share is worth; 1 for those not named."""

    __slots__ = ("_floor", "_weights", "tenants")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._weights = weights
        self._floor = 0.0

    def __repr__(self) -> str:
        return f"<Shares of {len(self.tenants)} tenants>"

    def enter(self, name: str) -> Tenant:
        """One more request of this tenant waits."""
        tenant = self.tenants.get(name)
        if tenant is None:
            if len(self.tenants) >= TENANTS_KEPT:
                self.tenants = {one.name: one for one in self.tenants.values() if one.waiting}
            tenant = self.tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        if not tenant.waiting and tenant.served < self._floor:
            tenant.served = self._floor
        tenant.waiting += 1
        return tenant

    def reached(self, served: float) -> None:
        """The tenant whose turn it is stands at `served`: no newcomer starts below."""
        if served > self._floor:
            self._floor = served
