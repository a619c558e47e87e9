"""What the client library hands to its caller: frozen, typed, without wire details."""

from typing import TypedDict

from msgspec import Struct

from headway.scheduler import wire
from headway.scheduler.errors import HeadwayError
from headway.scheduler.wire import Timing, Usage


class Options(TypedDict, total=False):
    """What every request takes.

    `model`: None is the one there that serves this kind. `deadline_ms`: the time the caller has, waiting in this
    client included. `priority`: lower is sooner, -10 to 10. `tenant`: whom to account it to.
    """

    model: str | None
    deadline_ms: int | None
    priority: int
    tenant: str | None


class GenerateOptions(Options, total=False):
    """And the fields of wire.Params; their meaning and limits are documented there and in docs/protocol.md.

    None is the same as leaving it out.
    """

    max_new_tokens: int
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: list[str] | str
    stop_token_ids: list[int]
    ignore_eos: bool
    logit_bias: dict[int, float]
    logprobs: int | None


class Alternative(Struct, frozen=True):
    """A token that could have stood there, and the logarithm of its probability."""

    token_id: int
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """A token of an answer, the logarithm of its probability to the model (before bias, penalties and temperature), and
    the likeliest tokens at its place, likeliest first; the token itself may be one of them."""

    token_id: int
    logprob: float
    top: tuple[Alternative, ...] = ()


class Delta(Struct, frozen=True, omit_defaults=True):
    """The next piece of a streamed answer. `seq` counts from 0; `text` never splits a character and may be empty.
    `logprobs`: one for each of `token_ids`, if asked for."""

    seq: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


class _Answered(Struct, frozen=True, kw_only=True):
    """`attempts`: how often the request was sent, 1 if it went well at once."""

    usage: Usage | None
    timing: Timing | None
    model: str | None
    attempts: int


class Generation(_Answered, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer. `finish_reason`: stop | length. `token_ids`: the generated ones, without the prompt's.
    `logprobs`: one for each of them, if asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None


class Embedding(_Answered, frozen=True, kw_only=True):
    """`vector`: the text's embedding, normalised if the model says so."""

    vector: tuple[float, ...]


class Classification(_Answered, frozen=True, kw_only=True):
    """`scores`: class name -> score."""

    scores: dict[str, float]

    @property
    def label(self) -> str:
        """The class with the highest score; of equals, the first."""
        return max(self.scores, key=self.scores.__getitem__)


class Relevance(_Answered, frozen=True, kw_only=True):
    """`score`: how well the second text answers the first; higher is better."""

    score: float


class Counters(Struct, frozen=True):
    """A client's books: `sent` == `answered` + `timed_out` + `cancelled` + `lost` + `live`, always.

    `sent`: requests given to the socket, each try counted. `answered`: ended by the server, well or badly. `timed_out`:
    given up at the caller's deadline. `cancelled`: given up by the caller. `lost`: the connection was lost under them.
    `live`: on the wire, not ended. `retries`: tries after the first. `late`: messages dropped because nobody waits for
    their id (any longer).
    """

    sent: int = 0
    answered: int = 0
    timed_out: int = 0
    cancelled: int = 0
    lost: int = 0
    live: int = 0
    retries: int = 0
    late: int = 0


def generation_of(result: wire.Result, attempts: int) -> Generation:
    if result.text is None or result.token_ids is None:
        raise _incomplete("text and token_ids")
    return Generation(
        text=result.text,
        token_ids=tuple(result.token_ids),
        finish_reason=result.finish_reason or "stop",
        logprobs=logprobs_of(result.token_ids, result.logprobs),
        usage=result.usage,
        timing=result.timing,
        model=result.model,
        attempts=attempts,
    )


def delta_of(delta: wire.Delta) -> Delta:
    return Delta(delta.seq, delta.text, tuple(delta.token_ids), logprobs_of(delta.token_ids, delta.logprobs))


def logprobs_of(token_ids: list[int], given: wire.Logprobs | None) -> tuple[TokenLogprob, ...] | None:
    """The columns of the wire as one value for each token."""
    if given is None:
        return None
    if len(given.chosen) != len(token_ids) or not len(given.top) == len(given.top_ids) in (0, len(token_ids)):
        raise _incomplete("logprobs for every token")
    columns = zip(given.top_ids, given.top, strict=True)
    tops = [tuple(map(Alternative, ids, values)) for ids, values in columns] or [()] * len(token_ids)
    return tuple(map(TokenLogprob, token_ids, given.chosen, tops))


def embedding_of(result: wire.Result, attempts: int) -> Embedding:
    if result.embedding is None:
        raise _incomplete("embedding")
    vector = tuple(result.embedding)
    return Embedding(vector=vector, usage=result.usage, timing=result.timing, model=result.model, attempts=attempts)


def classification_of(result: wire.Result, attempts: int) -> Classification:
    if not result.scores:
        raise _incomplete("scores")
    return Classification(
        scores=result.scores, usage=result.usage, timing=result.timing, model=result.model, attempts=attempts
    )


def relevance_of(result: wire.Result, attempts: int) -> Relevance:
    if result.scores is None or "score" not in result.scores:
        raise _incomplete("scores.score")
    score = result.scores["score"]
    return Relevance(score=score, usage=result.usage, timing=result.timing, model=result.model, attempts=attempts)


def _incomplete(name: str) -> HeadwayError:
    return HeadwayError("internal", f"the server's result lacks {name}; is it of another kind than was asked for?")
