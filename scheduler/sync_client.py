"""SyncClient: the client library for ordinary code, from any thread, several at once.

One background thread runs an event loop with a `Client` in it; every method hands its work over and waits. An exception
in the waiting thread (Ctrl-C) cancels the request. After `close` the thread and all files are gone.
"""

import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from headway.scheduler import wire
from headway.scheduler.client import Client
from headway.scheduler.client_call import Stream
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
from headway.scheduler.retry import RETRIES_MAX

T = TypeVar("T")


class SyncClient:
    """Like `Client`, with the same arguments and methods, but each method blocks: `with SyncClient(...) as client:`."""

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
        self._client = Client(
            endpoint,
            tenant=tenant,
            timeout_ms=timeout_ms,
            max_retries=max_retries,
            curve_server_key=curve_server_key,
            concurrency=concurrency,
            rng=rng,
        )
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio"))
            stack.enter_context(portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        self._portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is running with `cancelled`, and give back the thread and all files. Idempotent."""
        self._portal = None
        self._stack.close()

    def __repr__(self) -> str:
        return f"<Sync{repr(self._client)[1:]}"

    # ------------------------------------------------------------ requests

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue a text: exactly one of `prompt`, `messages` (maps of role and content) and `input_ids`."""
        return self._wait(partial(self._client.generate, prompt, messages=messages, input_ids=input_ids, **options))

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "SyncStream":
        """Like `generate`, piece by piece: `for delta in client.stream(...)`. The deadline counts from now."""
        make = partial(self._client.stream, prompt, messages=messages, input_ids=input_ids, **options)
        return SyncStream(self, self._open_portal.call(make))

    def embed(
        self,
        text: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        truncate: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[Options],
    ) -> Embedding:
        """The vector of a text, or of token ids."""
        given: dict[str, Any] = {"input_ids": input_ids, "truncate": truncate, "prompt_name": prompt_name}
        return self._wait(partial(self._client.embed, text, **given, **options))

    def classify(
        self,
        text: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        truncate: bool | None = None,
        **options: Unpack[Options],
    ) -> Classification:
        """A score for each class of a text, or of token ids."""
        return self._wait(partial(self._client.classify, text, input_ids=input_ids, truncate=truncate, **options))

    def score(
        self, text: str, text_pair: str, *, truncate: bool | None = None, **options: Unpack[Options]
    ) -> Relevance:
        """How well `text_pair` answers `text`, as a reranker sees it."""
        return self._wait(partial(self._client.score, text, text_pair, truncate=truncate, **options))

    def call(self, payload: object, *, tokens: int | None = None, **options: Unpack[Options]) -> Any:
        """What a user's own engine makes of `payload`. `tokens`: its size in the caller's own measure."""
        return self._wait(partial(self._client.call, payload, tokens=tokens, **options))

    def info(self) -> wire.InfoReply:
        """What is served there, and the limits. Raises HeadwayError `unreachable` after `timeout_ms`."""
        return self._wait(self._client.info)

    def status(self, batches: int = 0) -> wire.StatusReply:
        """How it is going: queues, workers, counters and the last `batches` batches (up to 256)."""
        return self._wait(partial(self._client.status, batches))

    def ping(self) -> float:
        """Round trip to the server's loop and back, in milliseconds."""
        return self._wait(self._client.ping)

    @property
    def counters(self) -> Counters:
        """The books so far."""
        return self._client.counters

    @property
    def late(self) -> int:
        """Messages that were dropped because nobody waits for their id any longer."""
        return self._client.late

    # ------------------------------------------------------------ inside

    @property
    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            raise RuntimeError("the client is not open; use it inside `with SyncClient(...) as client:`")
        return self._portal

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future: Future[T] = self._open_portal.start_task_soon(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of no effect if it was the work that failed
            raise


class SyncStream:
    """The pieces of one answer: `for delta in stream`; after the last, `stream.result` is the whole answer.

    Leaving the loop early or closing the stream cancels the request. Errors come out of the loop as HeadwayError.
    """

    def __init__(self, client: SyncClient, stream: Stream) -> None:
        self._client = client
        self._stream = stream

    def __iter__(self) -> Iterator[Delta]:
        deltas = aiter(self._stream)
        while True:
            try:
                delta = self._client._wait(partial(anext, deltas))
            except StopAsyncIteration:
                return
            yield delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def result(self) -> Generation:
        """The whole answer. Raises RuntimeError if the last piece was not reached."""
        return self._stream.result

    def close(self) -> None:
        """Cancel the request if it is still running. Idempotent."""
        self._stream.leave()
