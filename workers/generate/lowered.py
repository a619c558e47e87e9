"""Keys and values in fewer bits: how they are packed for the pages, and back.

A float dtype is a cast. int8 keeps, for each token and head, the numbers as multiples of one scale, their largest
magnitude / 127, stored beside as float16: an error of at most half a scale in each number. Nothing depends on other
tokens, so a page can be written in any order and by any split into steps. Whether a model stands it is for the check at
start to say (`gate.py`), not for this file.
"""

from typing import Any

import torch

LEVELS = 127
SCALE_DTYPE = torch.float16
SCALE_MIN = 2.0**-24  # the least float16: a head of zeros stays zeros


def encode(states: Any, dtype: Any) -> tuple[Any, Any]:
    """`states` [..., width] as `dtype`, and the scales [..., 1] that go with it (None: a float dtype has none)."""
    if dtype is not torch.int8:
        return states.to(dtype), None
    peak = states.abs().amax(-1, keepdim=True).float() / LEVELS
    scale = peak.clamp(SCALE_MIN, torch.finfo(SCALE_DTYPE).max).to(SCALE_DTYPE)
    return (states.float() / scale.float()).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def decode(stored: Any, scale: Any, dtype: Any) -> Any:
    """What `encode` made, as `dtype` again."""
    return stored.to(dtype) if scale is None else stored.to(dtype) * scale.to(dtype)
