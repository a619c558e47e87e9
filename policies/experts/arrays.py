"""The arrays that expert-aware scheduling speaks in, and the few numbers read from them.

A load is a float32 array [layers, groups]: tokens for each group of experts (a device, or a single expert) in each
sampled layer. A step waits in every layer for its hottest group, so the sum over layers of the maximum is its time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Loads = Floats  # [..., layers, groups]


def critical(loads: Loads) -> float:
    """What a step waits for: the hottest group of each layer, summed over layers."""
    return float(loads.max(-1).sum())


def imbalance(loads: Loads) -> float:
    """Hottest over mean, 1.0 where every group has the same (or nothing was routed)."""
    mean = float(loads.mean(-1).sum())
    return critical(loads) / mean if mean > 0 else 1.0
