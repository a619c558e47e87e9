"""Windows: launch this batch now, or wait for more? One policy, with its theory, in each file.

`make` builds one by name from the operator's settings; a window of your own is any `headway.policies.views.Window`.
"""

from collections.abc import Callable

from headway.policies.views import Window
from headway.policies.windows.adaptive import adaptive
from headway.policies.windows.fixed import fixed
from headway.policies.windows.greedy import greedy
from headway.policies.windows.p95 import p95, p95_clamped

MAKERS: dict[str, Callable[[int, int], Window]] = {
    "adaptive": lambda cap_ns, _fixed_ns: adaptive(cap_ns=cap_ns),
    "efficiency": lambda cap_ns, _fixed_ns: adaptive(cap_ns=cap_ns, kappa=2.0, eta=1.0),
    "fixed": lambda _cap_ns, fixed_ns: fixed(wait_ns=fixed_ns),
    "greedy": lambda _cap_ns, _fixed_ns: greedy,
    "p95": lambda _cap_ns, _fixed_ns: p95(),
    "p95_clamped": lambda cap_ns, _fixed_ns: p95_clamped(cap_ns=cap_ns),
}


def make(name: str, *, cap_ns: int, fixed_ns: int) -> Window:
    """The window called `name`. Raises KeyError for a name that is not in MAKERS."""
    return MAKERS[name](cap_ns, fixed_ns)


__all__ = ["MAKERS", "adaptive", "fixed", "greedy", "make", "p95", "p95_clamped"]
