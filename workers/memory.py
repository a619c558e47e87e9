"""What will fit, before anything is loaded: weights, working memory, and how many tokens the KV cache can hold.

Pure arithmetic over a model's config and a few numbers; no torch, so that it can be asked anywhere. Lives here: what a
token costs in the cache (grouped heads, latent attention, sliding windows as they are stored), what a step needs
beside, how free memory is divided, and that division in words. Never here: loading, measuring a device, allocating.

    plan = divide(free_bytes=24 << 30, weight_bytes=..., layers=layers_of(config), work=work_of(config), ...)
    plan.kv_tokens, plan.requests_at(4096), plan.words()
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.scheduler.spec import ModelSpec

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KV_BYTES_CPU = 1024 * MIB  # auto on a CPU: the machine has other work, and a gigabyte is 20k tokens of a small model
SHARE = 0.9  # of what is free, the most a worker takes: allocators keep some in reserve, neighbours grow
LENGTHS = (1024, 4096, 32_768, 131_072)  # for which a person is told how many requests fit
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 2  # int8 keeps one float16 scale for each token and head

# What a step holds at its fullest moment, in multiples of a token's width: counted in the models' forwards.
HIDDEN_COPIES = 6  # residual, normed input, attention output, what the layer returns, and two being made
MIDDLE_COPIES = 3  # gate after activation, up, their product
LOGIT_COPIES = 4  # float32: logits, the copy that is biased, its sorted form, its cumulative sum


class DoesNotFitError(ValueError):
    """The model cannot run in the memory there is. The message says what is missing and what to change."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer stores for each token: `heads` x `key_width` and `heads` x `value_width` numbers.

    `window`: how far back it looks; 0: everything. A page holds all tokens of a request, so a window saves reading, not
    storage.
    """

    heads: int
    key_width: int
    value_width: int
    window: int = 0

    def token_bytes(self, dtype: str) -> int:
        """One token's keys and values as `dtype`, scales included."""
        scales = 2 * SCALE_BYTES if dtype == "int8" else 0
        return self.heads * ((self.key_width + self.value_width) * DTYPE_BYTES[dtype] + scales)


@dataclass(frozen=True, slots=True)
class Cached:
    """One token in the cache: `token_bytes` in all layers as stored; `layer_bytes`: what a step holds
    of it while it computes the widest layer."""

    token_bytes: int
    layer_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a step needs beside weights and cache. `token_numbers`: numbers for each token of a step at the fullest
    moment of a layer; `vocab_size`: logits for each request that gets a token."""

    token_numbers: int
    vocab_size: int

    def step_bytes(self, dtype: str, tokens: int, requests: int) -> int:
        """A step of `tokens`, of which `requests` get their next token."""
        return self.token_numbers * DTYPE_BYTES[dtype] * tokens + LOGIT_COPIES * 4 * self.vocab_size * requests


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How `free_bytes` are divided. `token_bytes`: of one token in the cache; `kv_bytes`: of all its pages."""

    free_bytes: int
    weight_bytes: int
    work_bytes: int
    token_bytes: int
    kv_bytes: int
    page_tokens: int
    context_tokens: int = 0
    max_num_seqs: int = 1

    def __repr__(self) -> str:
        return f"<MemoryPlan {self.words()}>"

    @property
    def total_bytes(self) -> int:
        """All that the worker will hold."""
        return self.weight_bytes + self.work_bytes + self.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens the cache holds, in whole pages."""
        return self.pages * self.page_tokens

    @property
    def pages(self) -> int:
        return self.kv_bytes // (self.token_bytes * self.page_tokens) if self.token_bytes else 0

    def requests_at(self, tokens: int) -> int:
        """How many requests of `tokens` (input and output) can run at once; 0 if the model does not reach so far."""
        if self.context_tokens and tokens > self.context_tokens:
            return 0
        return min(self.max_num_seqs, self.pages // -(-tokens // self.page_tokens))

    def words(self) -> str:
        """The plan as a person reads it, in one line."""
        parts = [f"weights {size(self.weight_bytes)}", f"work {size(self.work_bytes)}"]
        if self.token_bytes:
            parts.append(f"KV {size(self.kv_bytes)} = {self.kv_tokens} tokens of {size(self.token_bytes)}")
            counts = [f"{self.requests_at(n)} of {n // 1024}k" for n in LENGTHS if self.requests_at(n)]
            parts.append(f"requests at once: {', '.join(counts) or 'only short ones'}")
        return f"{', '.join(parts)}; {size(self.free_bytes)} were free"


def divide(
    *,
    free_bytes: int,
    weight_bytes: int,
    work_bytes: int,
    token_bytes: int = 0,
    gather_bytes: int = 0,
    kv_bytes: int = 0,
    kv_bytes_max: int = 0,
    page_tokens: int = 16,
    context_tokens: int = 0,
    max_num_seqs: int = 1,
    sharers: int = 1,
) -> MemoryPlan:
    """Divide the memory that is free before loading.

    `kv_bytes`: what the operator asked for, which must fit; 0: what is left of SHARE, up to `kv_bytes_max` (0: no
    bound) and never more than all requests could fill. `gather_bytes`: what a step copies of each cached token (one
    layer of it at a time). `sharers`: workers that load beside each other, so that none takes what another needs; one
    that starts again later finds the others' part gone already. Raises DoesNotFitError.
    """
    left = int(free_bytes * SHARE) - weight_bytes - work_bytes
    if left < 0:
        raise DoesNotFitError(
            f"the weights ({size(weight_bytes)}) and one step ({size(work_bytes)}) need more than "
            f"{SHARE:.0%} of the {size(free_bytes)} that are free; take a smaller dtype or model, or another device"
        )
    page_bytes = page_tokens * (token_bytes + gather_bytes)
    pages = 0
    if token_bytes:
        if not kv_bytes:
            part = int(free_bytes * SHARE / sharers) - weight_bytes - work_bytes
            left = part if part >= page_bytes else left // sharers
        pages = _pages(left, page_bytes, page_tokens * token_bytes, kv_bytes, kv_bytes_max, page_tokens)
        if context_tokens:
            pages = min(pages, max_num_seqs * -(-context_tokens // page_tokens))
    return MemoryPlan(
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        work_bytes=work_bytes + pages * page_tokens * gather_bytes,
        token_bytes=token_bytes,
        kv_bytes=pages * page_tokens * token_bytes,
        page_tokens=page_tokens,
        context_tokens=context_tokens,
        max_num_seqs=max_num_seqs,
    )


def _pages(left: int, page_bytes: int, stored: int, asked: int, most: int, page_tokens: int) -> int:
    """Pages in `left` bytes, each taking `page_bytes` of which `stored` are the cache's own."""
    fit = left // page_bytes
    if not fit:
        raise DoesNotFitError(f"{size(left)} are left for the KV cache, not one page of {page_tokens} tokens")
    if not asked:
        return max(1, min(fit, most // stored)) if most else fit
    if asked < stored:
        raise DoesNotFitError(
            f"kv_mib {asked // MIB} does not hold one page of {page_tokens} tokens ({stored} bytes); "
            "raise it or lower page_tokens"
        )
    if asked // stored > fit:
        raise DoesNotFitError(
            f"kv_mib {asked // MIB} does not fit: {size(fit * stored)} are left for the KV cache; "
            "lower it, or leave it out to take what fits"
        )
    return asked // stored


def plan_generate(
    spec: ModelSpec,
    *,
    dtype: str,
    free_bytes: int,
    weight_bytes: int,
    cached: Cached,
    work: Work,
    context_tokens: int,
    cpu: bool,
) -> MemoryPlan:
    """The plan of a generating worker as `spec` asks, its model run in `dtype`. Raises DoesNotFitError."""
    return divide(
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        work_bytes=work.step_bytes(dtype, spec.step_tokens, spec.max_num_seqs),
        token_bytes=cached.token_bytes,
        gather_bytes=cached.layer_bytes,
        kv_bytes=spec.kv_mib * MIB,
        kv_bytes_max=KV_BYTES_CPU if cpu else 0,
        page_tokens=spec.page_tokens,
        context_tokens=context_tokens,
        max_num_seqs=spec.max_num_seqs,
        sharers=max(1, spec.workers),
    )


# ---------------------------------------------------------------- what a config says


def layers_of(config: Any, *, latent: bool = True) -> tuple[Layer, ...]:
    """The cache's layers for a text model's config (an object or the map in config.json).

    `latent`: whether latent attention is stored compressed, as Transformers does from 5.24 on; before, expanded.
    """
    count = int(_get(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"))
    heads = int(_get(config, "num_attention_heads", "n_head", "num_heads", "n_heads"))
    windows = _windows(config, count)
    if rank := _get(config, "kv_lora_rank", default=0):
        rope = int(_get(config, "qk_rope_head_dim"))
        if latent:
            return tuple(Layer(1, int(rank), rope, window) for window in windows)
        key, value = int(_get(config, "qk_nope_head_dim")) + rope, int(_get(config, "v_head_dim"))
        return tuple(Layer(heads, key, value, window) for window in windows)
    groups = int(_get(config, "num_key_value_heads", "n_head_kv", "num_kv_heads", default=0) or heads)
    if _get(config, "multi_query", default=False):
        groups = 1
    width = int(_get(config, "head_dim", default=0) or _get(config, "hidden_size", "n_embd", "d_model") // heads)
    return tuple(Layer(groups, width, width, window) for window in windows)


def cached_of(config: Any, dtype: str, stored: str = "auto") -> Cached:
    """What a token of this model costs, run in `dtype` and `stored` in the cache as that dtype (auto: the same)."""
    layers = layers_of(config)
    widest = max(layer.token_bytes(dtype) for layer in layers)
    stored = dtype if stored == "auto" else stored
    return Cached(sum(layer.token_bytes(stored) for layer in layers), widest + expanded_bytes(config, dtype))


def expanded_bytes(config: Any, dtype: str) -> int:
    """What a step makes of each cached token of a layer before attending to it: latents are expanded to all heads."""
    if not _get(config, "kv_lora_rank", default=0):
        return 0
    heads = int(_get(config, "num_attention_heads"))
    nope, rope, value = (int(_get(config, name)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return heads * ((nope + value) + (nope + rope)) * DTYPE_BYTES[dtype]  # projected, and keys with their rotated part


def work_of(config: Any) -> Work:
    """What a step of this model needs. Of a mixture of experts, the chosen experts' middle layers count."""
    hidden = int(_get(config, "hidden_size", "n_embd", "d_model", default=0))
    middle = int(_get(config, "intermediate_size", "n_inner", "ffn_dim", default=0) or 4 * hidden)
    chosen = int(_get(config, "num_experts_per_tok", "moe_topk", default=0) or 0)
    if chosen:
        narrow = int(_get(config, "moe_intermediate_size", "expert_ffn_hidden_size", default=0) or middle)
        middle = max(middle, chosen * (narrow + hidden))  # each chosen expert's output is kept until they are summed
    heads = int(_get(config, "num_attention_heads", "n_head", "num_heads", "n_heads", default=1))
    width = int(_get(config, "head_dim", "v_head_dim", default=0) or hidden // heads)
    numbers = HIDDEN_COPIES * max(hidden, heads * width) + MIDDLE_COPIES * middle
    return Work(numbers, int(_get(config, "vocab_size", default=0) or 0))


def _windows(config: Any, count: int) -> list[int]:
    window = int(_get(config, "sliding_window", default=0) or 0)
    kinds = _get(config, "layer_types", default=None)
    if kinds:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    return [window] * count


_REQUIRED = object()


def _get(config: Any, *names: str, default: Any = _REQUIRED) -> Any:
    """The first of these names that the config has and that is not None."""
    for name in names:
        found = config.get(name) if isinstance(config, Mapping) else _attribute(config, name)
        if found is not None:
            return found
    if default is _REQUIRED:
        raise KeyError(f"the config has none of {', '.join(names)}")
    return default


def _attribute(config: Any, name: str) -> Any:
    """`config.name`, or None. Where layers differ in it, which Transformers says by raising, the largest."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return max(getattr(layer, name, 0) or 0 for layer in config.per_layer_config)


def size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}" if count / scale < 1000 else f"{count / scale:.0f} {unit}"
    return f"{count} B"
