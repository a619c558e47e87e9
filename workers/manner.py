"""What a model says about generating with it: which tokens end its answers, and how it would be sampled.

End tokens are gathered from three places, because models leave them out in each: the generation config, the tokenizer,
and the chat template, whose mark after an assistant's turn is what a chat model writes when it is done. The sampling
values of the generation config are read and shown; whether they count for requests is the operator's to say
(`sampling_defaults`), since a server that takes them silently answers one request differently with each model.
"""

import logging
from typing import Any

import msgspec

from headway.scheduler.params import NEUTRAL, Params

log = logging.getLogger("headway.worker")

ANSWER = "headway"  # an assistant's words, to find where they end; no template changes them


def ends_of(model: Any, tokenizer: Any) -> dict[int, str]:
    """The ids that end an answer, and who says so. `tokenizer`: of Transformers, or None."""
    ends: dict[int, str] = {}
    for source, ids in (
        ("generation config", _ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))),
        ("config", _ids(getattr(model.config.get_text_config(decoder=True), "eos_token_id", None))),
        ("tokenizer", _ids(getattr(tokenizer, "eos_token_id", None))),
        ("chat template", _ids(turn_end(tokenizer) if tokenizer is not None else None)),
    ):
        if source == "config" and ends:
            continue  # Transformers itself looks there only if the generation config says nothing
        for token in ids:
            ends.setdefault(token, source)
    return ends


def _ids(found: Any) -> list[int]:
    return [int(token) for token in (found if isinstance(found, (list, tuple)) else [found]) if token is not None]


def turn_end(tokenizer: Any) -> int | None:
    """The added token that its chat template writes right after an assistant's words, if it writes one there."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template is a program: it may raise whatever Python does
        log.info("the chat template does not say how a turn ends: %s", error)
        return None
    rest = str(text).rpartition(ANSWER)[2].lstrip()
    marks = {str(added.content): int(token) for token, added in tokenizer.added_tokens_decoder.items()}
    fitting = [mark for mark in marks if mark and rest.startswith(mark)]
    return marks[max(fitting, key=len)] if fitting else None


def defaults_of(model: Any) -> dict[str, float | int]:
    """What the model's generation config names of NEUTRAL's parameters, as a request would say it.

    As in Transformers, values for sampling count only with `do_sample`. One that no request could have is left out.
    """
    config = getattr(model, "generation_config", None)
    named = config.to_diff_dict() if config is not None else {}
    found = {name: named[name] for name in NEUTRAL if named.get(name) is not None}
    if named.get("do_sample"):
        found.setdefault("temperature", 1.0)
    else:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    return {name: value for name, value in found.items() if _is_valid(name, value)}


def _is_valid(name: str, value: Any) -> bool:
    try:
        msgspec.convert({name: value}, Params)
    except msgspec.ValidationError as error:
        log.warning("the model's generation config has %s %r, which is ignored: %s", name, value, error)
        return False
    return True


def facts_of(
    ends: dict[int, str], tokenizer: Any, defaults: dict[str, float | int], *, applied: bool
) -> dict[str, str]:
    """For people: the end tokens with their names, and the model's own sampling values."""
    names = {token: tokenizer.convert_ids_to_tokens(token) if tokenizer is not None else "" for token in ends}
    facts = {"eos": ", ".join(f"{token} {names[token] or ''}".strip() for token in ends) or "none"}
    if defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        facts["sampling"] = f"{values} ({'applied' if applied else 'not applied: sampling_defaults is neutral'})"
    return facts
