"""The compiled kernels of `kernels.c`, as Python calls them: tensors in, pointers over."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headway.workers.generate.compiled import CannotCompileError, library

SOURCE = Path(__file__).with_name("kernels.c")

_POINTER, _NUMBER, _FLOAT, _COUNT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS: dict[str, list[Any]] = {
    "headway_attend": [_POINTER, _POINTER, _NUMBER, _COUNT],
    "headway_rms": [_POINTER] * 3 + [_NUMBER] * 2 + [_FLOAT, _COUNT],
    "headway_silu_mul": [_POINTER] * 3 + [_NUMBER] * 4 + [_COUNT],
    "headway_rope": [_POINTER] * 4 + [_NUMBER] * 5 + [_COUNT],
}


def missing() -> str:
    """Why there are no kernels on this machine, or nothing."""
    try:
        kernel("headway_attend")
    except CannotCompileError as error:
        return str(error)
    return ""


@cache
def kernel(name: str) -> Any:
    """A function of the library. Raises CannotCompileError."""
    found = getattr(library(SOURCE), name)
    found.argtypes, found.restype = _ARGUMENTS[name], None
    return found


def dense(part: Any) -> Any:
    """With the numbers of a row, or a head, side by side."""
    return part if part.stride(-1) == 1 else part.contiguous()


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """x / sqrt(mean(x²) + eps) × weight over the last dimension of `x`, in its shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    kernel("headway_rms")(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, torch.get_num_threads()
    )
    return out


def silu_mul(gate: Any, up: Any) -> Any:
    """silu(gate) × up; both [1, tokens, width]."""
    gate, up = dense(gate), dense(up)
    _, tokens, width = gate.shape
    out = gate.new_empty((1, tokens, width))
    kernel("headway_silu_mul")(
        *(part.data_ptr() for part in (gate, up, out)),
        *(tokens, width, gate.stride(1), up.stride(1)),
        torch.get_num_threads(),
    )
    return out


def rope(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions of `x` [1, heads, tokens, width] by cos and sin, [1, 1, tokens, width]; so that a token's heads
    lie side by side."""
    x = dense(x)
    _, heads, tokens, width = x.shape
    out = x.new_empty((1, tokens, heads, width))
    kernel("headway_rope")(
        *(part.data_ptr() for part in (x, cos.contiguous(), sin.contiguous(), out)),
        *(tokens, heads, width, x.stride(2), x.stride(1)),
        torch.get_num_threads(),
    )
    return out.transpose(1, 2)
