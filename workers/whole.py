"""Is the model that was loaded the model that was asked for? Every way in which weights go wrong without an error.

Transformers fills what a checkpoint lacks with random numbers, drops what the model has no place for, and goes on; such
a model answers fluent nonsense. Here each such difference becomes a sentence with the names in it, and a refusal,
unless the operator said `allow_incomplete`: then the sentences are said aloud and stay on the card. Lives here: the
comparison of report, model and config. Never here: reading files.
"""

import logging
from collections.abc import Iterable
from typing import Any

from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")

POOLER = "pooler."  # of a body: its hidden states are served, so a pooler made up instead touches no answer
NAMED_MAX = 8  # weights listed in one sentence

# Multi-head latent attention by its projections: names in the module, and the shape that the config asks of each.
_QUERY_FULL = ("q_proj",)
_QUERY_LOW_RANK = ("q_a_proj", "q_a_layernorm", "q_b_proj")
_LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")


def check_whole(model: Any, report: dict[str, Any], source: str, *, headless: bool, allow_incomplete: bool) -> str:
    """What is wrong with the weights of `model`, in words; empty if nothing is.

    `report`: what `from_pretrained(output_loading_info=True)` says. `headless`: the model is the body of one trained
    with a head, whose weights may be left over. Raises LoadError naming the weights, unless `allow_incomplete`.
    """
    if headless and (unused := [name for name in report.get("missing_keys", ()) if str(name).startswith(POOLER)]):
        log.info("%s has no weights for a pooler, which is not used: %s", source, some(sorted(map(str, unused))))
        report = report | {"missing_keys": set(report["missing_keys"]) - set(unused)}
    faults = [*weight_faults(report), *_left_over(model, report, source, headless), *_untied(model), *_latent(model)]
    if not faults:
        return ""
    said = "; ".join(faults)
    if not allow_incomplete:
        raise LoadError(
            f"{source} does not hold the weights of this model ({said}); refusing to serve it. "
            "Correct the folder, or set allow_incomplete: true to serve it as it is"
        )
    log.warning("%s is served although it is not whole (allow_incomplete): %s", source, said)
    return said


def weight_faults(report: dict[str, Any]) -> list[str]:
    """Weights that are missing, and were made up instead, or that have another shape in the file."""
    faults = []
    if missing := sorted(map(str, report.get("missing_keys") or ())):
        faults.append(f"missing, newly initialised: {some(missing)}")
    if mismatched := report.get("mismatched_keys"):
        shapes = [
            f"{name} (file {list(found)}, model {list(wanted)})"
            for name, found, wanted in sorted(mismatched, key=lambda one: str(one[0]))
        ]
        faults.append(f"mis-shaped, newly initialised: {some(shapes)}")
    if errors := report.get("error_msgs"):
        faults.append(f"not converted: {some([str(error) for error in errors])}")
    return faults


def some(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _left_over(model: Any, report: dict[str, Any], source: str, headless: bool) -> list[str]:
    """Weights of the file that the model has no place for: another architecture, or too few layers in the config.

    For a body without its head, what belongs to no part of the body is the head's, and only mentioned.
    """
    unexpected = sorted(map(str, report.get("unexpected_keys") or ()))
    if not headless:
        return [f"unexpected: {some(unexpected)}"] if unexpected else []
    parts = {name for name, _ in model.named_children()}
    prefix = f"{model.base_model_prefix}." if getattr(model, "base_model_prefix", "") else ""
    within = [name for name in unexpected if name.removeprefix(prefix).split(".")[0] in parts]
    if head := [name for name in unexpected if name not in within]:
        log.info("%s also holds weights of a head, which are not used: %s", source, some(head))
    return [f"unexpected: {some(within)}"] if within else []


def _untied(model: Any) -> list[str]:
    """Weights that the config declares to be one, while the file holds two that differ: one of both is not meant."""
    declared = getattr(model, "get_expanded_tied_weights_keys", None)
    if declared is None:
        return []
    pairs = declared(all_submodels=True).items()
    named = dict(model.named_parameters(remove_duplicate=False))
    faults = [
        f"{one} and {other}" for one, other in sorted(pairs) if one in named and named[one] is not named.get(other)
    ]
    return [f"tied by the config (tie_word_embeddings), different in the file: {some(faults)}"] if faults else []


def _latent(model: Any) -> list[str]:
    """DeepSeek's latent attention, projection by projection, against the config's ranks."""
    faults = []
    for name, module in model.named_modules():
        if not getattr(module, "kv_lora_rank", 0) or not hasattr(module, "qk_rope_head_dim"):
            continue
        low_rank = getattr(module, "q_lora_rank", None)
        wanted = [*(_QUERY_LOW_RANK if low_rank else _QUERY_FULL), *_LATENT]
        absent = [part for part in wanted if getattr(getattr(module, part, None), "weight", None) is None]
        if absent:
            faults.append(f"{name} has no {', '.join(absent)}")
            continue
        faults += [
            f"{name}.{part}.weight is {list(weight.shape)}, the config asks for {list(shape)}"
            for part, shape in _latent_shapes(module).items()
            if (weight := getattr(module, part).weight).is_floating_point() and tuple(weight.shape) != shape
        ]
    return [f"latent attention: {some(faults)}"] if faults else []


def _latent_shapes(module: Any) -> dict[str, tuple[int, int]]:
    config = module.config
    heads, rank = config.num_attention_heads, module.kv_lora_rank
    nope, rope, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    query = "q_b_proj" if module.q_lora_rank else "q_proj"
    return {
        query: (heads * (nope + rope), module.q_lora_rank or config.hidden_size),
        "kv_a_proj_with_mqa": (rank + rope, config.hidden_size),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (config.hidden_size, heads * value),
    }


def dtypes_of(tensors: Iterable[Any]) -> str:
    """The dtypes of `tensors`, the commonest first; how many are of the others."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + 1
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    return ", ".join([ranked[0], *(f"{counts[name]} weights {name}" for name in ranked[1:])]) if ranked else "none"
