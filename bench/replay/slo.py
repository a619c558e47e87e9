"""A service level objective: what a request must keep to, to count as good.

    ttft:200,itl:50,e2e:2000     milliseconds; also tpot and queue

`itl` bounds the longest pause between two messages, `tpot` the mean per token: one long stall breaks the first and not
the second. What a request does not have (a pause, without a second token) it cannot break; but a first token that was
asked about must have come.
"""

import math
from collections.abc import Callable

import msgspec

from headway.bench.replay.seen import Seen
from headway.scheduler.config import ConfigError

NS_PER_MS = 1e6


def _itl(one: Seen) -> float | None:
    return max(one.gaps) / NS_PER_MS if one.gaps else None


def _tpot(one: Seen) -> float | None:
    return (one.last_ns - one.first_ns) / NS_PER_MS / (one.output - 1) if one.output > 1 and one.first_ns else None


_OF: dict[str, Callable[[Seen], float | None]] = {
    "ttft": lambda one: (one.first_ns - one.due_ns) / NS_PER_MS if one.first_ns else float("inf"),
    "tpot": _tpot,
    "itl": _itl,
    "e2e": lambda one: (one.done_ns - one.due_ns) / NS_PER_MS,
    "queue": lambda one: one.queue_ms,
}


class Slo(msgspec.Struct, frozen=True):
    """Bounds in milliseconds, by name."""

    bounds: dict[str, float]

    @property
    def text(self) -> str:
        """As it was given."""
        return ",".join(f"{name}:{bound:g}" for name, bound in self.bounds.items())

    def met(self, one: Seen) -> bool:
        """Of a request that ended well."""
        values = ((_OF[name](one), bound) for name, bound in self.bounds.items())
        return all(value is None or value <= bound for value, bound in values)


def parse(text: str) -> Slo:
    """From the command line. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition(":")
        name = {"e2el": "e2e"}.get(name.strip(), name.strip())
        try:
            bound = float(value)
        except ValueError:
            bound = -1.0
        if name not in _OF or not 0 < bound < math.inf:
            raise ConfigError(f"--slo {pair!r}: give name:milliseconds with {', '.join(_OF)}, as in ttft:200,e2e:2000")
        if name in bounds:
            raise ConfigError(f"--slo {text!r} bounds {name} twice")
        bounds[name] = bound
    if not bounds:
        raise ConfigError("--slo is empty; give name:milliseconds, as in ttft:200,itl:50,e2e:2000")
    return Slo(bounds)
