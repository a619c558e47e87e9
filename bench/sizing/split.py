"""How a model may be divided among devices, and what then lies on the fullest of them.

Tensor parallelism divides heads and middle layers, pipeline parallelism divides layers, expert parallelism spreads
whole experts over devices, where each group of `tensor` devices runs attention for requests of its own (as DeepSeek-V3
is served). Lives here: the divisor checks in words, and each device's share of weights and cache. Never here: which of
them is best.

Sources: Shoeybi et al., Megatron-LM (2019), for what can be divided; DeepSeek-AI, DeepSeek-V3 Technical Report (2024),
3.4, for attention in data parallel beside experts in parallel.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headway.bench.sizing.weights import Counted, Format, experts_of
from headway.workers import memory


@dataclass(frozen=True, slots=True)
class Split:
    """`expert` of 1: experts are divided like any other layer, by `tensor`."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __str__(self) -> str:
        named = (("TP", self.tensor), ("PP", self.pipeline), ("EP", self.expert))
        return " ".join(f"{name}{degree}" for name, degree in named if degree > 1) or "one device"

    @property
    def devices(self) -> int:
        return self.pipeline * max(self.tensor, self.expert)

    @property
    def replicas(self) -> int:
        """Groups of devices that run attention for requests of their own."""
        return max(1, self.expert // self.tensor)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the checks need of a text model's config. `values`: the config as a map."""

    layers: int
    heads: int
    kv_heads: int
    vocab: int
    middle: int
    expert_middle: int
    experts: int
    latent: bool
    values: dict[str, Any]


def shape_of(text: Any) -> Shape:
    """Of a decoder's or encoder's config."""
    values = text.to_dict() | {"num_hidden_layers": int(text.num_hidden_layers)}
    heads = int(text.num_attention_heads)
    latent = bool(values.get("kv_lora_rank"))
    groups = heads if latent else memory.layers_of(values)[0].heads
    middle = int(getattr(text, "intermediate_size", 0) or values.get("n_inner") or 4 * int(text.hidden_size))
    experts, _ = experts_of(text)
    narrow = int(values.get("moe_intermediate_size") or middle) if experts else 0
    return Shape(
        int(text.num_hidden_layers), heads, groups, int(text.vocab_size), middle, narrow, experts, latent, values
    )


def check(shape: Shape, split: Split) -> tuple[list[str], list[str]]:
    """Why this cannot be done, and what is to be known if it is."""
    tensor, pipeline, expert = split.tensor, split.pipeline, split.expert
    faults, notes = [], []
    if shape.heads % tensor:
        faults.append(f"{shape.heads} attention heads are not divisible by {tensor}")
    if shape.latent and tensor > 1:
        notes.append("latents have no heads: each of the tensor-parallel devices caches all of them")
    elif tensor > shape.kv_heads and not tensor % shape.kv_heads:
        notes.append(f"{shape.kv_heads} KV heads: each is kept {tensor // shape.kv_heads} times")
    elif shape.kv_heads % tensor:
        faults.append(f"{shape.kv_heads} KV heads are neither divisible by {tensor} nor a divisor of it")
    if shape.middle % tensor:
        faults.append(f"intermediate_size {shape.middle} is not divisible by {tensor}")
    if shape.experts and expert == 1 and shape.expert_middle % tensor:
        faults.append(f"moe_intermediate_size {shape.expert_middle} is not divisible by {tensor}")
    if expert > 1 and not shape.experts:
        faults.append("there are no experts to spread")
    elif expert > 1 and shape.experts % expert:
        faults.append(f"{shape.experts} experts are not divisible by {expert}")
    if expert > 1 and expert % tensor:
        faults.append(f"{expert} expert-parallel devices are no whole number of groups of {tensor}")
    if pipeline > shape.layers:
        faults.append(f"{shape.layers} layers do not fill {pipeline} stages")
    elif shape.layers % pipeline:
        notes.append(f"{shape.layers} layers on {pipeline} stages: some have one more")
    if shape.vocab % tensor:
        notes.append(f"the vocabulary of {shape.vocab} is padded to {-(-shape.vocab // tensor) * tensor}")
    return faults, notes


def weight_bytes(counted: Counted, shape: Shape, split: Split, form: Format) -> int:
    """Of the fullest device. Norms, routers and the projections to latents are on every one."""
    heaviest = 0
    bounds = [shape.layers * stage // split.pipeline for stage in range(split.pipeline + 1)]
    first = Counter({part: n for part, n in counted.outside.items() if part != "head"})
    tied = not counted.outside["head"]
    last = Counter({part: n for part, n in counted.outside.items() if part == ("embedding" if tied else "head")})
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        parts: Counter[str] = sum(counted.layers[begin:end], Counter())
        if split.pipeline == 1:
            parts.update(counted.outside)
        elif stage == 0:
            parts.update(first)
        elif stage == split.pipeline - 1:
            parts.update(last)
        heaviest = max(heaviest, form.weight_bytes(_divided(parts, shape, split)))
    return heaviest


def _divided(parts: "Counter[str]", shape: Shape, split: Split) -> "Counter[str]":
    by = dict.fromkeys(("embedding", "head", "attention", "dense"), split.tensor)
    by["kv"] = min(split.tensor, shape.kv_heads)
    by["experts"] = split.expert if split.expert > 1 else split.tensor
    return Counter({part: -(-number // by.get(part, 1)) for part, number in parts.items()})


def cached_of(shape: Shape, split: Split, dtype: str, stored: str) -> memory.Cached:
    """A token in the cache of one device: its heads, of the most layers that a stage has."""
    layers = -(-shape.layers // split.pipeline)
    values = shape.values | {"num_hidden_layers": layers, "num_attention_heads": max(1, shape.heads // split.tensor)}
    if kinds := values.get("layer_types"):
        values["layer_types"] = kinds[:layers]
    if not shape.latent:
        whole = memory.layers_of(shape.values)[0]
        values |= {"num_key_value_heads": max(1, shape.kv_heads // split.tensor), "head_dim": whole.key_width}
        values["multi_query"] = False
    return memory.cached_of(values, dtype, stored)


def work_of(shape: Shape, split: Split) -> memory.Work:
    """A step on one device: tokens at full width, its part of the logits."""
    whole = memory.work_of(shape.values)
    return memory.Work(whole.token_numbers, -(-whole.vocab_size // split.tensor))
