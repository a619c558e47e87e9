"""One request of a client from its first try to its one ending, and the stream that shows it piece by piece.

A `Call` owes its caller exactly one ending: a Result from `next`, or an exception. It owns a slot of its model's
limiter and a mailbox of the socket, and gives both back in `end`, which never awaits and may be called at any time,
twice too. A call that backs off keeps its slot: that slows a client down whose server is overloaded.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

import anyio

from headway.scheduler import clock, wire
from headway.scheduler.client_socket import Line, Mailbox
from headway.scheduler.client_types import Delta, Generation, delta_of, generation_of
from headway.scheduler.errors import HeadwayError
from headway.scheduler.retry import Retry


class Host(Protocol):
    """What a call needs of its client."""

    retries: int

    @property
    def retry(self) -> Retry: ...

    @property
    def socket(self) -> Line: ...

    async def ready(self, request: wire.Request) -> anyio.CapacityLimiter | None:
        """Wait for a connection; the limiter of the request's model, or None if it has none."""


class Call:
    """`request` has been validated. `deadline_ms` in it counts from now. `came_ns`: when the last piece came."""

    def __init__(self, host: Host, request: wire.Request) -> None:
        self.request = request
        self.attempts = 0
        self.over = False
        self.came_ns = 0
        self._host = host
        self._socket = host.socket
        self._expires_ns: int | None = None
        if request.deadline_ms is not None:
            self._expires_ns = clock.now_ns() + request.deadline_ms * clock.NS_PER_MS
        self._limiter: anyio.CapacityLimiter | None = None
        self._mailbox: Mailbox | None = None
        self._seq = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    async def result(self) -> wire.Result:
        """The request's answer. Raises HeadwayError."""
        while True:
            piece = await self.next()
            if isinstance(piece, wire.Result):
                return piece

    async def next(self) -> wire.Delta | wire.Result:
        """The next piece of the answer; a Result is the last. Raises HeadwayError. Cancelled, it ends the call."""
        timed_out = False
        try:
            with anyio.move_on_after(self._left_s()) as scope:
                piece = await self._piece()
                if isinstance(piece, wire.Result):
                    self.end()
                return piece
            timed_out = scope.cancelled_caught
            return self._just_in_time()
        except BaseException:
            self.end(timed_out)
            raise

    def end(self, timed_out: bool = False) -> None:
        """Give back what is held. A request that is still running is cancelled."""
        self.over = True
        if self._mailbox is not None:
            self._socket.finish(self._mailbox, timed_out)
            self._mailbox = None
        if self._limiter is not None:
            self._limiter.release_on_behalf_of(self)
            self._limiter = None

    # ------------------------------------------------------------ tries

    async def _piece(self) -> wire.Delta | wire.Result:
        while True:
            if self._mailbox is None:
                await self._try()
            assert self._mailbox is not None
            answer = await self._mailbox.take()
            self.came_ns = self._mailbox.came_ns
            if isinstance(answer, wire.Result):
                return answer
            if isinstance(answer, wire.Delta):
                self._note(answer)
                return answer
            await self._back_off(self._error_of(answer))

    async def _try(self) -> None:
        if self._left_s() == 0:
            raise self._deadline_error()
        limiter = await self._host.ready(self.request)
        if self._limiter is None and limiter is not None:
            await limiter.acquire_on_behalf_of(self)
            self._limiter = limiter
        self._socket.check_open()
        self.attempts += 1
        self._host.retries += self.attempts > 1
        self._mailbox = self._socket.start(self.request.id, self.request, self._expires_ns)

    async def _back_off(self, error: HeadwayError) -> None:
        """Wait before the next try, or raise `error` if there is to be none."""
        assert self._mailbox is not None
        left_ms = None if self._expires_ns is None else self._left_s() * 1000
        delay_ms = self._host.retry.delay_ms(error, self.attempts, left_ms)
        if delay_ms is None or self._seq:
            raise error
        self._socket.finish(self._mailbox)  # only then is the id free for the next try
        self._mailbox = None
        with anyio.move_on_after(delay_ms / 1000):
            await self._socket.gone.wait()

    # ------------------------------------------------------------ pieces

    def _note(self, delta: wire.Delta) -> None:
        if delta.seq != self._seq:
            raise HeadwayError("internal", f"piece {self._seq} of the answer is missing: the server sent {delta.seq}")
        self._seq += 1
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids

    def _error_of(self, answer: object) -> HeadwayError:
        if isinstance(answer, wire.Error):
            answer = wire.error_of(answer)
        if isinstance(answer, HeadwayError):
            answer.partial = answer.partial or self._partial()
            return answer
        return HeadwayError("internal", f"the server answered a request with a {type(answer).__name__}")

    def _partial(self) -> dict[str, object] | None:
        if not self._seq:
            return None
        return {"text": "".join(self._texts), "token_ids": list(self._token_ids)}

    def _left_s(self) -> float:
        if self._expires_ns is None:
            return math.inf
        return max(0.0, (self._expires_ns - clock.now_ns()) / clock.NS_PER_S)

    def _just_in_time(self) -> wire.Result:
        """The deadline came in the same turn as this answer, or without one."""
        answer = self._mailbox.take_now() if self._mailbox is not None else None
        if not isinstance(answer, wire.Result):
            raise self._deadline_error()
        assert self._mailbox is not None
        self.came_ns = self._mailbox.came_ns
        self.end()
        return answer

    def _deadline_error(self) -> HeadwayError:
        where = f"no whole answer from {self._socket.endpoint}"
        if self._mailbox is None:
            where = f"the request was not sent to {self._socket.endpoint}"
            if not self._socket.connected.is_set():
                where = f"there was no connection to {self._socket.endpoint}"
        text = f"{where} within deadline_ms ({self.request.deadline_ms})"
        return HeadwayError("deadline_exceeded", text, partial=self._partial())


class Stream:
    """The pieces of one answer: `async for delta in stream`; after the last, `stream.result` is the whole answer.

    The request is sent when the first piece is asked for. Leaving the loop early, closing the stream, or cancelling the
    task cancels the request. Errors come out of the loop as HeadwayError; what had come by then is in its `partial`.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._result: Generation | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def result(self) -> Generation:
        """The whole answer. Raises RuntimeError if the last piece was not reached."""
        if self._result is None:
            raise RuntimeError("the stream has no result: its last piece was not reached")
        return self._result

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Deltas(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it is still running. Idempotent."""
        self._call.end()

    async def _next(self) -> Delta:
        if self._call.over:
            if self._result is None:
                raise RuntimeError("this stream was left, or failed, before its end; make a new one")
            raise StopAsyncIteration
        piece = await self._call.next()
        if isinstance(piece, wire.Delta):
            return delta_of(piece)
        self._result = generation_of(piece, self._call.attempts)
        raise StopAsyncIteration

    def leave(self) -> None:
        """The loop over this stream is gone: from its end, by `break`, or by an error; in any thread."""
        if not self._call.over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.end)


class _Deltas:
    """One loop over a stream. It ends when nobody can ask it for more, which CPython tells at once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await self._stream._next()

    def __del__(self) -> None:
        self._stream.leave()
