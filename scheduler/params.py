"""How to generate, as a client may say it: every parameter with its range, and what belongs together.

`docs/protocol.md` says what each one means and in which order they act; `workers/generate/sampling.py` does it. A
parameter whose default is None is the server's to fill in: with the model's own default if its operator wants that
(`sampling_defaults`), else with the neutral value, which changes nothing.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headway.scheduler.errors import HeadwayError

STOP_MAX = 16  # each stop string is searched in each piece of text
STOP_CHARS_MAX = 256
LOGIT_BIAS_MAX = 1024
NEW_TOKENS_MAX = 1 << 17
LOGPROBS_MAX = 20  # alternatives named for each token; each costs bytes in every delta

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Bias = Annotated[float, Meta(ge=-1000.0, le=1000.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]

NEUTRAL: dict[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Params(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to generate. `temperature` 0 is greedy. Equal `seed`s give equal answers whatever shares the batch."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=NEW_TOKENS_MAX)] = 256
    min_tokens: Annotated[int, Meta(ge=0, le=NEW_TOKENS_MAX)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None  # 0: all
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Annotated[list[Stop], Meta(max_length=STOP_MAX)] = msgspec.field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_MAX)] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=LOGIT_BIAS_MAX)] = msgspec.field(default_factory=dict)
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None  # None: none; 0: only the chosen token's


def check_params(params: Params) -> None:
    """What the types cannot say. Raises HeadwayError `invalid_request`."""
    if params.min_tokens > params.max_new_tokens:
        text = f"params.min_tokens is {params.min_tokens}; the limit is max_new_tokens, {params.max_new_tokens}"
        raise HeadwayError("invalid_request", text, field="params.min_tokens")


def check_vocabulary(params: Params, size: int) -> None:
    """Refuse ids that a vocabulary of `size` tokens lacks. Raises HeadwayError `invalid_request`."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if ids and (largest := max(ids)) >= size:
            where = f"params.{name}"
            text = f"{where} names token {largest}; the model's vocabulary has {size} tokens, 0 to {size - 1}"
            raise HeadwayError("invalid_request", text, field=where)


def filled(params: Params, defaults: dict[str, float]) -> Params:
    """`params`, with `defaults` (names of NEUTRAL) where it says nothing."""
    given = {name: value for name, value in defaults.items() if getattr(params, name) is None}
    return msgspec.structs.replace(params, **given) if given else params
