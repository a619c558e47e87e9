"""The link between scheduler and workers: typed msgpack over ROUTER (scheduler) and DEALER (worker).

Internal and versioned by LINK: both ends are of one release. Arrays instead of maps, because a worker sends one
message for each step. A batch id is unique for the scheduler's life and comes back with every report, so that a late
report is recognised and harmless. Token ids travel as little-endian uint32 bytes: they decode in one copy.
"""

import socket
import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from headway.scheduler.wire import Params

LINK = 1
COUNTS_MAX = 512  # of one report of experts: it stays within a kilobyte
LINK_BYTES_MAX = 256 << 20  # what a worker may send at once: results of a batch, or a tokenizer

assert array("I").itemsize == 4
assert array("H").itemsize == 2
NOTHING = Raw(b"\xc0")  # nil; a field of type `Raw | None` would decode nothing else
_SWAP = sys.byteorder == "big"


def hostname() -> str:
    """The name of this machine, by which a scheduler knows its own processes from others'."""
    return socket.gethostname()


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return _pack(array("I", ids))


def unpack_ids(data: bytes) -> list[int]:
    """The token ids in `data`; its length must be a multiple of 4."""
    return _unpack(array("I"), data)


def pack_floats(values: Iterable[float]) -> bytes:
    """Numbers as little-endian float32."""
    return _pack(array("f", values))


def unpack_floats(data: bytes) -> list[float]:
    """The numbers in `data`; its length must be a multiple of 4."""
    return _unpack(array("f"), data)


def pack_counts(counts: Iterable[int]) -> bytes:
    """Counts as little-endian uint16."""
    return _pack(array("H", counts))


def unpack_counts(data: bytes) -> list[int]:
    """The counts in `data`; its length must be a multiple of 2."""
    return _unpack(array("H"), data)


def pack_logprobs(chosen: Iterable[float], top_ids: Iterable[int], top: Iterable[float]) -> bytes:
    """Logprobs of a row's tokens: each token's own; then, for each, equally many alternatives' ids and logprobs."""
    return pack_floats(chosen) + pack_ids(top_ids) + pack_floats(top)


def unpack_logprobs(data: bytes, tokens: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """What `pack_logprobs` was given, for a row of `tokens` tokens. Raises ValueError if the size cannot be right."""
    each, rest = divmod(len(data), 4 * tokens) if tokens else (1, len(data))
    if rest or each % 2 == 0:
        raise ValueError(f"{len(data)} bytes are no logprobs of {tokens} tokens")
    at, width = 4 * tokens, each // 2
    middle = at + (len(data) - at) // 2
    ids, values = unpack_ids(data[at:middle]), unpack_floats(data[middle:])
    cuts = [slice(place * width, (place + 1) * width) for place in range(tokens)]
    return unpack_floats(data[:at]), [ids[cut] for cut in cuts], [values[cut] for cut in cuts]


def _pack(values: "array[Any]") -> bytes:
    if _SWAP:
        values.byteswap()
    return values.tobytes()


def _unpack(empty: "array[Any]", data: bytes) -> list[Any]:
    empty.frombytes(data)
    if _SWAP:
        empty.byteswap()
    return empty.tolist()


class Tokenizer(Struct, frozen=True, array_like=True):
    """What the scheduler needs to turn text into ids and back.

    `kind`: "json" (`data` is a tokenizer.json of the tokenizers library) or "bytes" (ids 0..255 are UTF-8 bytes).
    `special`: names such as bos_token and eos_token, as chat templates expect them.
    """

    kind: str
    data: bytes = b""
    chat_template: str | None = None
    special: dict[str, str] = {}


class Experts(Struct, frozen=True, array_like=True):
    """How a model routes its tokens, and what its workers report of it.

    `layers` of them route, each to `top_k` of `experts` (and `shared`, to which every token goes); in the `sampled`
    layers tokens are counted in `groups`: `devices`, or, where one device holds all, single experts. `revision`: of the
    weights; `placement`: of the map from experts to devices. Counts of different ones do not compare.
    """

    layers: Annotated[int, Meta(ge=1)]
    sampled: Annotated[list[int], Meta(min_length=1, max_length=COUNTS_MAX)]
    experts: Annotated[int, Meta(ge=1)]
    top_k: Annotated[int, Meta(ge=1)]
    groups: Annotated[int, Meta(ge=1, le=COUNTS_MAX)]
    devices: Annotated[int, Meta(ge=1)]
    revision: str = ""
    placement: int = 0
    shared: int = 0


class Routed(Struct, frozen=True, array_like=True):
    """Where tokens of one request went: of its prompt (`prompt`), or `tokens` decoded since the last such report.

    `counts`: uint16 [sampled layers, groups], packed; `saturated` if one was larger. `cached`: prompt tokens that are
    not counted, because they were not computed.
    """

    batch: int
    rid: int
    prompt: bool
    tokens: Annotated[int, Meta(ge=0)]
    counts: Annotated[bytes, Meta(max_length=2 * COUNTS_MAX)]
    saturated: bool = False
    placement: int = 0
    cached: Annotated[int, Meta(ge=0)] = 0


class Card(Struct, frozen=True, array_like=True):
    """What a worker serves, in its own words.

    `kind`: generate | embed | classify | score | call. `mode`: "oneshot" (a batch is run as one) or "iteration"
    (requests join and leave between steps). `max_batch`: most requests in one Run. `max_num_seqs`: most requests in
    the worker at once. `context_tokens`: input plus output (0: no such limit). `vocab_size` 0: unknown.
    `prior_ns`: a first guess of (fixed, per token, per request) cost, or empty. `facts`: what to show a person
    (device, dtype, attention, ...). `padded`: batches are padded to their longest input, so similar lengths should
    run together; an engine that packs leaves it False. `prompts`: what may be put
    before a text to embed, by name; "" is what is put there if none is named. `truncate`: a text that is too long is
    cut rather than refused, unless its request says otherwise. `defaults`: values of wire.Params (names
    of params.NEUTRAL) for what requests leave out. `experts`: None if it has none.
    """

    name: str
    kind: str
    mode: str
    max_batch: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    max_input_tokens: Annotated[int, Meta(ge=0)]
    context_tokens: int = 0
    vocab_size: int = 0
    kv_tokens: int = 0
    prior_ns: tuple[float, ...] = ()
    tokenizer: Tokenizer | None = None
    facts: dict[str, str] = {}
    padded: bool = False
    defaults: dict[str, float | int] = {}
    prompts: dict[str, str] = {}
    truncate: bool = False
    experts: Experts | None = None


class Item(Struct, frozen=True, array_like=True):
    """One request's share of a batch. `rid` is the scheduler's id. `ids`: packed input ids; `ids_pair`: the second
    text of a pair; `done`: packed ids already generated elsewhere, to continue after; `payload`: a `call`'s value;
    `tenant`: whose it is, empty if it does not say.
    """

    rid: int
    ids: bytes = b""
    ids_pair: bytes = b""
    done: bytes = b""
    params: Params | None = None
    payload: Raw = NOTHING
    tenant: str = ""


# ---------------------------------------------------------------- scheduler -> worker


class Run(Struct, frozen=True, array_like=True, tag="run"):
    """Run these requests. In iteration mode they join at the next step."""

    batch: int
    items: list[Item]


class Drop(Struct, frozen=True, array_like=True, tag="drop"):
    """Stop working on these requests of this batch; unknown ones are ignored."""

    batch: int
    rids: list[int]


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """Leave: at once, or (`drain`) when what is running has ended."""

    drain: bool = True


class Again(Struct, frozen=True, array_like=True, tag="again"):
    """The scheduler does not know this worker (it was silent for too long): forget all work and register again. To a
    worker that waits for its welcome it says nothing: a heartbeat came before its Ready, on a connection of its own."""


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The registration was taken. Without one within a few seconds a worker registers again."""

    link: int = LINK


ToWorker = Run | Drop | Stop | Again | Welcome

# ---------------------------------------------------------------- worker -> scheduler


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """A worker registers: `name` is for people, `pid` and `host` tell where it is."""

    link: int
    name: str
    pid: int
    host: str
    card: Card


class Beat(Struct, frozen=True, array_like=True, tag="beat"):
    """Alive. `progress` grows with each step: a busy worker whose progress stands still is stuck."""

    progress: int
    busy: bool
    rss_bytes: int = 0


class Outcome(Struct, frozen=True, array_like=True):
    """One request's result of a one-shot batch: a value, an embedding (packed float32), scores, or an error."""

    rid: int
    value: Raw = NOTHING
    embedding: bytes | None = None
    scores: dict[str, float] | None = None
    code: str = ""  # empty: it went well
    message: str = ""


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """A one-shot batch ended. `compute_ns`: in the engine. `tokens`: computed, padding included. `shortages`: how often
    memory ran out in it, so that a part ran again in halves. The rest is as in Step."""

    batch: int
    compute_ns: int
    tokens: int
    outcomes: list[Outcome]
    routed: list[Routed] = []
    critical: int = 0
    active: int = 0
    shortages: int = 0


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """A whole batch (one-shot), or the named rows of it (iteration: `rids`), failed together: culprit unknown."""

    batch: int
    code: str
    message: str
    rids: list[int] = []
    compute_ns: int = 0


class Row(Struct, frozen=True, array_like=True):
    """What one step did for one request: new token ids, and its ending if it has one.

    `finish`: "" (goes on) | "stop" | "length" | "dropped" | "error" (then `code` and `message`). `logprobs`: of
    `tokens`, as pack_logprobs makes them, if the request asks for them.
    """

    batch: int
    rid: int
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    finish: str = ""
    code: str = ""
    message: str = ""
    logprobs: bytes | None = None


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """One step of an iteration-level engine. `tokens`: computed in it (decode rows + prefill chunk tokens).

    `kv_used` of `kv_total` tokens of the cache are taken; `shortages`: how often memory ran out in it;
    `reused`: tokens that need not be computed because pages of a shared beginning hold them.

    Of a mixture of experts: reports that are due (`routed`), and of this step, summed over sampled layers, the tokens
    of the hottest device (`critical`) and the distinct experts used (`active`, where one device holds all).
    """

    compute_ns: int
    tokens: int
    running: int
    rows: list[Row]
    kv_used: int = 0
    kv_total: int = 0
    routed: list[Routed] = []
    critical: int = 0
    active: int = 0
    shortages: int = 0
    reused: int = 0


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The worker leaves, and says why."""

    reason: str


FromWorker = Ready | Beat | Done | Failed | Step | Bye


def checked(message: FromWorker) -> FromWorker:
    """What the types cannot say. Raises ValueError."""
    if type(message) is Done:
        for outcome in message.outcomes:
            if outcome.embedding is not None and len(outcome.embedding) % 4:
                raise ValueError(
                    f"the embedding of request {outcome.rid} has {len(outcome.embedding)} bytes: no float32"
                )
    if type(message) is Done or type(message) is Step:
        for report in message.routed:
            if len(report.counts) % 2:
                raise ValueError(f"the counts of request {report.rid} have {len(report.counts)} bytes: no uint16")
    return message


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
