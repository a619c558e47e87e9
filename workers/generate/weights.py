"""Linear layers whose weights lie as the CPU's matrix kernels want them (oneDNN), arranged once, after loading.

A step of generation has few rows, so that a plain product spends its time fetching and rearranging weights: with 16
rows oneDNN on a packed weight takes 0.6 of the time of MKL on a plain one, and at no number of rows longer. The model
stays the Transformers model it is: its linear layers keep class, name and place, and only their own `forward` is
replaced. Layers that are given the same rows one after the other (queries, keys and values; gate and up) are computed
as one product, by the first of them: fewer calls, and none of them small. Which those are is seen in a run, not read
from names. Sums are rounded in another order than before, which is why whoever packs verifies the model afterwards, and
then either takes it back (`restore`) or gives the plain weights' memory back (`release`).
"""

import logging
from collections.abc import Callable, Sequence
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
        self._calls: list[tuple[Any, Any]] = []  # (layer, rows) of a run, until `join`
        self._hooks = [layer.register_forward_pre_hook(self._note) for layer in layers]
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

    def join(self) -> int:
        """After a run: make one product of those layers that were given the same rows. Returns how many are joined."""
        plain, groups = {id(layer): weight for layer, weight in self._plain}, _together(self._calls)
        self._stop_noting()
        for layers in groups:
            shared = _Joined([plain[id(layer)].detach() for layer in layers], [layer.bias for layer in layers])
            for at, layer in enumerate(layers):
                layer.forward = shared.part(at)
        return sum(map(len, groups))

    def separate(self) -> None:
        """Each layer by itself again."""
        for layer, weight in self._plain:
            layer.forward = _product(weight.detach(), layer.bias)

    def restore(self) -> None:
        """The model is as it came."""
        self._stop_noting()
        for layer, weight in self._plain:
            del layer.forward
            layer.weight = weight
        self._plain, self.bytes, self.more_bytes = [], 0, 0

    def release(self) -> None:
        """Let go of the plain weights: there is no way back."""
        self._plain = []
        self._stop_noting()

    def _note(self, layer: Any, given: tuple[Any, ...]) -> None:
        self._calls.append((layer, given[0]))

    def _stop_noting(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._calls = [], []


class _Joined:
    """Layers of the same rows as one product. Whoever is called first with new rows computes it for all."""

    def __init__(self, weights: Sequence[Any], biases: Sequence[Any]) -> None:
        self._sizes = [len(weight) for weight in weights]
        bias = None
        if any(one is not None for one in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([weight.new_zeros(len(weight)) if one is None else one for weight, one in pairs])
        self._product = _product(torch.cat(list(weights)), bias)
        self._rows: Any = None
        self._parts: list[Any] = []

    def part(self, at: int) -> Callable[[Any], Any]:
        """What takes the place of the forward of layer `at`."""

        def forward(rows: Any) -> Any:
            if rows is not self._rows or self._parts[at] is None:
                self._rows, self._parts = rows, list(self._product(rows).split(self._sizes, -1))
            part, self._parts[at] = self._parts[at], None
            if at == len(self._sizes) - 1:
                self._rows, self._parts = None, []  # nothing is kept alive between steps
            return part

        return forward


def packed_if_right(model: Any, check: Callable[[], object]) -> PackedWeights:
    """The weights of `model`, packed for the CPU if it then passes `check` (which raises if not), else as they came."""
    weights = PackedWeights(model)
    if weights.bytes:
        try:
            check()
        except Exception as error:  # kernels may raise anything too
            log.warning("weights stay as they came, which is slower: %s", reason(error))
            weights.restore()
        else:
            _join_if_right(weights, check)
    weights.release()
    return weights


def _join_if_right(weights: PackedWeights, check: Callable[[], object]) -> None:
    if not weights.join():
        return
    try:
        check()
    except Exception as error:  # code that wants its layers' results side by side in memory
        log.info("each layer is computed by itself, which is a little slower: %s", reason(error))
        weights.separate()


def _together(calls: Sequence[tuple[Any, Any]]) -> list[list[Any]]:
    """Layers that were always given the same rows, one right after the other, in that order."""
    runs: list[list[Any]] = []
    last: Any = None
    for layer, rows in calls:
        if rows is last:
            runs[-1].append(layer)
        else:
            runs.append([layer])
        last = rows
    always: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        ids = tuple(map(id, run))
        for layer in run:
            always.setdefault(id(layer), set()).add(ids)
    found = {tuple(map(id, run)): run for run in runs if len(run) > 1}
    return [
        run
        for ids, run in found.items()
        if len(set(ids)) == len(ids) and all(always[id(layer)] == {ids} for layer in run)
    ]


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
    return _product(layer.weight.detach(), layer.bias)


def _product(weight: Any, bias: Any) -> Callable[[Any], Any]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(rows: Any) -> Any:
        return product(rows, packed, bias, "none", [], "")

    return forward
