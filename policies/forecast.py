"""What is said of a mixture of experts between the live side and the core: plain values, so that they can be recorded.

Loads and counts travel as little-endian float32, [layers, groups] flattened. The core only hands them on; whoever reads
them is policies/experts, which needs numpy. This file does not.
"""

from msgspec import Struct


class ExpertFacts(Struct, frozen=True, gc=False):
    """How a service's workers report where tokens go, and how it is to be scheduled (see ExpertAware)."""

    layers: int
    groups: int
    slots: int
    top_k: int = 1
    grouping: bool = False
    joining: bool = False
    slo_ns: int = 0
    placement: int = 0


class LoadForecast(Struct, frozen=True, gc=False):
    """What a request of so many input `tokens` is expected to ask for; `decode`: tokens that will follow."""

    load: bytes
    tokens: int
    decode: float = 0.0


class LoadReport(Struct, frozen=True, gc=False):
    """Where `tokens` of a request went: of its `prompt`, or decoded."""

    batch: int
    rid: int
    prompt: bool
    tokens: int
    counts: bytes
