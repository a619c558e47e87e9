"""How many pages a worker has, now that its model is here: the memory plan with what was measured in place of what was
expected, and the cache that is allocated for it."""

import dataclasses
import logging
from typing import Any

import torch

from headway.scheduler.spec import ModelSpec
from headway.workers import memory
from headway.workers.device import free_bytes
from headway.workers.generate.gate import check_kv_dtype
from headway.workers.generate.pages import PagedCache
from headway.workers.generate.runner import Runner
from headway.workers.load import Loaded
from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """The plan, the cache it allows, and what is to be said of both."""

    plan: memory.MemoryPlan
    cache: PagedCache
    facts: dict[str, str]


def lower_dtype(spec: ModelSpec, loaded: Loaded) -> Any:
    """What keys and values are stored as; None: as the model computes them."""
    dtype = None if spec.kv_dtype == "auto" else getattr(torch, spec.kv_dtype)
    return None if dtype is loaded.dtype else dtype


def room_of(spec: ModelSpec, loaded: Loaded, runner: Runner) -> Room:
    """The cache of `runner`'s model as the spec asks for it, checked and allocated. Raises LoadError."""
    dtype = lower_dtype(spec, loaded)
    pattern, checked = runner.pattern, str(loaded.dtype).removeprefix("torch.")
    if dtype is not None:
        checked = check_kv_dtype(runner, loaded, dtype)
        pattern = runner.pattern.like(1, dtype)
    in_place = runner.attention == "paged"  # what is cached is not copied to be read
    plan = _plan(spec, loaded, pattern, loaded.weight_bytes + runner.weights.more_bytes, in_place)
    pages = f"{plan.pages} of {plan.page_tokens} tokens ({memory.size(plan.kv_bytes)})"
    return Room(plan, _allocate(runner, plan, dtype), {"pages": pages, "kv_dtype": checked, "memory": plan.words()})


def _plan(spec: ModelSpec, loaded: Loaded, pattern: PagedCache, weight_bytes: int, in_place: bool) -> memory.MemoryPlan:
    """The memory plan for `pattern`, a small cache of the layers and the dtype that will be served."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    config = loaded.model.config.get_text_config(decoder=True)
    wide = max(keys[0].numel() + pattern.values[layer][0].numel() for layer, keys in pattern.keys.items())
    copied = 0 if in_place else wide * loaded.dtype.itemsize + memory.expanded_bytes(config, dtype)
    try:
        plan = memory.plan_generate(
            spec,
            dtype=dtype,
            free_bytes=loaded.free_bytes or free_bytes(loaded.device),
            weight_bytes=weight_bytes,
            cached=memory.Cached(pattern.bytes_per_token, copied),
            work=memory.work_of(config),
            context_tokens=loaded.context_tokens,
            cpu=loaded.device.type == "cpu",
        )
    except memory.DoesNotFitError as error:
        raise LoadError(str(error)) from error
    log.info("memory of %s: %s", spec.name, plan.words())
    return plan


def _allocate(runner: Runner, plan: memory.MemoryPlan, dtype: Any) -> PagedCache:
    """Whole, now: so that it cannot fail later."""
    try:
        return runner.pattern.like(plan.kv_tokens, dtype)
    except RuntimeError as error:
        raise LoadError(f"the KV cache ({memory.size(plan.kv_bytes)}) does not fit into memory: {error}") from error
