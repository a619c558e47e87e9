"""How much memory operators hold at their fullest moment: what a memory plan is compared with."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the tensors that operators make, `known` ones apart: now, and the `peak`."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._hold(tensor, tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return out

    def _hold(self, tensor: Any, storage: Any) -> None:
        if storage._cdata not in self._held:
            self._held[storage._cdata] = [0, storage.nbytes()]
            self._now += storage.nbytes()
        self._held[storage._cdata][0] += 1
        weakref.finalize(tensor, self._let_go, storage._cdata)

    def _let_go(self, key: int) -> None:
        if key in self._held:
            self._held[key][0] -= 1
            if not self._held[key][0]:
                self._now -= self._held.pop(key)[1]
