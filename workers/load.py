"""From a ModelSpec to a model in memory that is known to be whole, and the facts a card states about it.

Sources: a packaged model (`smollm2`, `minilm`), a local folder, or a hub id. Weights are safetensors, never pickle; a
missing or mismatched weight refuses the model by name, because Transformers would fill it with random numbers and carry
on. Remote code runs only if the spec trusts it. What is stated as a fact is read back after loading, never what was
asked for. Engines decide how to run a model; this file only decides whether it can be loaded honestly.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
import transformers

from headway.scheduler import clock, link
from headway.scheduler.spec import ModelSpec
from headway.workers import manner
from headway.workers.packaged import PACKAGED, LoadError, check_weights

__all__ = ["LoadError", "Loaded", "load_model", "model_file", "pick_device", "pick_dtype"]

log = logging.getLogger("headway.worker")

CLASSES = {
    "generate": "AutoModelForCausalLM",
    "embed": "AutoModel",
    "classify": "AutoModelForSequenceClassification",
    "score": "AutoModelForSequenceClassification",
}
TEXT_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}  # what pages and a packed row can express
POSITIONS_MAX = 1 << 24  # tokenizers write "no limit" as a number larger than any context


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory (eval mode, on `device`) and what is known of it.

    `source`: a folder or hub id. `context_tokens`: positions the model has, 0 if unbounded. `eos`: ids that end a text.
    `facts`: for people. `tokenizer` is None if the source has none; then only token ids are served. `defaults`: values
    for what requests leave out, by names of params.NEUTRAL.
    """

    model: Any
    source: str
    tokenizer: link.Tokenizer | None
    eos: frozenset[int]
    context_tokens: int
    vocab_size: int
    device: Any
    dtype: Any
    facts: dict[str, str]
    defaults: dict[str, float | int] = dataclasses.field(default_factory=dict)


def load_model(spec: ModelSpec, kind: str = "") -> Loaded:
    """The model of `spec`, ready to run as `kind` (a key of CLASSES; default: the spec's engine).

    Sets torch's thread count to `spec.threads`. Raises LoadError, with what to do next, if the model is not there, not
    whole, or of a kind that cannot be served.
    """
    torch.set_num_threads(spec.threads)
    transformers.utils.logging.disable_progress_bar()
    kind = kind or spec.engine
    source = _source(spec, kind)
    started = clock.now_ns()
    log.info("loading %s from %s", spec.name, source)
    config = _config(spec, source)
    if kind == "generate":
        _check_expressible(config, source)
    device = pick_device(spec.device)
    dtype = pick_dtype(spec.dtype, device)
    model = _weights(spec, source, kind, dtype).to(device).eval()
    tokenizer = _tokenizer(spec, source)
    ends = manner.ends_of(model, tokenizer)
    defaults = manner.defaults_of(model)
    applied = spec.sampling_defaults == "model"
    positions = int(tokenizer.model_max_length) if tokenizer is not None else 0
    loaded = Loaded(
        model=model,
        source=source,
        tokenizer=_card_of(tokenizer) if tokenizer is not None else None,
        eos=frozenset(ends),
        context_tokens=_context_tokens(config, positions if kind != "generate" and positions < POSITIONS_MAX else 0),
        vocab_size=_vocab_size(model),
        device=device,
        dtype=dtype,
        facts=_facts(model, device)
        | (manner.facts_of(ends, tokenizer, defaults, applied=applied) if kind == "generate" else {}),
        defaults=defaults if applied else {},
    )
    log.info("loaded %s in %.1f s", spec.name, (clock.now_ns() - started) / clock.NS_PER_S)
    return loaded


def pick_device(name: str) -> Any:
    """The torch device `name` stands for. Raises LoadError if this machine lacks it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"the device {name!r} is not usable here: {error}") from error
    return device


def pick_dtype(name: str, device: Any) -> Any:
    """The dtype `name` stands for; auto: float32 on a CPU, on a GPU bfloat16 where it has it, else float16."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def model_file(source: str, name: str) -> Path | None:
    """One small file that lies beside the weights of `source` (a folder or hub id), or None if it has no such file."""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    found = transformers.utils.cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _source(spec: ModelSpec, kind: str) -> str:
    name = spec.model or ("smollm2" if kind == "generate" else "minilm" if kind == "embed" else "")
    if not name:
        raise LoadError(f"model {spec.name!r}: say which model to load (a folder or a hub id)")
    if name in PACKAGED:
        return str(PACKAGED[name]())
    if name.startswith((".", "/", "~")):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise LoadError(f"there is no folder {name}")
        return str(folder)
    return name


def _config(spec: ModelSpec, source: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read the model {source}: {error}") from error


def _check_expressible(config: Any, source: str) -> None:
    """Refuse, before any weight is read, what the packed path cannot express: it would answer wrongly or not at all."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise LoadError(f"{source} is an encoder-decoder model; the generate engine serves decoder-only models")
    if strange := sorted(set(getattr(text, "layer_types", None) or ()) - TEXT_LAYERS):
        raise LoadError(
            f"{source} has layers of the kinds {', '.join(strange)}; the generate engine's paged cache holds keys and "
            f"values of full and sliding attention only"
        )
    kind = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is not None and getattr(kind, "_is_stateful", False):
        raise LoadError(f"{source} keeps a recurrent state (linear attention or SSM), which a paged cache cannot hold")


def _weights(spec: ModelSpec, source: str, kind: str, dtype: Any) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": spec.trust_remote_code, "use_safetensors": True}
    if kind != "generate" and spec.attention != "auto":  # the generate engine brings its own attention
        options["attn_implementation"] = spec.attention
    try:
        loader = getattr(transformers, CLASSES[kind])
        model, report = loader.from_pretrained(source, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise LoadError(f"cannot load {source}: {error}") from error
    check_weights(report, source)
    return model


def _tokenizer(spec: ModelSpec, source: str) -> Any:
    """Transformers' tokenizer of the source, if it is one that the scheduler can use; else None."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=spec.trust_remote_code)
        tokenizer.backend_tokenizer  # noqa: B018 - only fast ones have it
    except (OSError, ValueError, ImportError, AttributeError) as error:
        log.warning("%s has no fast tokenizer, only token ids are served: %s", source, error)
        return None
    return tokenizer


def _card_of(tokenizer: Any) -> link.Tokenizer:
    backend = tokenizer.backend_tokenizer
    # The scheduler counts and refuses; a tokenizer that cuts or pads in silence would hide what was sent.
    plain = type(backend).from_str(backend.to_str())
    plain.no_truncation()
    plain.no_padding()
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their purpose
        template = template.get("default")
    return link.Tokenizer(
        kind="json",
        data=plain.to_str().encode(),
        chat_template=template if isinstance(template, str) else None,
        special={name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
    )


def _vocab_size(model: Any) -> int:
    """Tokens that can be both read and chosen; some models have more to read (images), or pad one of the two."""
    sizes = [model.get_input_embeddings().num_embeddings]
    head = model.get_output_embeddings()
    if head is not None:
        sizes.append(head.weight.shape[0])
    return int(min(sizes))


def _context_tokens(config: Any, tokenizer_positions: int) -> int:
    """Positions one request may have.

    Rotary embeddings of the kind longrope change every frequency once any request of a step is longer than the
    original context: a neighbour would change the answer. There the original context is the limit.
    """
    text = config.get_text_config(decoder=True)
    limit = int(getattr(text, "max_position_embeddings", 0) or 0)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if one.get("rope_type", one.get("type")) == "longrope":
            original = getattr(text, "original_max_position_embeddings", None) or limit
            limit = min(limit, int(one.get("original_max_position_embeddings") or original))
            log.info("context limited to %d tokens: beyond them longrope is not independent of other requests", limit)
    return min(limit, tokenizer_positions) if limit and tokenizer_positions else limit or tokenizer_positions


def _facts(model: Any, device: Any) -> dict[str, str]:
    return {
        "model": type(model).__name__,
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation),
        "parameters": f"{sum(one.numel() for one in model.parameters()) / 1e6:.1f}M",
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }
