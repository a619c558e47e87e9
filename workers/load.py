"""From a ModelSpec to a model in memory that is known to be whole, and the facts a card states about it.

Sources: a packaged model (`smollm2`, `minilm`), a local folder, or a hub id. Whether the weights fit is known from the
config before any is read (`memory.py`). Weights are safetensors; pickled ones are read only if the spec allows it, and
remote code runs only if it trusts it. A model that is not whole is refused by name (`whole.py`). What is stated as a
fact is read back after loading, never what was asked for. Engines decide how to run a model; this file only decides
whether it can be loaded honestly.
"""

import copy
import dataclasses
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers

from headway.scheduler import clock, link
from headway.scheduler.spec import ModelSpec
from headway.workers import manner, memory
from headway.workers.device import describe, free_bytes, pick_device, pick_dtype
from headway.workers.packaged import PACKAGED, LoadError
from headway.workers.whole import check_whole, dtypes_of

__all__ = ["LoadError", "Loaded", "empty_model", "load_model", "model_file", "unpackable", "weight_bytes"]

log = logging.getLogger("headway.worker")

CLASSES = {
    "generate": "AutoModelForCausalLM",
    "embed": "AutoModel",
    "classify": "AutoModelForSequenceClassification",
    "score": "AutoModelForSequenceClassification",
}
TEXT_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}  # what pages and a packed row can express
SAFE_FILES = ("model.safetensors", "model.safetensors.index.json")
KEPT_LAYERS = TEXT_LAYERS | {"chunked_attention", "indexed_attention"}  # what keeps keys and values, and nothing else
POSITIONS_MAX = 1 << 24  # tokenizers write "no limit" as a number larger than any context


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory (eval mode, on `device`) and what is known of it.

    `source`: a folder or hub id. `context_tokens`: positions the model has, 0 if unbounded. `eos`: ids that end a text.
    `facts`: for people. `tokenizer` is None if the source has none; then only token ids are served. `defaults`: values
    for what requests leave out, by names of params.NEUTRAL. `free_bytes`: of the device before the weights came (0: not
    measured), of which they take `weight_bytes`.
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
    free_bytes: int = 0
    weight_bytes: int = 0


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
        _check_decoder(config, spec, source)
    device = pick_device(spec.device)
    dtype = pick_dtype(spec.dtype, device)
    tokenizer = _tokenizer(spec, source)
    positions = int(tokenizer.model_max_length) if tokenizer is not None else 0
    context = _context_tokens(config, positions if kind != "generate" and positions < POSITIONS_MAX else 0)
    free = free_bytes(device)
    _check_room(spec, config, kind, dtype, free, context, source, cpu=device.type == "cpu")
    model, weights = _weights(spec, source, kind, dtype)
    model = model.to(device).eval()
    ends = manner.ends_of(model, tokenizer)
    defaults = manner.defaults_of(model)
    applied = spec.sampling_defaults == "model"
    loaded = Loaded(
        model=model,
        source=source,
        tokenizer=_card_of(tokenizer) if tokenizer is not None else None,
        eos=frozenset(ends),
        context_tokens=context,
        vocab_size=_vocab_size(model),
        device=device,
        dtype=dtype,
        facts=_facts(model, device)
        | _text_facts(config, tokenizer, context)
        | (manner.facts_of(ends, tokenizer, defaults, applied=applied) if kind == "generate" else {})
        | {"weights": weights},
        defaults=defaults if applied else {},
        free_bytes=free,
        weight_bytes=sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()]),
    )
    log.info("loaded %s in %.1f s", spec.name, (clock.now_ns() - started) / clock.NS_PER_S)
    return loaded


def empty_model(config: Any, kind: str, dtype: Any, *, trust_remote_code: bool = False) -> Any:
    """The model of a config, built without storage; None if its class cannot be built so (some remote code)."""
    try:
        with torch.device("meta"):
            loader = getattr(transformers, CLASSES[kind])
            return loader.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a model's own code raises: then only loading tells
        log.info("the size of the weights is not known before loading: %s", error)
        return None


def weight_bytes(config: Any, kind: str, dtype: Any, *, trust_remote_code: bool = False) -> int:
    """Bytes of a model's parameters and buffers as `dtype`, from its config alone.

    0 if it is not known before loading, or if its weights are quantised and their size is the file's.
    """
    if getattr(config, "quantization_config", None):
        return 0
    empty = empty_model(config, kind, dtype, trust_remote_code=trust_remote_code)
    return (
        0 if empty is None else sum(one.numel() * one.element_size() for one in [*empty.parameters(), *empty.buffers()])
    )


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


def unpackable(config: Any, layers: Collection[str] = TEXT_LAYERS) -> str:
    """What in a model's config pages and a packed row, of `layers`, cannot express, or nothing: then answers decide."""
    text = config.get_text_config(decoder=True)
    if strange := sorted(set(getattr(text, "layer_types", None) or ()) - set(layers)):
        return f"it has layers of the kinds {', '.join(strange)}"
    kind = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is not None and getattr(kind, "_is_stateful", False):
        return "it keeps a recurrent state"
    return ""


def _check_decoder(config: Any, spec: ModelSpec, source: str) -> None:
    """Refuse, before any weight is read, what cannot generate, or not as the spec wants it."""
    if config.is_encoder_decoder:
        raise LoadError(f"{source} is an encoder-decoder model; the generate engine serves decoder-only models")
    if spec.packing == "packed" and (why := unpackable(config)):
        raise LoadError(f"{source} cannot be run packed: {why}; leave out packing: packed to run it padded")


def _check_room(
    spec: ModelSpec, config: Any, kind: str, dtype: Any, free: int, context: int, source: str, *, cpu: bool
) -> None:
    """Refuse, before any weight is read, a model that this device has no room for, and say how the room is divided."""
    name = str(dtype).removeprefix("torch.")
    text = config.get_text_config(decoder=True)
    sizes = {
        "free_bytes": free,
        "weight_bytes": weight_bytes(config, kind, dtype, trust_remote_code=spec.trust_remote_code),
    }
    try:
        work = memory.work_of(text)
        if kind == "generate" and not unpackable(config):
            cached = memory.cached_of(text, name, spec.kv_dtype)
            plan = memory.plan_generate(
                spec, dtype=name, cached=cached, work=work, context_tokens=context, cpu=cpu, **sizes
            )
        else:
            longest = spec.step_tokens if kind == "generate" else spec.max_input_tokens or context
            plan = memory.divide(work_bytes=work.step_bytes(name, longest, 0), **sizes)
    except memory.DoesNotFitError as error:
        raise LoadError(f"{source} does not fit: {error}") from error
    except (KeyError, TypeError, ValueError) as error:  # a config of a shape of its own: measured when it is there
        log.info("no memory plan before loading: %s", error)
        return
    log.info("memory plan for %s in %s: %s", spec.name, name, plan.words())


def _weights(spec: ModelSpec, source: str, kind: str, dtype: Any) -> tuple[Any, str]:
    """The model, and what is to be said of its weights."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": spec.trust_remote_code,
        "use_safetensors": None if spec.allow_pickle else True,  # None: safetensors where there are some
        "ignore_mismatched_sizes": True,  # so that they are reported, by name, with the others
    }
    if kind != "generate" and spec.attention == "paged":
        raise LoadError(f"attention: paged is for generation; set attention: auto for engine: {spec.engine}")
    if kind != "generate" and spec.attention != "auto":  # the generate engine brings its own attention
        options["attn_implementation"] = spec.attention
    try:
        loader = getattr(transformers, CLASSES[kind])
        model, report = loader.from_pretrained(source, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise LoadError(f"cannot load {source}: {error}") from error
    wrong = check_whole(model, report, source, headless=kind == "embed", allow_incomplete=spec.allow_incomplete)
    form = "safetensors"
    if spec.allow_pickle and not any(model_file(source, name) for name in SAFE_FILES):
        form = "pickled"
        log.warning("%s: the weights are pickled files, read because allow_pickle is set", source)
    return model, f"{form}, not whole: {wrong}" if wrong else form


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
        "device": describe(device),
        "dtype": dtypes_of(model.parameters()),
        "autocast": "on" if torch.is_autocast_enabled(device.type) else "off",
        "attention": str(model.config._attn_implementation),
        "parameters": f"{sum(one.numel() for one in model.parameters()) / 1e6:.1f}M",
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def _text_facts(config: Any, tokenizer: Any, context: int) -> dict[str, str]:
    """How long a text may be, and what is put before it or beside it."""
    text = config.get_text_config(decoder=True)
    bos, pad = (getattr(text, name, None) for name in ("bos_token_id", "pad_token_id"))
    first = tokenizer.convert_ids_to_tokens(tokenizer.encode("")[:1]) if tokenizer is not None else []
    return {
        "context": f"{context} tokens" if context else "no limit of its own",
        "bos": f"{'none' if bos is None else bos}, {f'{first[0]} added before a text' if first else 'nothing added'}",
        "pad": "none" if pad is None else str(pad),
    }
