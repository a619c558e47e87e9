"""Attention on a CPU that reads keys and values where they lie: no gathering, no padding, no mask (`kernels.c`).

Gathering the keys and values of a step costs as much memory traffic as attention itself, and the CPU's attention
kernels are made for many queries: with 16 decode rows of 200 tokens this takes a quarter of the time of both. It needs
a C compiler once (`compiled`), float32, and a cache that stores what the model computes; attention sinks and
soft-capped scores are left to the other ways. Like them it is chosen only if it answers as the model itself does.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from headway.workers.generate import kernels
from headway.workers.generate.plan import Plan
from headway.workers.generate.probe import CannotError

ROWS = 32  # of a task at most; as in the source
WIDTH_MAX = 512  # of a head: what a task has on its stack grows with it

_POINTERS = ("query", "keys", "values", "out", "slots", "spans")
_NUMBERS = ("query_head", "query_token", "heads", "groups", "key_width", "value_width", "window")
_NEW_POINTERS = ("new_keys", "new_values", "write")
_NEW_NUMBERS = ("new_count", "key_head", "key_token", "value_head", "value_token")
_ROTARY = ("cos", "sin")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in _NEW_POINTERS),
        *((name, ctypes.c_int64) for name in _NEW_NUMBERS),
        *((name, ctypes.c_void_p) for name in _ROTARY),
        ("scale", ctypes.c_float),
    )


class Tables:
    """What the kernel needs to know of a step that is the same in all layers."""

    def __init__(self, plan: Plan) -> None:
        self._lengths = plan.lengths
        self.slots = plan.read
        rows, query, slot = [], 0, 0
        for count, end in self._lengths:
            rows.append((query, count, slot, end))
            query, slot = query + count, slot + end
        self.spans = torch.tensor(rows)
        self._tasks: dict[int, Any] = {}

    def tasks(self, share: int) -> Any:
        """[tasks, 3]: span, first query in it, queries; so many that with `share` heads a group they are ROWS at most.
        What reads most comes first, so that the threads end together."""
        if share not in self._tasks:
            self._tasks[share] = torch.tensor(_cut(self._lengths, ROWS // share))
        return self._tasks[share]


def attend(
    plan: Plan, query: Any, key: Any, value: Any, scaling: float | None, window: int, sinks: Any, softcap: Any
) -> Any:
    """`query` [1, heads, T, width], `key` and `value` as the cache gave them, written -> [1, T, heads, value width].

    Raises CannotError for what the kernel cannot do.
    """
    given, keys, values = plan.reached
    if key is not given:
        raise CannotError("its attention gets other keys than the cache gave")
    if sinks is not None or softcap:
        raise CannotError("its attention has sinks or soft-capped scores")
    heads, _, width = query.shape[1:]
    groups, value_width = value.shape[1], value.shape[3]
    if heads % groups or heads // groups > ROWS or max(width, value_width) > WIDTH_MAX:
        raise CannotError(f"{heads} heads of {width} on {groups} groups are not what the kernel is made for")
    if not query.dtype == keys.dtype == values.dtype == torch.float32 or query.device.type != "cpu":
        raise CannotError("the kernel computes in float32, on a CPU")
    return _call(plan, query, keys, values, width**-0.5 if scaling is None else scaling, window)


def write_and_attend(
    plan: Plan, query: Any, key: Any, value: Any, layer: int, scale: float, window: int, rotary: Sequence[Any] = ()
) -> Any:
    """The same, of what `attend` has taken before, in one call with writing `key` and `value` into a layer of the
    cache. `rotary`: cos and sin [1, 1, T, width], if query and key are not rotated yet."""
    cache = plan.cache
    if layer not in cache.keys:
        if rotary:
            query, key = (kernels.rope(part, *rotary) for part in (query, key))
        cache.update(key, value, layer)
        return attend(plan, query, key, value, scale, window, None, None)
    return _call(plan, query, cache.keys[layer], cache.values[layer], scale, window, (key, value), rotary)


def _call(
    plan: Plan,
    query: Any,
    keys: Any,
    values: Any,
    scale: float,
    window: int,
    new: Sequence[Any] = (),
    rotary: Sequence[Any] = (),
) -> Any:
    heads, tokens, width = query.shape[1:]
    groups, value_width = values.shape[1:]
    query, *new = (kernels.dense(part) for part in (query, *new))
    if plan.tables is None:
        plan.tables = Tables(plan)
    tables, tasks = plan.tables, plan.tables.tasks(heads // groups)
    out = query.new_empty((1, tokens, heads, value_width))
    call = _Call(
        *(tensor.data_ptr() for tensor in (query, keys, values, out, tables.slots, tables.spans)),
        *(query.stride(1), query.stride(2), heads, groups, width, value_width, window),
    )
    if new:
        key, value = new
        call.new_keys, call.new_values, call.write = key.data_ptr(), value.data_ptr(), plan.write.data_ptr()
        call.new_count, call.key_head, call.key_token = tokens, key.stride(1), key.stride(2)
        call.value_head, call.value_token = value.stride(1), value.stride(2)
    if rotary:
        cos, sin = (part.contiguous() for part in rotary)
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
    call.scale = scale
    kernels.kernel("headway_attend")(ctypes.byref(call), tasks.data_ptr(), len(tasks), torch.get_num_threads())
    return out


def _cut(lengths: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int, int]]:
    """Spans of (queries, slots) in pieces of `most` queries."""
    pieces = [
        ((end - count + min(first + most, count)) * min(most, count - first), (at, first, min(most, count - first)))
        for at, (count, end) in enumerate(lengths)
        for first in range(0, count, most)
    ]
    return [piece for _, piece in sorted(pieces, key=lambda one: -one[0])]
