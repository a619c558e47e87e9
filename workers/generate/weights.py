"""Linear layers whose weights lie as the CPU's matrix kernels want them (oneDNN), arranged once, after loading.

A step of generation has few rows, so that a plain product spends its time fetching and rearranging weights: with 16
rows oneDNN on a packed weight takes 0.6 of the time of MKL on a plain one, and at no number of rows longer. The model
stays the Transformers model it is: its linear layers keep class, name and place, and only their own `forward` is
replaced. Sums are rounded in another order than before, which is why whoever packs verifies the model afterwards, and
then either takes it back (`restore`) or gives the plain weights' memory back (`release`).
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from headway.workers.generate.probe import reason

log = logging.getLogger("headway.worker")

PACK_MIN = 1 << 16  # weights in a layer: below, calling the other kernel costs what it saves
ROWS_HINT = 16  # the layout is the same for all numbers of rows that matter; any number gives right results


class PackedWeights:
    """Packs the linear layers of `model` that can be. `bytes`: what the packed copies take; 0 where nothing was packed;
    `more_bytes`: of these, what comes on top of the plain weights, because they stay.

    Where a plain weight was, NaN stands: code that reads it instead of calling the layer is found out by a probe. A
    weight that another module uses too (a tied embedding) stays.
    """

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        layers = [module for module in modules if _packable(module)]
        chosen = set(map(id, layers))
        used = {id(one) for module in modules if id(module) not in chosen for one in module.parameters(recurse=False)}
        self._plain: list[tuple[Any, Any]] = [(layer, layer.weight) for layer in layers]
        self.bytes = self.more_bytes = 0
        for layer, weight in self._plain:
            layer.forward = _forward(layer)
            self.bytes += weight.numel() * weight.element_size()
            if id(weight) not in used:
                nothing = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
                layer.weight = torch.nn.Parameter(nothing, requires_grad=False)
            else:
                self.more_bytes += weight.numel() * weight.element_size()

    def __repr__(self) -> str:
        return f"<PackedWeights {self.bytes >> 20} MiB>"

    def restore(self) -> None:
        """The model is as it came."""
        for layer, weight in self._plain:
            del layer.forward
            layer.weight = weight
        self._plain, self.bytes, self.more_bytes = [], 0, 0

    def release(self) -> None:
        """Let go of the plain weights: there is no way back."""
        self._plain = []


def packed_if_right(model: Any, check: Callable[[], object]) -> PackedWeights:
    """The weights of `model`, packed for the CPU if it then passes `check` (which raises if not), else as they came."""
    weights = PackedWeights(model)
    if weights.bytes:
        try:
            check()
        except Exception as error:  # kernels may raise anything too
            log.warning("weights stay as they came, which is slower: %s", reason(error))
            weights.restore()
    weights.release()
    return weights


def _packable(module: Any) -> bool:
    """A plain linear layer on a CPU, large enough, of a type the kernels of this build and CPU take."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    if weight.device.type != "cpu" or weight.numel() < PACK_MIN or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _forward(layer: Any) -> Callable[[Any], Any]:
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS_HINT)
    bias, product = layer.bias, torch.ops.mkldnn._linear_pointwise.default

    def forward(rows: Any) -> Any:
        return product(rows, packed, bias, "none", [], "")

    return forward
