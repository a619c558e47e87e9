"""The device a model runs on: which one, in what dtype, and how much of its memory is free.

Lives here: everything asked of a device before and beside a model. Never here: models. What a dtype should be is a
pure function of the kind of device and its compute capability, so that it can be tested without one.
"""

from pathlib import Path
from typing import Any

import psutil
import torch

from headway.workers.packaged import LoadError

BF16_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 in its tensor cores; before, it is emulated and slow
CGROUP = Path("/sys/fs/cgroup")


def pick_device(name: str) -> Any:
    """The torch device `name` stands for. Raises LoadError if this machine lacks it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"the device {name!r} is not usable here: {error}") from error
    return device


def auto_dtype(kind: str, capability: tuple[int, int] | None = None) -> str:
    """The dtype that suits a device of `kind` ("cpu", "cuda", ...) and compute `capability`.

    bfloat16 on data-centre cards that compute in it, float16 on older ones, float32 on a CPU and wherever nothing is
    known.
    """
    if kind != "cuda" or capability is None:
        return "float32"
    return "bfloat16" if capability >= BF16_CAPABILITY else "float16"


def pick_dtype(name: str, device: Any) -> Any:
    """The torch dtype `name` stands for on `device`."""
    if name == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        name = auto_dtype(device.type, capability)
    return getattr(torch, name)


def describe(device: Any) -> str:
    """The device as a person knows it."""
    return str(device) if device.type != "cuda" else f"{device} ({torch.cuda.get_device_name(device)})"


def free_bytes(device: Any) -> int:
    """Memory of `device` that a new model can have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min([psutil.virtual_memory().available, *_cgroup_room(CGROUP)])


def _cgroup_room(folder: Path) -> list[int]:
    """What a container's own limit leaves, file cache that can be dropped included; empty without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [] if limit == "max" else [max(0, int(limit) - used + int(stat.get("inactive_file", 0)))]
