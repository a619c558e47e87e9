"""Where a replay goes: a headway server over ZeroMQ, or the scheduler inside this process.

A target makes a shot ready before its time (`load`), so that nothing but sending is left when the time has come
(`fire`). It raises a HeadwayError for a bad ending and returns after a good one; what it saw is in the note. Clients
here are impatient on purpose: no limit on what is in flight, no second try, because a replay that is kind to the server
measures its own kindness.
"""

from collections.abc import Callable
from typing import Protocol

import anyio
import msgspec
import zmq
import zmq.asyncio

from headway.bench.replay import prompts
from headway.bench.replay.plan import Shot
from headway.bench.replay.seen import Note
from headway.scheduler import wire
from headway.scheduler.client import Client
from headway.scheduler.client_call import Call
from headway.scheduler.config import ConfigError
from headway.scheduler.errors import HeadwayError
from headway.scheduler.wire import PRIORITY_MAX

SLOW_HWM = 1  # messages that libzmq takes for one that reads slowly
SLOW_BUFFER_BYTES = 4096  # and the kernel
ANSWER_MS = 600_000  # for a slow reader's next message, whatever its own pace


class How(msgspec.Struct, frozen=True, omit_defaults=True):
    """How requests are made. `tokenizer`: send text, counted with this; empty: token ids. `slow_ms`: what a slow reader
    waits before each message that it reads."""

    model: str = ""
    stream: bool = True
    tokenizer: str = ""
    ignore_eos: bool = True
    temperature: float | None = None
    slow_ms: float = 0.0
    seed: int = 0


class Target(Protocol):
    """`fire` may be called for many at once. `slow`: there is a connection whose reading can be slowed down."""

    slow: bool

    def load(self, shot: Shot) -> object: ...

    async def fire(self, shot: Shot, ready: object, left_ms: int | None, note: Note) -> None: ...


class Impatient(Client):
    """A client that sends at once, whatever the server advises."""

    async def ready(self, request: wire.Request) -> anyio.CapacityLimiter | None:
        del request
        if not self.socket.connected.is_set():
            await self.socket.until_connected(self._timeout_ms)
        return None


class Requests:
    """Makes wire requests from shots, each with an id of its own. `prefix`: not used by any other of this client."""

    def __init__(self, how: How, prefix: str) -> None:
        self._how = how
        self._prefix = prefix
        self._text = prompts.texts(how.tokenizer, how.seed) if how.tokenizer else None
        self._params = {"ignore_eos": how.ignore_eos, "temperature": how.temperature}

    def make(self, shot: Shot) -> wire.Request:
        """The request of a shot, without its deadline."""
        make = _MAKE.get(shot.kind)
        if make is None:
            raise ConfigError(f"requests of kind {shot.kind!r} cannot be made up; there are {', '.join(_MAKE)}")
        return make(self, shot, self._common(shot))

    def _common(self, shot: Shot) -> dict[str, object]:
        return {
            "id": f"{self._prefix}{shot.index}",
            "model": self._how.model or None,
            "tenant": shot.tenant[: wire.NAME_CHARS_MAX] or None,
            "priority": max(-PRIORITY_MAX, min(PRIORITY_MAX, shot.priority)),
        }

    def _input(self, shot: Shot, text: str) -> dict[str, object]:
        if shot.ids is not None:
            return {"input_ids": shot.ids}
        tokens = max(1, shot.tokens)
        if self._text is not None:
            return {text: self._text(shot.index, tokens)}
        return {"input_ids": prompts.ids(shot.index, tokens, self._how.seed)}

    def _generate(self, shot: Shot, common: dict[str, object]) -> wire.Request:
        params = wire.Params(max_new_tokens=max(1, shot.max_new), **self._params)  # type: ignore[arg-type]
        return wire.Generate(**common, **self._input(shot, "prompt"), params=params, stream=self._how.stream)  # type: ignore[arg-type]

    def _embed(self, shot: Shot, common: dict[str, object]) -> wire.Request:
        return wire.Embed(**common, **self._input(shot, "text"))  # type: ignore[arg-type]

    def _classify(self, shot: Shot, common: dict[str, object]) -> wire.Request:
        return wire.Classify(**common, **self._input(shot, "text"))  # type: ignore[arg-type]

    def _score(self, shot: Shot, common: dict[str, object]) -> wire.Request:
        """A pair of texts, each half of the input."""
        text = self._text or prompts.plain
        halves = [max(1, part) for part in (shot.tokens // 2, shot.tokens - shot.tokens // 2)]
        pair = [text(2 * shot.index + place, tokens) for place, tokens in enumerate(halves)]
        return wire.Score(**common, text=pair[0], text_pair=pair[1])  # type: ignore[arg-type]

    def _call(self, shot: Shot, common: dict[str, object]) -> wire.Request:
        payload = shot.payload if shot.payload is not None else _PAYLOAD
        return wire.Call(**common, payload=msgspec.Raw(payload), tokens=shot.tokens)  # type: ignore[arg-type]


_PAYLOAD = msgspec.msgpack.encode("replayed")
_MAKE: dict[str, Callable[[Requests, Shot, dict[str, object]], wire.Request]] = {
    "generate": Requests._generate,
    "embed": Requests._embed,
    "classify": Requests._classify,
    "score": Requests._score,
    "call": Requests._call,
}


def took(note: Note, result: wire.Result, at_ns: int = 0) -> None:
    """What a good ending says beyond its time, which was `at_ns`, or is now."""
    seen = note.seen
    if result.usage is not None:
        seen.input, seen.output = result.usage.prompt_tokens, result.usage.completion_tokens
    if result.timing is not None:
        seen.queue_ms, seen.batch_size = result.timing.queue_ms, result.timing.batch_size
        seen.server_ms = result.timing.total_ms
    note.over("ok", at_ns=at_ns)


class Headway:
    """A client of headway, open already: `Impatient`, or an embedded Scheduler, which has no limit anyway."""

    def __init__(self, client: Client, how: How, *, slow: "SlowLines | None" = None) -> None:
        self._client = client
        self._requests = Requests(how, "r")
        self._slow = slow
        self.slow = slow is not None

    def load(self, shot: Shot) -> wire.Request:
        return self._requests.make(shot)

    async def fire(self, shot: Shot, ready: object, left_ms: int | None, note: Note) -> None:
        assert isinstance(ready, wire.Request)
        request = ready if left_ms is None else msgspec.structs.replace(ready, deadline_ms=left_ms)
        if shot.slow and self._slow is not None:
            await self._slow.fire(request, note)
            return
        call = Call(self._client, request)
        try:
            while not isinstance(piece := await call.next(), wire.Result):
                note.tokens(len(piece.token_ids), call.came_ns)
        finally:
            call.end()
        took(note, piece, call.came_ns)


class SlowLines:
    """Connections that are read slowly, one for each such request, with as little room on the way as can be had: what
    the server sends piles up at the server."""

    def __init__(self, endpoint: str, curve_server_key: bytes | None, slow_ms: float) -> None:
        self._endpoint = endpoint
        self._key = curve_server_key
        self._pause_s = slow_ms / 1000
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def fire(self, request: wire.Request, note: Note) -> None:
        """One request on a connection of its own. Raises HeadwayError."""
        line = self._context.socket(zmq.DEALER)
        line.set_hwm(SLOW_HWM)
        line.setsockopt(zmq.RCVBUF, SLOW_BUFFER_BYTES)
        line.setsockopt(zmq.LINGER, 0)
        if self._key is not None:
            line.curve_publickey, line.curve_secretkey = zmq.curve_keypair()
            line.curve_serverkey = self._key
        try:
            line.connect(self._endpoint)
            await line.send(wire.encode(request))
            while True:
                await anyio.sleep(self._pause_s)
                if not await line.poll(ANSWER_MS):
                    raise HeadwayError("unreachable", f"no answer within {ANSWER_MS} ms")
                answer = wire.decode_answer(await line.recv())
                if isinstance(answer, wire.Error):
                    raise wire.error_of(answer)
                if isinstance(answer, wire.Result):
                    took(note, answer)
                    return
                if isinstance(answer, wire.Delta):
                    note.tokens(len(answer.token_ids))
        finally:
            line.close()
