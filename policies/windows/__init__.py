"""Windows: launch this batch now, or wait for more? One policy, with its theory, in each file.

`make` builds one by name from the operator's settings; a window of your own is any `headway.policies.views.Window`.
"""

from collections.abc import Callable
from typing import NamedTuple

from headway.policies.views import Window, WindowChoice
from headway.policies.windows.adaptive import adaptive
from headway.policies.windows.aimd import aimd
from headway.policies.windows.fixed import fixed
from headway.policies.windows.greedy import greedy
from headway.policies.windows.optimal_stopping import optimal_stopping
from headway.policies.windows.p95 import LITERAL_CAP_NS, p95, p95_clamped
from headway.policies.windows.ski_rental import ski_rental


class WindowSettings(NamedTuple):
    """What an operator sets: the longest wait, the wait of `fixed`, and the batch time that `aimd` steers to."""

    cap_ns: int
    fixed_ns: int
    target_ns: int


KAPPA_EFFICIENCY = 2.0

MAKERS: dict[str, Callable[[WindowSettings], Window]] = {
    "adaptive": lambda given: adaptive(cap_ns=given.cap_ns),
    "efficiency": lambda given: adaptive(cap_ns=given.cap_ns, kappa=KAPPA_EFFICIENCY, eta=1.0),
    "aimd": lambda given: aimd(target_ns=given.target_ns),
    "fixed": lambda given: fixed(wait_ns=given.fixed_ns),
    "greedy": lambda _given: greedy,
    "optimal_stopping": lambda given: optimal_stopping(cap_ns=given.cap_ns),
    "p95": lambda _given: p95(),
    "p95_clamped": lambda given: p95_clamped(cap_ns=given.cap_ns),
    "ski_rental": lambda given: ski_rental(cap_ns=given.cap_ns),
}


def make(name: str, given: WindowSettings) -> WindowChoice:
    """A new window called `name`, with its bound. Raises KeyError for a name that is not in MAKERS."""
    bound_ns = {"fixed": given.fixed_ns, "p95": LITERAL_CAP_NS}.get(name, given.cap_ns)
    kappa = KAPPA_EFFICIENCY if name == "efficiency" else 1.0
    return WindowChoice(name, MAKERS[name](given), bound_ns, kappa)


__all__ = [
    "MAKERS",
    "WindowSettings",
    "adaptive",
    "aimd",
    "fixed",
    "greedy",
    "make",
    "optimal_stopping",
    "p95",
    "p95_clamped",
    "ski_rental",
]
