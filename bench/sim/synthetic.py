"""Made-up traffic with known laws: Poisson, pulses, on/off, load steps, and clients that wait for their answers.

Everything drawn comes from a seed that is passed in. The open loads are Arrivals like any trace; the closed loop has
no arrival times, because there each answer brings the next request.
"""

from dataclasses import dataclass

import numpy as np

from headway.bench.sim.arrivals import NS_PER_MS, NS_PER_S, Arrivals, Ints, TraceError, ints, plain


@dataclass(frozen=True)
class Sizes:
    """How long inputs and answers are. `spread` 0: all alike, else the sigma of a lognormal with this median."""

    tokens: int = 128
    max_new: int = 0
    spread: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """`count` inputs and answers."""
        return self._some(self.tokens, count, rng), self._some(self.max_new, count, rng)

    def _some(self, median: int, count: int, rng: np.random.Generator) -> Ints:
        if not self.spread or not median:
            return np.full(count, median, np.int64)
        return ints(np.maximum(1, np.rint(median * rng.lognormal(0.0, self.spread, count))))


def poisson(*, rps: float, n: int, sizes: Sizes, seed: int) -> Arrivals:
    """Arrivals that know nothing of each other."""
    rng = np.random.default_rng([seed, 2])
    gaps = rng.exponential(NS_PER_S / _positive("rps", rps), _count(n))
    return _made("poisson", np.cumsum(gaps), sizes, rng)


def pulses(*, burst: int, span_ms: float, idle_ms: float, n: int, sizes: Sizes, seed: int) -> Arrivals:
    """`burst` arrivals at random times in `span_ms`, then nothing for `idle_ms`, and again."""
    rng = np.random.default_rng([seed, 3])
    count = _count(n)
    number = np.arange(count) // _count(burst)
    inside = rng.random(count) * span_ms
    at = np.sort((number * (span_ms + _positive("idle_ms", idle_ms)) + inside) * NS_PER_MS)
    return _made(f"pulses of {burst}", at, sizes, rng)


def on_off(*, rps: float, on_ms: float, off_ms: float, n: int, sizes: Sizes, seed: int) -> Arrivals:
    """Poisson at `rps` while on; on and off last exponential times around their means."""
    rng = np.random.default_rng([seed, 4])
    count = _count(n)
    busy = np.cumsum(rng.exponential(1000.0 / _positive("rps", rps), count))  # ms of being on
    ends = np.cumsum(rng.exponential(_positive("on_ms", on_ms), int(busy[-1] / on_ms * 2) + 50))
    gaps = np.concatenate([[0.0], np.cumsum(rng.exponential(_positive("off_ms", off_ms), len(ends)))])
    return _made("on/off", (busy + gaps[np.searchsorted(ends, busy)]) * NS_PER_MS, sizes, rng)


def steps(*, rates: tuple[float, ...], each_s: float, sizes: Sizes, seed: int) -> Arrivals:
    """Poisson at one rate after the other, each for `each_s` seconds."""
    rng = np.random.default_rng([seed, 5])
    _positive("each_s", each_s)
    parts = []
    for index, rps in enumerate(rates):
        inside = rng.random(rng.poisson(_positive("rates", rps) * each_s))
        parts.append(np.sort((index + inside) * each_s * NS_PER_S))
    at = np.concatenate(parts)
    if not len(at):
        raise TraceError(f"steps: nobody arrives at {rates} requests a second for {each_s} s each")
    return _made("steps", at, sizes, rng)


@dataclass(frozen=True, eq=False)
class ClosedLoop:
    """`clients` who each send, wait for the answer, think (exponential, mean `think_ns`), and send again."""

    clients: int
    think_ns: int
    tokens: Ints
    max_new: Ints

    name = "closed loop"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<ClosedLoop {self.clients} clients, {len(self):,} requests>"


def closed(*, clients: int, think_ms: float, n: int, sizes: Sizes, seed: int) -> ClosedLoop:
    """A closed loop of `n` requests in all."""
    rng = np.random.default_rng([seed, 6])
    tokens, max_new = sizes.draw(_count(n), rng)
    if think_ms < 0:
        raise TraceError(f"think_ms must be at least 0, not {think_ms}")
    return ClosedLoop(_count(clients), int(think_ms * NS_PER_MS), tokens, max_new)


def _made(
    name: str, at_ns: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", sizes: Sizes, rng: np.random.Generator
) -> Arrivals:
    tokens, max_new = sizes.draw(len(at_ns), rng)
    at = np.rint(at_ns).astype(np.int64)
    return plain(name, at - at[0], tokens, max_new)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise TraceError(f"{name} must be more than 0, not {value}")
    return value


def _count(n: int) -> int:
    if n < 1:
        raise TraceError(f"at least one is needed, not {n}")
    return n
