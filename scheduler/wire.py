"""Protocol 1, client side: what a client may say, what the server may answer, and every limit.

One msgpack map for each message, one message for each ZeroMQ frame. Types here are the specification's source:
`docs/protocol.md` explains them, `docs/vectors.json` pins their bytes. Decoding validates everything that can be
checked without knowing the model; nothing is coerced, unknown fields are refused by name, extension types never pass.
Integers and units are in the names. The core never sees these types: only ids, sizes and deadlines go there.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from headway.scheduler import misnamed, params, payload
from headway.scheduler.errors import CODES, HeadwayError
from headway.scheduler.params import TokenId

PROTOCOL = 1

MESSAGE_BYTES_MAX = 32 << 20  # a larger message is answered with too_large; room for 8 Mi token ids
FRAME_BYTES_MAX = 64 << 20  # a larger frame is not even read: libzmq drops the connection
ID_CHARS_MAX = 128  # ids are echoed in every delta
NAME_CHARS_MAX = 128  # model and tenant names become metric labels
INPUT_IDS_MAX = 1 << 20  # no model here reads more; the model's own limit is checked after
MESSAGES_MAX = 1024  # turns of one conversation
STOP_MAX = params.STOP_MAX
LOGIT_BIAS_MAX = params.LOGIT_BIAS_MAX
DEADLINE_MS_MAX = 24 * 3600 * 1000  # a day: past that a deadline means nothing
PRIORITY_MAX = 10  # one step of priority is worth one second of waiting
DEPTH_MAX = payload.DEPTH_MAX  # nesting of a `call` payload
BATCHES_SHOWN_MAX = 256  # batch records a status answer may carry
QUOTE_CHARS_MAX = 256  # of a message's own words in an error: an unknown field's name may be megabytes long
TEXT_BYTES_PER_TOKEN_MAX = 32  # text longer than this x the model's limit is refused before it is tokenised

Id = Annotated[str, Meta(min_length=1, max_length=ID_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=INPUT_IDS_MAX)]
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
DeadlineMs = Annotated[int, Meta(le=DEADLINE_MS_MAX)]  # zero and below are answered deadline_exceeded at once
Params = params.Params


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True, omit_defaults=True):
    v: int = PROTOCOL


class _Request(_Message, frozen=True, kw_only=True):
    """What every request carries. `deadline_ms` is the time left, never a timestamp; lower `priority` is sooner."""

    id: Id
    model: Name | None = None
    tenant: Name | None = None
    priority: Priority = 0
    deadline_ms: DeadlineMs | None = None
    accepted: bool = False  # ask for an `accepted` message once the request is queued


class Generate(_Request, frozen=True, tag="generate", kw_only=True):
    """Continue a text. Exactly one of `prompt`, `messages`, `input_ids`."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    input_ids: TokenIds | None = None
    params: Params = msgspec.field(default_factory=Params)
    stream: bool = False


class Embed(_Request, frozen=True, tag="embed", kw_only=True):
    """A vector for a text. Exactly one of `text`, `input_ids`. `prompt_name`: which of the model's prompts goes before
    the text; "": none; nil: the model's own choice."""

    text: str | None = None
    input_ids: TokenIds | None = None
    truncate: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] | None = None


class Classify(_Request, frozen=True, tag="classify", kw_only=True):
    """Class scores for a text. Exactly one of `text`, `input_ids`."""

    text: str | None = None
    input_ids: TokenIds | None = None
    truncate: bool | None = None


class Score(_Request, frozen=True, tag="score", kw_only=True):
    """One relevance score for a pair of texts."""

    text: str
    text_pair: str
    truncate: bool | None = None


class Call(_Request, frozen=True, tag="call", kw_only=True):
    """Hand `payload`, any msgpack value without extension types, to a user's own engine.

    `tokens` is the caller's own measure of its size, for scheduling; without it the payload's bytes / 4 count.
    """

    payload: msgspec.Raw
    tokens: Annotated[int, Meta(ge=0, le=INPUT_IDS_MAX)] | None = None


class Cancel(_Message, frozen=True, tag="cancel", kw_only=True):
    """End the live request with exactly this id of this client. Answered with `cancel_ack`."""

    id: Id


class Ping(_Message, frozen=True, tag="ping", kw_only=True):
    """Answered with `pong`."""

    id: Id | None = None


class Info(_Message, frozen=True, tag="info", kw_only=True):
    """What is served here, and the limits. Answered with `info`."""

    id: Id | None = None


class Status(_Message, frozen=True, tag="status", kw_only=True):
    """How it is going: queues, workers, counters and the last `batches` batches. Answered with `status`."""

    id: Id | None = None
    batches: Annotated[int, Meta(ge=0, le=BATCHES_SHOWN_MAX)] = 0


Request = Generate | Embed | Classify | Score | Call
ClientMessage = Request | Cancel | Ping | Info | Status


# ---------------------------------------------------------------- server -> client


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts of one answer. `truncated`: the text was longer, and its end was cut off."""

    prompt_tokens: int
    completion_tokens: int = 0
    truncated: bool = False


class Timing(Struct, frozen=True, omit_defaults=True):
    """Milliseconds as the server saw them: waiting, to the first token, in all; and how many ran together."""

    queue_ms: float
    total_ms: float
    ttft_ms: float | None = None
    batch_size: int = 1


class _Answer(Struct, frozen=True, tag_field="type", kw_only=True, omit_defaults=True):
    id: str | None


class Accepted(_Answer, frozen=True, tag="accepted", kw_only=True):
    """The request is queued. Sent only if asked for."""


class Logprobs(Struct, frozen=True, omit_defaults=True):
    """Natural logarithms of probabilities, an entry for each of the answer's tokens: `chosen`, the token's own; and of
    the likeliest tokens at its place, likeliest first, `top_ids` and `top`."""

    chosen: list[float]
    top_ids: list[list[int]] = msgspec.field(default_factory=list)  # empty if no alternatives were asked for
    top: list[list[float]] = msgspec.field(default_factory=list)


class Delta(_Answer, frozen=True, tag="delta", kw_only=True):
    """The next piece of a streamed answer. `seq` counts from 0 without gaps; `text` never splits a character."""

    seq: int
    token_ids: list[int]
    text: str
    logprobs: Logprobs | None = None  # of these token_ids, if asked for


class Result(_Answer, frozen=True, tag="result", kw_only=True):
    """The one good ending of a request. Which fields are there depends on the request's kind (see docs/protocol.md)."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None  # stop | length
    logprobs: Logprobs | None = None
    embedding: list[float] | None = None
    scores: dict[str, float] | None = None
    value: Any = None  # a plain value; the server puts it in as msgspec.Raw. (`Raw | None` would only decode nil.)
    usage: Usage | None = None
    timing: Timing | None = None
    model: str | None = None


class Partial(Struct, frozen=True):
    """What had been answered before an error ended the request."""

    text: str
    token_ids: list[int]


class Error(_Answer, frozen=True, tag="error", kw_only=True):
    """The one bad ending of a request, or the answer to a message that is none (`id` may then be nil)."""

    code: str
    message: str
    retryable: bool
    http: int
    field: str | None = None
    retry_after_ms: int | None = None
    partial: Partial | None = None


class CancelAck(_Answer, frozen=True, tag="cancel_ack", kw_only=True):
    """Whether a live request with that id was found. Not an ending: that is the request's own `error`."""

    found: bool


class Pong(_Answer, frozen=True, tag="pong", kw_only=True):
    """The server's loop is alive."""


class ModelInfo(Struct, frozen=True, omit_defaults=True):
    """One served model. `concurrency`: requests in flight a client should keep to (0.7 x the workers' max_num_seqs).

    `window`: how long requests wait for others there (report.estimate), for people.
    """

    name: str
    kind: str
    workers: int
    concurrency: int
    max_batch: int
    max_input_tokens: int
    context_tokens: int
    bypass_tokens: int
    tokenizer: bool
    facts: dict[str, str] = msgspec.field(default_factory=dict)
    window: dict[str, str | int | float] = msgspec.field(default_factory=dict)


class InfoReply(_Answer, frozen=True, tag="info", kw_only=True):
    """What is served here."""

    protocol: int
    server: str
    models: list[ModelInfo]
    limits: dict[str, int]
    state: str  # serving | draining


class StatusReply(_Answer, frozen=True, tag="status", kw_only=True):
    """How it is going. `counters`: name -> count; maps and records are described in docs/operating.md."""

    state: str
    uptime_s: float
    counters: dict[str, int]
    lanes: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    batches: list[dict[str, Any]]


ServerMessage = Accepted | Delta | Result | Error | CancelAck | Pong | InfoReply | StatusReply

LIMITS: dict[str, int] = {
    "message_bytes_max": MESSAGE_BYTES_MAX,
    "frame_bytes_max": FRAME_BYTES_MAX,
    "id_chars_max": ID_CHARS_MAX,
    "name_chars_max": NAME_CHARS_MAX,
    "input_ids_max": INPUT_IDS_MAX,
    "messages_max": MESSAGES_MAX,
    "stop_max": STOP_MAX,
    "stop_chars_max": params.STOP_CHARS_MAX,
    "logit_bias_max": LOGIT_BIAS_MAX,
    "logprobs_max": params.LOGPROBS_MAX,
    "new_tokens_max": params.NEW_TOKENS_MAX,
    "deadline_ms_max": DEADLINE_MS_MAX,
    "priority_max": PRIORITY_MAX,
    "depth_max": DEPTH_MAX,
    "values_max": payload.VALUES_MAX,
    "batches_shown_max": BATCHES_SHOWN_MAX,
    "text_bytes_per_token_max": TEXT_BYTES_PER_TOKEN_MAX,
}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
encode = _encoder.encode
decode_answer = _server_decoder.decode

_AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")
_FIELD = re.compile(r"(unknown|required) field `([^`]*)`")
_FIELDS = tuple(dict.fromkeys(name for kind in ClientMessage.__args__ for name in kind.__struct_fields__))
_TYPES = tuple(str(kind.__struct_config__.tag) for kind in ClientMessage.__args__)
_CHOICES: dict[type, tuple[str, ...]] = {
    Generate: ("prompt", "messages", "input_ids"),
    Embed: ("text", "input_ids"),
    Classify: ("text", "input_ids"),
}


def decode(body: bytes) -> ClientMessage:
    """The client message in `body`. Raises HeadwayError naming the field and the limit; never anything else."""
    if len(body) > MESSAGE_BYTES_MAX:
        raise HeadwayError("too_large", f"the message has {len(body)} bytes; the limit is {MESSAGE_BYTES_MAX}")
    try:
        message = _decoder.decode(body)
    except msgspec.ValidationError as error:
        _check_version(_peek(body, "v", int))
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError, TypeError) as error:
        raise HeadwayError("invalid_request", f"the message is not one valid msgpack map: {error}") from None
    _check(message)
    return message


def _check(message: ClientMessage) -> None:
    """What the types cannot say."""
    _check_version(message.v)
    choices = _CHOICES.get(type(message))
    if choices:
        given = [name for name in choices if getattr(message, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise HeadwayError(
                "invalid_request", f"give exactly one of {', '.join(choices)}; found {found}", field=choices[0]
            )
    if type(message) is Generate:
        params.check_params(message.params)
    elif type(message) is Call:
        _check_payload(message.payload)


def _check_version(version: int | None) -> None:
    if version is not None and version != PROTOCOL:
        text = f"protocol version {version} is not spoken here; this server speaks version {PROTOCOL}"
        raise HeadwayError("unsupported_version", text, field="v")


def _check_payload(raw: msgspec.Raw) -> None:
    """Only plain values within the limits, in a value that is otherwise passed on unread."""
    data = bytes(raw)
    if data[0] in payload.NUMBERS:  # nothing to look into
        return
    try:
        payload.check(data)
    except payload.NotPlainError as error:
        raise HeadwayError("invalid_request", f"payload {error}", field="payload") from None


def _refusal(text: str) -> HeadwayError:
    """A validation error of the decoder, with its field taken out of the sentence."""
    at = _AT.search(text)
    path = holder = at.group(1) if at else ""
    named = _FIELD.search(text)
    if named:
        path = f"{path}.{named.group(2)}" if path else named.group(2)
    path = path[:QUOTE_CHARS_MAX]
    sentence = (text[: at.start()] if at else text)[:QUOTE_CHARS_MAX]
    if named and named.group(1) == "unknown" and holder in ("", "params"):
        sentence += misnamed.advice(named.group(2), _FIELDS, Params.__struct_fields__, inside=holder == "params")
    elif path == "type":
        sentence += f"; the types are {', '.join(_TYPES)}"
    return HeadwayError("invalid_request", f"{path}: {sentence}" if path else sentence, field=path or None)


_T = TypeVar("_T")


def _peek(body: bytes, name: str, kind: type[_T]) -> _T | None:
    """One top-level field of a message that did not decode, if it can be read at all."""
    try:
        found = msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw]).get(name)
        return None if found is None else msgspec.msgpack.decode(found, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError):
        return None


def id_of(body: bytes) -> str | None:
    """The id of a message that did not decode, if one can be read: an error should find its request."""
    found = _peek(body, "id", str)
    return found if found is not None and len(found) <= ID_CHARS_MAX else None


def error_message(id_: str | None, error: HeadwayError) -> Error:
    """`error` as it goes over the wire."""
    partial = error.partial
    return Error(
        id=id_,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        http=error.http,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        partial=msgspec.convert(partial, Partial) if partial else None,
    )


def error_of(message: Error) -> HeadwayError:
    """The exception a received error message stands for."""
    partial = msgspec.to_builtins(message.partial) if message.partial else None
    code = message.code if message.code in CODES else "internal"
    return HeadwayError(
        code, message.message, field=message.field, retry_after_ms=message.retry_after_ms, partial=partial
    )
