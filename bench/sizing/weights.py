"""How many parameters a model has, which of them can be divided, and what they weigh: from its config alone.

The model's own class is built without storage and its parameters are counted by name, so the count is exact for every
class that Transformers knows. Lives here: reading a config, counting, bytes in each storage format. Never here: how
memory is divided, or among how many devices.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.scheduler.config import ConfigError

LAYER = re.compile(r"\.(?:layers|layer|h|blocks)\.(\d+)\.")
# The first that a parameter's name has decides its part.
PARTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("router", re.compile(r"\.(?:mlp|block_sparse_moe|feed_forward)\.(?:gate|router)\.")),
    ("experts", re.compile(r"\.experts\.")),
    ("embedding", re.compile(r"embed_tokens|embeddings\.|\bwte\b|\bwpe\b|embed_in")),
    ("head", re.compile(r"lm_head|embed_out")),
    ("latent", re.compile(r"q_a_|kv_a_")),
    ("norms", re.compile(r"norm|\bln_", re.I)),
    ("kv", re.compile(r"\.(?:k|v|key|value)(?:_proj)?\.")),
    ("attention", re.compile(r"attn|attention")),
    ("dense", re.compile(r"mlp|shared_expert|intermediate|output|ffn|feed_forward|\bfc")),
)
LINEAR = ("experts", "latent", "kv", "attention", "dense")  # what quantisation usually covers
FLOATS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored: `bits` of each number of a linear layer and of its share of scales; all other weights as
    `dtype`, which is also what the model computes in."""

    name: str
    dtype: str
    bits: float

    def weight_bytes(self, parts: "Counter[str]") -> int:
        """What these parameters take."""
        linear = sum(parts[part] for part in LINEAR)
        return int((linear * self.bits + (parts.total() - linear) * FLOATS[self.dtype]) / 8)


@dataclass(frozen=True, slots=True)
class Counted:
    """Parameters by part: of each layer, and of what lies outside them. `active`: those that one token goes through."""

    layers: tuple["Counter[str]", ...]
    outside: "Counter[str]"
    active: int

    @property
    def parts(self) -> "Counter[str]":
        """All of them."""
        return sum(self.layers, Counter(self.outside))

    @property
    def total(self) -> int:
        return self.parts.total()


def read_config(model: str) -> Any:
    """The Transformers config of a config.json, a folder with one, a packaged model or a hub id. Raises ConfigError."""
    import transformers

    from headway.workers.packaged import PACKAGED, LoadError

    try:
        if model in PACKAGED:
            model = str(PACKAGED[model]())
        path = Path(model).expanduser()
        if path.is_file():
            given = json.loads(path.read_text())
            kind = given.pop("model_type", None)
            if not kind:
                raise ConfigError(f"{model} has no model_type: it is no model's config.json")
            if kind not in transformers.CONFIG_MAPPING:
                raise ConfigError(f"{model}: Transformers {transformers.__version__} knows no model_type {kind!r}")
            return transformers.AutoConfig.for_model(kind, **given)
        if model.startswith((".", "/", "~")) and not path.is_dir():
            raise ConfigError(f"there is no file or folder {model}")
        return transformers.AutoConfig.from_pretrained(str(path) if path.is_dir() else model)
    except (OSError, ValueError, TypeError, LoadError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read the config of {model}: {error}") from error


def kind_of(config: Any) -> str:
    """The engine that such a model is for, by the class it was saved from."""
    names = " ".join(getattr(config, "architectures", None) or ())
    if "SequenceClassification" in names:
        return "classify"
    if "CausalLM" in names or "LMHead" in names or "ConditionalGeneration" in names:
        return "generate"
    encoders = ("bert", "mpnet", "electra", "deberta")
    return "embed" if names or any(word in str(config.model_type) for word in encoders) else "generate"


def count(config: Any, kind: str) -> Counted:
    """The parameters of a config's model, run as `kind`. Raises ConfigError if its class cannot be built, or if what it
    keeps of a text is known only by running it."""
    import copy

    import torch

    from headway.workers.load import KEPT_LAYERS, empty_model, unpackable

    if kind == "generate" and (why := unpackable(config, KEPT_LAYERS)):
        raise ConfigError(
            f"a {config.model_type!r} cannot be planned: {why}; headway measures its state when it starts"
        )
    plain = copy.deepcopy(config)
    if getattr(plain, "quantization_config", None) is not None:
        del plain.quantization_config
    empty = empty_model(plain, kind, torch.bfloat16)
    if empty is None:
        raise ConfigError(f"Transformers cannot build a {config.model_type!r} to {kind} from its config alone")
    text = config.get_text_config(decoder=True)
    layers: list[Counter[str]] = [Counter() for _ in range(int(text.num_hidden_layers))]
    outside: Counter[str] = Counter()
    for name, parameter in empty.named_parameters():
        found = LAYER.search(f".{name}")
        at = int(found.group(1)) if found else len(layers)
        (layers[at] if at < len(layers) else outside)[part_of(name)] += parameter.numel()
    parts = sum(layers, Counter(outside))
    experts, chosen = experts_of(text)
    idle = parts["experts"] * (experts - chosen) // experts if experts else 0
    looked_up = parts["embedding"] if parts["head"] else 0  # a token reads one row of it; a tied one is the head
    return Counted(tuple(layers), outside, parts.total() - idle - looked_up)


def part_of(name: str) -> str:
    """Which part of a model a parameter belongs to; `other` is never divided."""
    return next((part for part, pattern in PARTS if pattern.search(f".{name}")), "other")


def experts_of(text: Any) -> tuple[int, int]:
    """Routed experts of a layer, and how many of them a token goes through; 0, 0 of a dense model."""
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if found := int(getattr(text, name, 0) or 0):
            return found, int(getattr(text, "num_experts_per_tok", 0) or getattr(text, "moe_topk", 0) or 1)
    return 0, 0


def format_of(config: Any, dtype: str) -> Format:
    """How the weights are stored: as asked, or (auto) as the config says. Raises ConfigError."""
    own = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    own = own if own in FLOATS else "bfloat16"
    if dtype in FLOATS:
        return Format(dtype, dtype, FLOATS[dtype])
    half = own if FLOATS[own] == 16 else "bfloat16"
    if dtype in ("fp8", "int8"):
        return Format(dtype, half, 8)
    if dtype == "int4":
        return Format(dtype, half, 4 + 16 / 128 + 4 / 128)
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype!r} is none of auto, float32, bfloat16, float16, fp8, int8, int4")
    quantised = getattr(config, "quantization_config", None)
    if not quantised:
        return Format(own, own, FLOATS[own])
    said = quantised if isinstance(quantised, dict) else quantised.to_dict()
    return _quantised(said, half)


def _quantised(said: dict[str, Any], half: str) -> Format:
    """From a checkpoint's quantization_config."""
    method = str(said.get("quant_method", ""))
    if method == "fp8":
        rows, columns = said.get("weight_block_size") or (128, 128)
        return Format("fp8", half, 8 + 32 / (rows * columns))
    if method in ("gptq", "awq"):
        bits, group = int(said.get("bits", 4)), int(said.get("group_size", 128))
        return Format(f"{method} {bits} bits", half, bits + (16 + bits) / max(1, group))
    if method == "mxfp4":
        return Format("mxfp4", half, 4 + 8 / 32)
    if method == "bitsandbytes":
        return Format("bitsandbytes", half, 4.5 if said.get("load_in_4bit") else 8)
    raise ConfigError(f"the config's quant_method {method!r} is not known; say what to plan with by --dtype")
