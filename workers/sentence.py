"""What sentence-transformers keeps beside an encoder's weights, read and followed: how token vectors become one vector.

`modules.json` lists the steps: the encoder, one Pooling (its modes are concatenated, in that library's order), then any
of Dense and Normalize; a step or setting that is not known here refuses the model by name, because leaving it out would
answer with other vectors. `sentence_bert_config.json` says how long a text may be and whether it is lowercased;
`config_sentence_transformers.json` has the prompts. Without `modules.json` a text is pooled by the mean and normalised.
Weights are safetensors only; activations come from a list, never from a name that is imported.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers

from headway.scheduler import link
from headway.workers.load import Loaded, LoadError, model_file

Pool = Callable[[Any, Any, Any], Any]  # token vectors [texts, tokens, size], mask, lengths -> vectors [texts, size]
Step = Callable[[Any], Any]

LIMIT_FILES = tuple(  # the encoder's settings; the library's early releases had a name for each kind of model
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
ACTIVATIONS: dict[str, Step] = {
    "Identity": lambda vectors: vectors,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
}


def _first(hidden: Any, mask: Any, lengths: Any) -> Any:
    del mask, lengths
    return hidden[:, 0]


def _max(hidden: Any, mask: Any, lengths: Any) -> Any:
    del lengths
    return hidden.masked_fill(~mask[..., None], float("-inf")).amax(1)


def _sum(hidden: Any, mask: Any) -> Any:
    return hidden.masked_fill(~mask[..., None], 0.0).sum(1)


def _mean(hidden: Any, mask: Any, lengths: Any) -> Any:
    return _sum(hidden, mask) / lengths[:, None]


def _mean_sqrt(hidden: Any, mask: Any, lengths: Any) -> Any:
    return _sum(hidden, mask) / lengths[:, None].sqrt()


def _weighted_mean(hidden: Any, mask: Any, lengths: Any) -> Any:
    weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
    return _sum(hidden * weights[:, None], mask) / (lengths * (lengths + 1) / 2)[:, None]


def _last(hidden: Any, mask: Any, lengths: Any) -> Any:
    del mask
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


POOLS: dict[str, tuple[str, Pool]] = {  # mode -> its key in a Pooling's config, and what it does; in order
    "cls": ("pooling_mode_cls_token", _first),
    "max": ("pooling_mode_max_tokens", _max),
    "mean": ("pooling_mode_mean_tokens", _mean),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", _mean_sqrt),
    "weightedmean": ("pooling_mode_weightedmean_tokens", _weighted_mean),
    "lasttoken": ("pooling_mode_lasttoken", _last),
}
UNLESS_SAID = "mean"  # a Pooling whose config does not mention this mode has it


class Head(NamedTuple):
    """What follows the encoder. `words`: it, for people."""

    pools: tuple[Pool, ...]
    steps: tuple[Step, ...]
    words: str

    def __call__(self, hidden: Any, mask: Any, lengths: Any) -> Any:
        """Vectors [texts, size] of `hidden` [texts, tokens, size]; padding, where `mask` is False, never counts."""
        vectors = torch.cat([pool(hidden, mask, lengths) for pool in self.pools], dim=-1)
        for step in self.steps:
            vectors = step(vectors)
        return vectors


def normalised(vectors: Any) -> Any:
    return torch.nn.functional.normalize(vectors, dim=-1)


def head_of(source: str, device: Any) -> Head:
    """The steps after the encoder of `source` (a folder or hub id). Raises LoadError for one that is not known."""
    found = model_file(source, "modules.json")
    if found is None:
        return Head((POOLS["mean"][1],), (normalised,), "mean, normalised")
    pools: tuple[Pool, ...] = ()
    steps: list[Step] = []
    words: list[str] = []
    for module in json.loads(found.read_text()):
        package, _, kind = module["type"].rpartition(".")
        if not package.startswith("sentence_transformers") or kind not in ("Transformer", "Pooling", *_STEPS):
            raise _refused(source, f"has a step {module['type']}, which the embed engine does not know")
        if kind == "Pooling" and not pools:
            modes = _modes(source, _config(source, module["path"]))
            pools = tuple(POOLS[mode][1] for mode in modes)
            words.append(" and ".join(modes))
        elif kind in _STEPS and pools:
            step, word = _STEPS[kind](source, module["path"], device)
            steps.append(step)
            words.append(word)
        elif kind != "Transformer" or pools:
            raise _refused(source, f"has its {kind} step out of order; known is encoder, Pooling, then {_KNOWN}")
    if not pools:
        raise _refused(source, "says in modules.json that it pools nothing; the embed engine needs one vector a text")
    return Head(pools, tuple(steps), ", ".join(words))


def _refused(source: str, why: str) -> LoadError:
    return LoadError(f"{source} {why}")


def _config(source: str, folder: str) -> dict[str, Any]:
    found = model_file(source, f"{folder}/config.json")
    if found is None:
        raise _refused(source, f"names {folder}/config.json, but it is not there")
    config: dict[str, Any] = json.loads(found.read_text())
    return config


def _modes(source: str, config: Mapping[str, Any]) -> list[str]:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [named.lower()]
    else:
        keys = {key: mode for mode, (key, _) in POOLS.items()} | {"pooling_mode": ""}
        unknown = sorted(key for key, on in config.items() if key.startswith("pooling_mode") and on and key not in keys)
        modes = unknown or [mode for mode, (key, _) in POOLS.items() if config.get(key, mode == UNLESS_SAID)]
    if not modes or not set(modes) <= set(POOLS):
        raise _refused(source, f"pools by {' and '.join(modes) or 'nothing'}; known are {', '.join(POOLS)}")
    if config.get("include_prompt") is False and any(prompts_of(source).values()):
        raise _refused(source, "leaves its prompts out of the pooling (include_prompt), which is not known here")
    return modes


def _dense(source: str, folder: str, device: Any) -> tuple[Step, str]:
    config = _config(source, folder)
    module, _, last = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if last not in ACTIVATIONS or not module.startswith("torch.nn"):
        text = f"its Dense step has the activation {module}.{last}; known are {', '.join(ACTIVATIONS)}"
        raise _refused(source, f"cannot be followed: {text}")
    named = {key: config[key] for key in ("module_input_name", "module_output_name") if config.get(key)}
    if strange := {key: name for key, name in named.items() if name != "sentence_embedding"}:
        raise _refused(source, f"has a Dense step with {strange}; known is one from and to the sentence's vector")
    found = model_file(source, f"{folder}/model.safetensors")
    if found is None:
        raise _refused(source, f"has no {folder}/model.safetensors; weights are read from safetensors only")
    weights = load_file(found, device=str(device))
    shape = (config["out_features"], config["in_features"])
    wanted = {"linear.weight": shape} | ({"linear.bias": shape[:1]} if config.get("bias", True) else {})
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != wanted:
        raise _refused(source, f"does not hold the weights in {folder} that its config names: {wanted}")
    weight, bias = weights["linear.weight"].float(), weights.get("linear.bias")
    bias = None if bias is None else bias.float()
    act = ACTIVATIONS[last]
    return (lambda vectors: act(torch.nn.functional.linear(vectors, weight, bias))), f"dense to {shape[0]}"


def _normalize(source: str, folder: str, device: Any) -> tuple[Step, str]:
    del source, folder, device
    return normalised, "normalised"


_STEPS: dict[str, Callable[[str, str, Any], tuple[Step, str]]] = {"Dense": _dense, "Normalize": _normalize}
_KNOWN = " and ".join(_STEPS)


# ---------------------------------------------------------------- before the encoder


def prompts_of(source: str) -> dict[str, str]:
    """What may be put before a text, by name; under "" what is put there if no name is given, if anything is."""
    found = model_file(source, "config_sentence_transformers.json")
    config = json.loads(found.read_text()) if found else {}
    prompts = {str(name): str(text) for name, text in (config.get("prompts") or {}).items()}
    default = config.get("default_prompt_name")
    if default is None:
        return prompts
    if default not in prompts:
        raise _refused(source, f"has no prompt {default!r}, which it names as its default; there: {', '.join(prompts)}")
    return prompts | {"": prompts[default]}


def trained_tokens(source: str) -> int:
    """The longest input the model was made for, 0 if it does not say. There that library cuts texts without a word."""
    return int(_encoder(source).get("max_seq_length") or 0)


def tokenizer_of(loaded: Loaded) -> link.Tokenizer | None:
    """The tokenizer, with what the encoder's settings add to it: lowercasing."""
    card = loaded.tokenizer
    if card is None or not _encoder(loaded.source).get("do_lower_case"):
        return card
    tokenizer = Tokenizer.from_str(card.data.decode())
    own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return link.Tokenizer(card.kind, tokenizer.to_str().encode(), card.chat_template, card.special)


def _encoder(source: str) -> dict[str, Any]:
    found = next((path for name in LIMIT_FILES if (path := model_file(source, name))), None)
    config: dict[str, Any] = json.loads(found.read_text()) if found else {}
    return config
