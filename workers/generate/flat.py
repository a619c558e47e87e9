"""A model's forward as the list of tensor operations that it comes down to, with small ones in a row made one.

A step of a small model on a CPU spends a quarter of its time on operations that take longer to call than to compute.
So the forward is traced once (`torch.fx`), with the number of tokens left open, and what the list contains of the usual
(root mean square norms, rotary positions, gated units, residual sums after a product) is done by one kernel each. The
model itself stays as it is, and is what the list is checked against: with pieces of prompts, rows, and a single token.
A model that decides by what it sees, or whose trace holds for some numbers of tokens only, is run as before.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface

from headway.workers.generate import kernels, paged
from headway.workers.generate.attention import check_asked, planned
from headway.workers.generate.pages import PagedCache
from headway.workers.generate.plan import Plan
from headway.workers.generate.probe import CannotError

NAME = "headway_traced"
TOKENS, KEPT = 11, 5  # of the trace: each number stands for itself only
LEAST = 4  # tokens in a step; with fewer, oneDNN's products take longer (SmolLM2: 24 ms with 1, 27 with 2, 20 with 4)

aten = torch.ops.aten
_library = torch.library.Library("headway", "DEF")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int window) -> Tensor")


def _shape_only(query: Any, _key: Any, value: Any, _layer: int, _scale: float, _window: int) -> Any:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


_library.impl("attend", _shape_only, "Meta")


class _Recorder(PagedCache):
    """Keeps nothing; remembers which layer's keys it was given."""

    def __init__(self) -> None:
        super().__init__(0)
        self.given: tuple[Any, Any] = (None, -1)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **_kwargs: Any) -> tuple[Any, Any]:
        self.given = (key_states, layer_idx)
        return key_states, value_states


class Flat:
    """The forward of `model` written down: it needs `model` no more, but for its weights.

    `cache_name`, `keeps`: what its forward calls the cache, and whether it computes the logits of some rows only.
    Raises CannotError, or whatever tracing raises, where the model cannot be written down so.
    """

    def __init__(self, model: Any, cache_name: str, *, keeps: bool) -> None:
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            raise CannotError("somebody watches its layers")
        self.operations = _traced(model, cache_name, keeps)
        _check_open(self.operations)
        _fuse(self.operations)
        self._first = torch.zeros(1, dtype=torch.int64)

    def __repr__(self) -> str:
        return f"<Flat {len(self.operations.graph.nodes)} operations>"

    def __call__(self, plan: Plan) -> Any:
        """Logits [rows that end here, vocabulary]. `plan` is the one that is planned, and knows its cache."""
        ids, positions, count = plan.ids, plan.positions, len(plan.lasts)
        if plan.tokens < LEAST:
            ids, positions = (F.pad(part, (0, LEAST - plan.tokens)) for part in (ids, positions))
        return self.operations(ids, positions, plan.lasts if count else self._first)[:count]


def _traced(model: Any, cache_name: str, keeps: bool) -> GraphModule:
    """(ids [1, T], positions [1, T], rows [R]) -> logits [R, vocabulary]"""
    recorder, before = _Recorder(), model.config._attn_implementation
    AttentionInterface.register(NAME, _attention_of(recorder))

    def forward(ids: Any, positions: Any, rows: Any) -> Any:
        options = {cache_name: recorder, "use_cache": True}
        if keeps:
            return model(ids, position_ids=positions, logits_to_keep=rows, **options).logits[0]
        return model(ids, position_ids=positions, **options).logits[0][rows]

    examples = torch.arange(TOKENS)[None], torch.arange(TOKENS)[None], torch.arange(KEPT)
    try:
        model.set_attn_implementation(NAME)
        with torch.inference_mode(False), torch.no_grad():
            return make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    finally:
        model.set_attn_implementation(before)


def _attention_of(recorder: _Recorder) -> Callable[..., Any]:
    def attention(
        _module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **features: Any
    ) -> tuple[Any, None]:
        given, layer = recorder.given
        check_asked(mask, features, {"sliding_window"})
        if key is not given:
            raise CannotError("its attention gets other keys than the cache gave")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return torch.ops.headway.attend(query, key, value, layer, scale, features.get("sliding_window") or 0), None

    return attention


def _check_open(made: GraphModule) -> None:
    """What was traced must hold for any number of tokens."""
    sizes = [node.meta["val"] for node in made.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    for size in sizes:
        if guards := size.node.shape_env.guards:
            raise CannotError(f"it goes by the number of tokens: {guards[0].expr}")


# ---------------------------------------------------------------- what takes the place of operations


def attend(query: Any, key: Any, value: Any, layer: int, scale: float, window: int, *rotary: Any) -> Any:
    """The attention of the step that runs, after its keys and values are written. `rotary`: cos and sin for query and
    key, if they are not rotated yet."""
    plan = planned.get()
    assert plan is not None, "no step is planned"
    plan.layers += 1
    left = query.shape[2] - plan.tokens
    if not left:
        return paged.write_and_attend(plan, query, key, value, layer, scale, window, rotary)
    query, key, value, *rotary_of = (part[:, :, : plan.tokens] for part in (query, key, value, *rotary))
    out = paged.write_and_attend(plan, query, key, value, layer, scale, window, rotary_of)
    return F.pad(out, (0, 0, 0, 0, 0, left))


def add_product(other: Any, rows: Any, weight: Any, bias: Any) -> Any:
    """rows × weight + bias + other."""
    return torch.ops.mkldnn._linear_pointwise.binary(rows, other, weight, bias, "add")


def _fuse(made: GraphModule) -> None:
    """Put one kernel in the place of small operations in a row, and compute nothing twice."""
    graph = made.graph
    seen: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            node.meta["val"] = getattr(made, node.target)
        if node.op != "call_function":
            continue
        if node.target is torch.ops.headway.attend.default:
            node.target, node.args = attend, _unrotated(node)
        if node.target is aten.unsqueeze.default and (first := seen.setdefault(node.args, node)) is not node:
            node.replace_all_uses_with(first)
        for rule in (_norm, _rotary, _gated, _residual):
            found = rule(node)
            if found is not None:
                target, arguments = found
                with graph.inserting_before(node):
                    made_one = graph.call_function(target, arguments)
                made_one.meta = node.meta
                node.replace_all_uses_with(made_one)
                break
    graph.eliminate_dead_code()
    made.recompile()


Found = tuple[Callable[..., Any], tuple[Any, ...]] | None


def _is(node: Any, target: Any, *, single: bool = True) -> bool:
    """A call of `target`, whose result is used once if `single`."""
    return isinstance(node, Node) and node.target is target and (not single or len(node.users) == 1)


def _full(*nodes: Any) -> bool:
    """Tensors of float32."""
    return all(isinstance(node, Node) and node.meta["val"].dtype == torch.float32 for node in nodes)


def _shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _norm(node: Node) -> Found:
    """weight × (x × rsqrt(mean(x²) + eps))"""
    if not _is(node, aten.mul.Tensor, single=False):
        return None
    for scaled, weight in (node.args, node.args[::-1]):
        if not _is(scaled, aten.mul.Tensor) or not _full(weight) or len(_shape(weight)) != 1:
            continue
        for x, root in (scaled.args, scaled.args[::-1]):
            if not _is(root, aten.rsqrt.default) or not _is(root.args[0], aten.add.Tensor) or not _full(x):
                continue
            mean, eps = root.args[0].args
            if not _is(mean, aten.mean.dim) or mean.args[1:] != ([-1], True) or not isinstance(eps, float):
                continue
            square = mean.args[0]
            if _is(square, aten.pow.Tensor_Scalar) and square.args == (x, 2) and _shape(x)[-1] == _shape(weight)[0]:
                return kernels.rms_norm, (x, weight, eps)
    return None


def _rotary(node: Node) -> Found:
    """x × cos + cat(-x[second half], x[first half]) × sin"""
    if not _is(node, aten.add.Tensor, single=False) or node.kwargs:
        return None
    for plain, turned in (node.args, node.args[::-1]):
        if not _is(plain, aten.mul.Tensor) or not _is(turned, aten.mul.Tensor):
            continue
        (x, cos), (halves, sin) = plain.args, turned.args
        if not _full(x, cos, sin) or len(_shape(x)) != 4 or not _are_turned(halves, x):
            continue
        if all(_shape(part) == (1, 1, *_shape(x)[2:]) for part in (cos, sin)):
            return kernels.rope, (x, cos, sin)
    return None


def _are_turned(node: Any, x: Node) -> bool:
    """cat(-x[second half], x[first half])"""
    if not _is(node, aten.cat.default) or len(node.args[0]) != 2 or node.args[1:] != (-1,):
        return False
    negative, first = node.args[0]
    if not _is(negative, aten.neg.default) or not _is(negative.args[0], aten.slice.Tensor):
        return False
    second, width = negative.args[0], _shape(x)[-1]
    if not _is(first, aten.slice.Tensor) or first.args != (x, 3, 0, width // 2) or width % 2:
        return False
    return bool(second.args[:3] == (x, 3, width // 2) and second.args[3] >= width)


def _unrotated(node: Node) -> tuple[Any, ...]:
    """The arguments of an attention; where query and key are rotated for it alone, before that, and by what."""
    query, key, *others = node.args
    if _is(query, kernels.rope) and _is(key, kernels.rope) and query.args[1:] == key.args[1:]:
        return (query.args[0], key.args[0], *others, *query.args[1:])
    return node.args


def _gated(node: Node) -> Found:
    """silu(gate) × up"""
    if not _is(node, aten.mul.Tensor, single=False):
        return None
    for active, up in (node.args, node.args[::-1]):
        if _is(active, aten.silu.default) and _full(up) and _shape(up) == _shape(active) and len(_shape(up)) == 3:
            return kernels.silu_mul, (active.args[0], up)
    return None


def _residual(node: Node) -> Found:
    """other + rows × weight"""
    if not _is(node, aten.add.Tensor, single=False) or node.kwargs:
        return None
    for product, other in (node.args[::-1], node.args):
        if (
            _is(product, torch.ops.mkldnn._linear_pointwise.default)
            and _full(other)
            and _shape(other) == _shape(product)
        ):
            rows, weight, bias, after, *_ = product.args
            if after == "none":
                return add_product, (other, rows, weight, bias)
    return None
