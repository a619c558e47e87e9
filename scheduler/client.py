"""The client library: `async with Client("tcp://127.0.0.1:5555") as client: await client.generate(prompt="Once")`.

Every method ends in exactly one way: a value, a HeadwayError, or the caller's own cancellation, which cancels the work
on the server too. The client keeps to the concurrency that the server advertises, so that waiting happens here, where
it costs nothing, and counts against the caller's deadline. It tries again only where an error says that this may help.
No global state, no signal handlers, no logging: a library inside somebody else's program.
"""

import os
import random
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

import anyio
import msgspec

from headway.scheduler import client_types, clock, wire
from headway.scheduler.client_call import Call, Stream
from headway.scheduler.client_socket import Line, Socket
from headway.scheduler.client_types import (
    Classification,
    Counters,
    Delta,
    Embedding,
    GenerateOptions,
    Generation,
    Options,
    Relevance,
)
from headway.scheduler.errors import HeadwayError
from headway.scheduler.retry import RETRIES_MAX, Retry
from headway.scheduler.values import plain

__all__ = ["Classification", "Client", "Counters", "Delta", "Embedding", "Generation", "Relevance", "Stream"]

TIMEOUT_MS = 5_000  # for a connection, and for answers that need no model
INFO_AGE_NS_MAX = 30 * clock.NS_PER_S  # workers come and go, and the advertised concurrency with them
LOADING_AGE_NS_MAX = clock.NS_PER_S  # while a model is not listed, because it loads

_OPTIONS: Final = frozenset(Options.__annotations__)
_Reply = TypeVar("_Reply", wire.InfoReply, wire.StatusReply, wire.Pong)


class Client:
    """A connection to one headway server, for one event loop (asyncio); use SyncClient from ordinary code.

    `endpoint`: tcp://host:port or ipc://path. `tenant`: for every request that names none. `timeout_ms`: limit for a
    connection and for `info`, `status` and `ping` (default 5000). `max_retries`: tries after the first for a call
    without a deadline; with one, tries go on until it comes; 0: never try again. `curve_server_key`: the server's
    public key, Z85, if it speaks CURVE. `concurrency`: most requests in flight for each model, in place of what the
    server advertises. `rng`: where the jitter of retries comes from.

    All requests take `model` (None: the one there that serves this kind), `deadline_ms` (time the caller has,
    waiting in this client included), `priority` (lower is sooner) and `tenant`, and raise HeadwayError (see
    `errors.CODES`), or TypeError naming the path of a value that cannot be sent. Closing the client ends what is
    running with `cancelled`.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5555",
        *,
        tenant: str | None = None,
        timeout_ms: int | None = None,
        max_retries: int = RETRIES_MAX,
        curve_server_key: str | bytes | None = None,
        concurrency: int | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise ValueError(f"endpoint is {endpoint!r}; it must be tcp://host:port or ipc://path")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be 1 or more")
        self.endpoint = endpoint
        self.retry = Retry(max_retries, rng or random.Random())
        self.retries = 0
        self._tenant = tenant
        self._timeout_ms = TIMEOUT_MS if timeout_ms is None else timeout_ms
        self._key = curve_server_key.encode() if isinstance(curve_server_key, str) else curve_server_key
        self._concurrency = concurrency
        self._socket: Line | None = None
        self._prefix = os.urandom(6).hex()
        self._count = 0
        self._limiters: dict[tuple[str, str], anyio.CapacityLimiter] = {}
        self._asked_ns = 0
        self._asking = anyio.Lock()

    async def __aenter__(self) -> Self:
        if self._socket is not None:
            raise RuntimeError("this client was opened before; make a new one")
        self._socket = Socket(self.endpoint, self._key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is running with `cancelled`, and give back sockets and threads. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def __repr__(self) -> str:
        state = "new" if self._socket is None else repr(self.counters).removeprefix("Counters")
        return f"<Client {self.endpoint} {state}>"

    # ------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue a text: exactly one of `prompt`, `messages` (maps of role and content) and `input_ids`."""
        fields = {"prompt": prompt, "messages": messages, "input_ids": input_ids}
        call = self._call("generate", fields, options)
        return client_types.generation_of(await call.result(), call.attempts)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Like `generate`, piece by piece: `async for delta in client.stream(...)`. The deadline counts from now."""
        fields = {"prompt": prompt, "messages": messages, "input_ids": input_ids, "stream": True}
        return Stream(self._call("generate", fields, options))

    async def embed(
        self,
        text: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        truncate: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[Options],
    ) -> Embedding:
        """The vector of a text, or of token ids.

        `truncate`: cut a text that is too long, and say so in `usage.truncated` (True), or refuse it (False); None: as
        the server's operator chose. `prompt_name`: which of the model's prompts goes before the text; "": none.
        """
        fields = {"text": text, "input_ids": input_ids, "truncate": truncate, "prompt_name": prompt_name}
        call = self._call("embed", fields, options)
        return client_types.embedding_of(await call.result(), call.attempts)

    async def classify(
        self,
        text: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        truncate: bool | None = None,
        **options: Unpack[Options],
    ) -> Classification:
        """A score for each class of a text, or of token ids. `truncate`: as for `embed`."""
        call = self._call("classify", {"text": text, "input_ids": input_ids, "truncate": truncate}, options)
        return client_types.classification_of(await call.result(), call.attempts)

    async def score(
        self, text: str, text_pair: str, *, truncate: bool | None = None, **options: Unpack[Options]
    ) -> Relevance:
        """How well `text_pair` answers `text`, as a reranker sees it. `truncate`: as for `embed`."""
        call = self._call("score", {"text": text, "text_pair": text_pair, "truncate": truncate}, options)
        return client_types.relevance_of(await call.result(), call.attempts)

    async def call(self, payload: object, *, tokens: int | None = None, **options: Unpack[Options]) -> Any:
        """What a user's own engine makes of `payload`. `tokens`: its size in the caller's own measure."""
        raw = msgspec.Raw(msgspec.msgpack.encode(plain(payload)))
        call = self._call("call", {"tokens": tokens}, options, {"payload": raw})
        return (await call.result()).value

    # ------------------------------------------------------------ questions

    async def info(self) -> wire.InfoReply:
        """What is served there, and the limits. Raises HeadwayError `unreachable` after `timeout_ms`."""
        return await self._ask(wire.Info(id=self._id()), wire.InfoReply)

    async def status(self, batches: int = 0) -> wire.StatusReply:
        """How it is going: queues, workers, counters and the last `batches` batches (up to 256)."""
        return await self._ask(wire.Status(id=self._id(), batches=batches), wire.StatusReply)

    async def ping(self) -> float:
        """Round trip to the server's loop and back, in milliseconds."""
        sent_ns = clock.now_ns()
        await self._ask(wire.Ping(id=self._id()), wire.Pong)
        return (clock.now_ns() - sent_ns) / clock.NS_PER_MS

    @property
    def counters(self) -> Counters:
        """The books so far."""
        books = self._socket.counters if self._socket else Counters()
        return msgspec.structs.replace(books, retries=self.retries)

    @property
    def late(self) -> int:
        """Messages that were dropped because nobody waits for their id any longer."""
        return self.counters.late

    # ------------------------------------------------------------ inside

    @property
    def socket(self) -> Line:
        if self._socket is None:
            raise RuntimeError("the client is not open; use it inside `async with Client(...) as client:`")
        self._socket.check_open()
        return self._socket

    def _id(self) -> str:
        """Never used before by this client, and by no other."""
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def _call(
        self, kind: str, fields: dict[str, Any], options: Mapping[str, Any], ready: dict[str, Any] | None = None
    ) -> Call:
        """A validated request: what the server would refuse unread is refused here, by the same rules."""
        given = {"tenant": self._tenant, **fields}
        params: dict[str, Any] = {}
        for name, value in options.items():
            if value is not None:
                (given if name in _OPTIONS or kind != "generate" else params)[name] = value
        if isinstance(params.get("stop"), str):  # one stop string may be given as it is
            params["stop"] = [params["stop"]]
        if params:
            given["params"] = params
        sent = {name: plain(value, name) for name, value in given.items() if value is not None}
        body = msgspec.msgpack.encode({"type": kind, "id": self._id(), **sent, **(ready or {})})
        request = wire.decode(body)
        assert isinstance(request, wire.Request)
        return Call(self, request)

    async def ready(self, request: wire.Request) -> anyio.CapacityLimiter | None:
        """Wait for a connection; the limiter of the request's model, or None if the server does not have the model."""
        socket = self.socket
        if not socket.connected.is_set():
            await socket.until_connected(self._timeout_ms)
        kind = str(request.__struct_config__.tag)
        if self._concurrency is not None:
            return self._limiter(request.model or "", kind, self._concurrency)
        if socket.info is None:
            await self._first_info()
        models = socket.info.models if socket.info else []
        fitting = (model for model in models if model.kind == kind and request.model in (None, model.name))
        model = next(fitting, None)
        self._keep_fresh(LOADING_AGE_NS_MAX if model is None else INFO_AGE_NS_MAX)
        return self._limiter(model.name, kind, max(1, model.concurrency)) if model else None

    def _limiter(self, model: str, kind: str, concurrency: int) -> anyio.CapacityLimiter:
        limiter = self._limiters.get((model, kind))
        if limiter is None:
            limiter = self._limiters[model, kind] = anyio.CapacityLimiter(concurrency)
        elif limiter.total_tokens != concurrency:
            limiter.total_tokens = concurrency
        return limiter

    async def _first_info(self) -> None:
        """What the server serves, before the first request; callers who come meanwhile wait for the same answer."""
        async with self._asking:
            if self.socket.info is None:
                await self.info()

    def _keep_fresh(self, age_ns_max: int) -> None:
        """Ask again if it is time; the answer is used when it comes."""
        now_ns = clock.now_ns()
        if now_ns - max(self.socket.info_ns, self._asked_ns) > age_ns_max:
            self._asked_ns = now_ns
            self.socket.ask_info()

    async def _ask(self, message: wire.Ping | wire.Info | wire.Status, kind: type[_Reply]) -> _Reply:
        socket = self.socket
        id_ = message.id
        assert id_ is not None
        wire.decode(wire.encode(message))
        await socket.until_connected(self._timeout_ms)
        with anyio.move_on_after(self._timeout_ms / 1000):
            mailbox = socket.start(id_, message)
            try:
                answer = await mailbox.take()
            finally:
                socket.finish(mailbox)
            if isinstance(answer, kind):
                return answer
            if isinstance(answer, wire.Error):
                raise wire.error_of(answer)
            if isinstance(answer, HeadwayError):
                raise answer
            raise HeadwayError("internal", f"the server answered with a {type(answer).__name__}")
        name = message.__struct_config__.tag
        raise socket.unreachable(f"connected, but `{name}` was not answered within {self._timeout_ms} ms")
