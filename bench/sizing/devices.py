"""What accelerators can do, as their makers' data sheets say, and what that bounds: how fast a step can be at best.

A step reads the weights that its tokens use and the cache of its requests, and computes twice the active parameters
for each token; it takes at least as long as the slower of the two. Real steps take longer; `headway tune` measures.
Source: Williams, Waterman and Patterson, Roofline (2009).
"""

from dataclasses import dataclass

from headway.scheduler.config import ConfigError
from headway.workers.memory import GIB

ENOUGH = 0.8  # of the best tokens a second: more requests at once would only make each of them slower


@dataclass(frozen=True, slots=True)
class Device:
    """`bandwidth`: bytes a second; `flops`: dense 16-bit operations a second."""

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float


# name: GiB that a process sees, GB/s, TFLOP/s of dense bfloat16 (float16 where there is no other)
_SHEETS = {
    "l4": (22.5, 300, 121),
    "a10": (22.5, 600, 125),
    "rtx4090": (23.6, 1008, 165),
    "l40s": (44.5, 864, 362),
    "a100-40": (39.5, 1555, 312),
    "a100-80": (79.2, 2039, 312),
    "h100": (79.6, 3350, 989),
    "h200": (139.8, 4800, 989),
    "b200": (178.0, 8000, 2250),
    "mi300x": (191.5, 5300, 1307),
}


def device_of(name: str) -> Device:
    """One that is known. Raises ConfigError."""
    if name.lower() not in _SHEETS:
        raise ConfigError(f"no device {name!r}; there are {', '.join(_SHEETS)}; or say its memory with --memory")
    gib, gbytes, tflops = _SHEETS[name.lower()]
    return Device(name.lower(), int(gib * GIB), gbytes * 1e9, tflops * 1e12)


@dataclass(frozen=True, slots=True)
class Roof:
    """What bounds a step of one model. Bytes and parameters are those of all devices together, which work at once.

    `fixed_bytes`: read in every step; `expert_bytes`: of all routed experts, of which a token uses `chosen`.
    """

    device: Device
    devices: int
    fixed_bytes: float
    expert_bytes: float
    experts: int
    chosen: int
    active: int
    token_bytes: int

    def step_s(self, requests: int, tokens: int) -> float:
        """At least: one token for each of `requests` that hold `tokens` each."""
        used = 1 - (1 - self.chosen / self.experts) ** requests if self.experts else 0.0
        read = self.fixed_bytes + self.expert_bytes * used + requests * tokens * self.token_bytes
        computed = 2.0 * self.active * requests
        return max(read / self.device.bandwidth, computed / self.device.flops) / self.devices

    def knee(self, tokens: int, most: int) -> int:
        """The fewest requests at once, a power of two or `most`, that reach ENOUGH of the best tokens a second."""
        counts = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
        rates = [count / self.step_s(count, tokens) for count in counts]
        return next(count for count, rate in zip(counts, rates, strict=True) if rate >= ENOUGH * max(rates))
