"""The router modules of a model: found by what they return, watched by hooks that only keep it.

Uniform over families (Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3, GPT-OSS and others): a router is a module whose class is
named so, that has a weight for each expert, and that returns one tensor of integers among others, the chosen experts.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch

log = logging.getLogger("headway.worker")

ROUTER_NAMES = ("Router", "Gate")  # how the classes of router modules end


class Routers:
    """All router `modules` of a model, in layer order, and which of them are watched.

    `expert_count`, `top_k`, `layers` (all that route); `sampled`: which of them are watched, at most `layers_max`.
    """

    def __init__(self, modules: Sequence[Any], expert_count: int, top_k: int) -> None:
        self.modules = modules
        self.layers, self.expert_count, self.top_k = len(modules), expert_count, top_k
        self.sampled: list[int] = []
        self._seen: list[Any] = []
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        return f"<Routers {len(self.sampled)} of {self.layers} layers, top {self.top_k} of {self.expert_count}>"

    def sample(self, layers_max: int) -> None:
        """Watch so many layers, evenly spaced."""
        for hook in self._hooks:
            hook.remove()
        count = min(layers_max, self.layers)
        self.sampled = [(2 * at + 1) * self.layers // (2 * count) for at in range(count)]
        self._seen = [None] * count
        self._hooks = [
            # first of all hooks: expert parallelism has its own, which leave only a rank's own experts
            self.modules[layer].register_forward_hook(self._keeper(at), prepend=True)
            for at, layer in enumerate(self.sampled)
        ]

    def _keeper(self, at: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            del module, inputs
            self._seen[at] = _indices(output)

        return keep

    def stop(self) -> None:
        """Watch none of them any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], []

    def take(self) -> Any:
        """The indices of the last forward, [sampled layers, tokens, top_k], or None if a layer was not run."""
        seen, self._seen = self._seen, [None] * len(self._seen)
        if any(one is None for one in seen):
            return None
        return torch.stack([one.reshape(-1, one.shape[-1]) for one in seen])


def find_routers(model: Any) -> Routers | None:
    """The routers of `model`, found by what they return on a forward of two tokens; None if nothing routes."""
    named = [module for module in model.modules() if type(module).__name__.endswith(ROUTER_NAMES)]
    if not named:
        return None
    found: dict[int, tuple[Any, Any]] = {}

    def keep(module: Any, inputs: Any, output: Any) -> None:
        del inputs
        indices, weight = _indices(output), getattr(module, "weight", None)
        if indices is not None and weight is not None and weight.ndim == 2:
            found[id(module)] = module, indices

    hooks = [module.register_forward_hook(keep, prepend=True) for module in named]
    try:
        with torch.no_grad():  # weights that are sharded are put together in the forward: no inference tensors
            without = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
            model(torch.tensor([[0, 1]], device=next(model.parameters()).device), **without)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return None
    modules = [found[id(module)][0] for module in named if id(module) in found]
    sizes = {(int(module.weight.shape[0]), int(indices.shape[-1])) for module, indices in found.values()}
    if len(sizes) > 1:
        log.warning("routers of different sizes (%s): their loads are not reported", sorted(sizes))
        return None
    [(experts, top_k)] = sizes
    return Routers(modules, experts, top_k)


def _indices(output: Any) -> Any:
    """The chosen experts in what a router returns, whatever else is in it: the one tensor [..., top_k] of integers."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.ndim >= 2 and part.dtype in (torch.int64, torch.int32):
            return part
    return None
