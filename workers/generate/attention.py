"""Attention over a packed step: each request attends to its own slots and nothing else.

Registered with Transformers under NAME. A name without a mask function makes models build no mask at all; what a token
may see is decided here, from the plan of the step that runs (`planned`: a context variable, because some models pass
nothing on to their attention). Four ways of computing the same thing: FlashAttention-2 varlen; a kernel that reads
pages in place (`paged`); SDPA (decode rows as one rectangle, chunks one by one); and plain matrix products for what
none of them can express (attention sinks, soft-capped scores) or where `eager` was asked for. A layer that asks for
anything else is refused: it would be left out in silence.
"""

from collections.abc import Callable, Set
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from headway.workers.generate import paged
from headway.workers.generate.plan import Plan
from headway.workers.generate.probe import CannotError

NAME = "headway_packed"
FLASH_NAME = "headway_packed_varlen"  # a name with "flash" in it is taken for a kernel of the hub
EAGER_NAME = "headway_packed_eager"
PAGED_NAME = "headway_packed_paged"

HONOURED = {"sliding_window", "s_aux", "softcap"}  # what a layer may ask for beside a scale
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"}  # says nothing here

planned: ContextVar[Plan | None] = ContextVar("planned", default=None)  # set by whoever runs a forward


class PackingError(CannotError):
    """The model asks of attention what the packed form cannot give."""


def _packed(attend: Callable[..., Any]) -> Callable[..., tuple[Any, None]]:
    """`attend(plan, query, key, value, scaling, features)` as Transformers calls an attention:

    `query` [1, heads, T, width], `key` and `value` [1, groups, slots read, width] -> [1, T, heads, value width].
    `features`: what a layer asks for beside (HONOURED; s_aux are sinks). Raises PackingError.
    """

    def packed(
        _module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        **features: Any,
    ) -> tuple[Any, None]:
        plan = planned.get()
        if plan is None:
            raise PackingError("no step is planned: the model was run by someone else")
        check_asked(attention_mask, features, HONOURED)
        plan.layers += 1
        return attend(plan, query, key, value, scaling, features), None

    return packed


def check_asked(attention_mask: Any, features: dict[str, Any], honoured: Set[str]) -> None:
    """A layer asks for nothing but what is `honoured`, or says nothing here. Raises PackingError."""
    if attention_mask is not None or features.get("position_bias") is not None:
        raise PackingError("the model brings a mask or a bias of its own (such as ALiBi)")
    if unknown := {name for name, value in features.items() if value is not None} - honoured - HARMLESS:
        raise PackingError(f"its attention asks for {', '.join(sorted(unknown))}, which the packed form does not know")


@_packed
def packed_sdpa(plan: Plan, query: Any, key: Any, value: Any, scaling: float | None, features: dict[str, Any]) -> Any:
    """By SDPA, and in plain matrix products where a layer has sinks or soft-capped scores."""
    sinks, softcap = features.get("s_aux"), features.get("softcap")
    compute = _sdpa if sinks is None and not softcap else _plain(sinks, softcap)
    return _attend(plan, query, key, value, scaling, features.get("sliding_window") or 0, compute)


@_packed
def packed_eager(plan: Plan, query: Any, key: Any, value: Any, scaling: float | None, features: dict[str, Any]) -> Any:
    """In plain matrix products."""
    compute = _plain(features.get("s_aux"), features.get("softcap"))
    return _attend(plan, query, key, value, scaling, features.get("sliding_window") or 0, compute)


@_packed
def packed_flash(plan: Plan, query: Any, key: Any, value: Any, scaling: float | None, features: dict[str, Any]) -> Any:
    """By FlashAttention-2's varlen kernel: one call for decode rows and chunks together."""
    from flash_attn import flash_attn_varlen_func

    if features.get("s_aux") is not None:
        raise PackingError("FlashAttention-2 has no attention sinks; ask for attention: sdpa")
    width, window = value.shape[-1], features.get("sliding_window")
    if width != query.shape[-1]:  # the kernel wants equal widths
        value = F.pad(value, (0, query.shape[-1] - width))
    out = flash_attn_varlen_func(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q=plan.queries_at,
        cu_seqlens_k=plan.keys_at,
        max_seqlen_q=plan.queries_max,
        max_seqlen_k=plan.keys_max,
        softmax_scale=scaling,
        causal=True,  # aligned at the end: the last query sees the last key
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=features.get("softcap") or 0.0,
    )
    return out[None, ..., :width]


@_packed
def packed_paged(plan: Plan, query: Any, key: Any, value: Any, scaling: float | None, features: dict[str, Any]) -> Any:
    """In one call of a kernel that reads keys and values in their pages."""
    window, sinks, softcap = features.get("sliding_window") or 0, features.get("s_aux"), features.get("softcap")
    return paged.attend(plan, query, key, value, scaling, window, sinks, softcap)


def register() -> None:
    """Make the four functions known to Transformers. Doing it again changes nothing."""
    AttentionInterface.register(NAME, packed_sdpa)
    AttentionInterface.register(EAGER_NAME, packed_eager)
    AttentionInterface.register(FLASH_NAME, packed_flash)
    AttentionInterface.register(PAGED_NAME, packed_paged)


def _attend(plan: Plan, query: Any, key: Any, value: Any, scaling: float | None, window: int, compute: Any) -> Any:
    heads, tokens = query.shape[1:3]
    parts = [
        _rows(plan, index, query[0], key[0], value[0], scaling, window, compute)
        for index in range(len(plan.rectangles))
    ]
    for index, chunk in enumerate(plan.chunks):
        keys = key[:, :, chunk.key_start : chunk.key_end]
        values = value[:, :, chunk.key_start : chunk.key_end]
        plain = chunk.whole and (not window or chunk.key_end - chunk.key_start <= window)
        mask = None if plain and compute is _sdpa else plan.chunk_mask(index, window, query.dtype)
        out = compute(query[:, :, chunk.start : chunk.end], keys, values, mask, scaling, heads // key.shape[1])
        parts.append(out[0].transpose(0, 1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(1, tokens, heads, value.shape[-1])


def _rows(
    plan: Plan, index: int, query: Any, key: Any, value: Any, scaling: float | None, window: int, compute: Any
) -> Any:
    """The decode rows of one rectangle: the queries that share a group are the rows of one small product."""
    start, end, key_start, width = block = plan.rectangles[index]
    rows, groups = end - start, key.shape[0]
    keys = key[:, key_start : block.key_end].unflatten(1, (rows, width)).transpose(0, 1)
    values = value[:, key_start : block.key_end].unflatten(1, (rows, width)).transpose(0, 1)
    queries = query[:, start:end].transpose(0, 1).unflatten(1, (groups, -1))  # [rows, groups, heads of a group, width]
    out = compute(queries, keys, values, plan.row_mask(index, window, query.dtype), scaling, 1)
    return out.reshape(rows, -1, value.shape[-1])


def _sdpa(query: Any, key: Any, value: Any, mask: Any, scaling: float | None, share: int) -> Any:
    """`share`: query heads for each key head. No mask: causal."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=share > 1
    )


def _plain(sinks: Any, softcap: float | None) -> Any:
    """The same by matrix products, with a sink logit for each head and soft-capped scores where the model has them."""

    def compute(query: Any, key: Any, value: Any, mask: Any, scaling: float | None, share: int) -> Any:
        key, value = (states.repeat_interleave(share, 1) for states in (key, value))
        scores = (query @ key.transpose(2, 3)) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask
        if sinks is None:
            return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
        # chunks: [1, heads, tokens, positions]; decode rows: [rows, groups, heads of a group, positions]
        sink = sinks.view(1, scores.shape[1], -1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1]
        return weights.to(value.dtype) @ value

    return compute
