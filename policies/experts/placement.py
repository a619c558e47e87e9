"""Which devices hold which expert, and what that makes of expert counts.

A placement is a table with one entry for each slot: an expert may lie on several devices (replicas share its tokens
equally), as the physical-to-logical maps of DeepSeek's load balancer (EPLB) say. Projection from experts to devices is
linear, so that counts may be projected before or after they are summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.policies.experts.arrays import Floats, Loads

EXPERTS_MAX = 4096  # of a layer; larger maps are a mistake
DEVICES_MAX = 512


@dataclass(frozen=True, slots=True)
class Placement:
    """`share`: [layers, experts, devices] float32, of each expert's tokens that each device gets; rows sum to 1.

    `revision` grows with each change: counts of devices from before it say nothing about after it.
    """

    share: Floats
    revision: int = 0

    def __post_init__(self) -> None:
        if self.share.ndim != 3:
            raise ValueError(f"a placement has three axes (layers, experts, devices), not {self.share.ndim}")
        layers, experts, devices = self.share.shape
        if not layers or not 1 <= experts <= EXPERTS_MAX or not 1 <= devices <= DEVICES_MAX:
            text = f"1 or more layers, up to {EXPERTS_MAX} experts and {DEVICES_MAX} devices"
            raise ValueError(f"a placement has {text}, not {layers} x {experts} x {devices}")
        if not np.allclose(self.share.sum(2), 1.0, atol=1e-4) or (self.share < 0).any():
            raise ValueError("the shares of each expert must be positive and sum to 1")

    def __repr__(self) -> str:
        layers, experts, devices = self.share.shape
        return f"<Placement {self.revision}: {layers} x {experts} experts on {devices} devices>"

    @property
    def devices(self) -> int:
        return int(self.share.shape[2])

    def project(self, counts: Floats) -> Loads:
        """Expert counts [..., layers, experts] as device loads [..., layers, devices]."""
        projected: Loads = np.einsum("...le,lep->...lp", np.asarray(counts, np.float32), self.share)
        return projected


def from_slots(slots: Sequence[Sequence[int]], experts: int, devices: int, revision: int = 0) -> Placement:
    """From a physical-to-logical map: `slots[layer][slot]` is the expert there; devices hold equal runs of slots.

    Raises ValueError if slots do not divide into devices, or an expert lies nowhere.
    """
    share = np.zeros((len(slots), experts, devices), np.float32)
    for layer, row in enumerate(slots):
        if not row or len(row) % devices:
            raise ValueError(f"layer {layer} has {len(row)} slots, which do not divide into {devices} devices")
        if not 0 <= min(row) <= max(row) < experts:
            raise ValueError(f"layer {layer} places an expert outside 0..{experts - 1}")
        np.add.at(share[layer], (np.asarray(row), np.arange(len(row)) * devices // len(row)), 1.0)
    held = share.sum(2, keepdims=True)
    if (held == 0).any():
        layer, expert = np.argwhere(held[:, :, 0] == 0)[0]
        raise ValueError(f"expert {expert} of layer {layer} is on no device")
    return Placement(share / held, revision)


def contiguous(layers: int, experts: int, devices: int) -> Placement:
    """Equal runs of experts, as Transformers' expert parallelism places them."""
    return from_slots([list(range(experts))] * layers, experts, devices)


def packed(load: Floats, devices: int, revision: int = 0) -> Placement:
    """Balanced for a known `load` [layers, experts]: the heaviest expert first, onto the least loaded device with room.

    Source: the packing step of DeepSeek's EPLB, without replicas.
    """
    layers, experts = load.shape
    if experts % devices:
        raise ValueError(f"{experts} experts do not divide into {devices} devices")
    share = np.zeros((layers, experts, devices), np.float32)
    for layer in range(layers):
        weight, room = np.zeros(devices), np.full(devices, experts // devices)
        for expert in np.argsort(-load[layer], kind="stable"):
            device = int(np.argmin(np.where(room > 0, weight, np.inf)))
            share[layer, expert, device] = 1.0
            weight[device] += load[layer, expert]
            room[device] -= 1
    return Placement(share, revision)
