"""A server made of pyzmq and msgpack alone, for faults that a good server does not have.

It runs in its own thread with its own event loop; a script, one function, says what becomes of each message. Tests wait
for what it has seen, never for time to pass.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import msgpack
import pytest
import zmq

from headway.scheduler.client import Stream
from headway.scheduler.client_types import Counters
from headway.scheduler.errors import HeadwayError

Message = dict[str, Any]
WAIT_S = 10  # a test that waits longer for something has failed

MODEL: Message = {
    "name": "echo",
    "kind": "generate",
    "workers": 1,
    "concurrency": 64,
    "max_batch": 8,
    "max_input_tokens": 0,
    "context_tokens": 0,
    "bypass_tokens": 1024,
    "tokenizer": True,
}


class Reply:
    """To whoever sent one message."""

    def __init__(self, server: "Scripted", peer: bytes, message: Message) -> None:
        self.server, self.peer, self.message = server, peer, message

    def send(self, kind: str, **fields: Any) -> None:
        self.raw(msgpack.packb({"type": kind, "id": self.message.get("id"), **fields}))

    def raw(self, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self.server.socket.send_multipart([self.peer, *frames], zmq.NOBLOCK)
        self.server.look_again()

    def later(self, ms: float, kind: str, **fields: Any) -> None:
        self.server.owed += 1
        self.server.loop.call_later(ms / 1000, self._pay, kind, fields)

    def _pay(self, kind: str, fields: Message) -> None:
        self.send(kind, **fields)
        with self.server.changed:
            self.server.owed -= 1
            self.server.changed.notify_all()

    def text(self, text: str, later_ms: float | None = None, **fields: Any) -> None:
        """A result whose token ids are the text's bytes."""
        fields = {"text": text, "token_ids": list(text.encode()), "finish_reason": "stop", **fields}
        self.send("result", **fields) if later_ms is None else self.later(later_ms, "result", **fields)

    def error(self, code: str, *, retryable: bool = False, **fields: Any) -> None:
        self.send("error", code=code, message=f"said {code}", retryable=retryable, http=500, **fields)


Script = Callable[[Reply, Message], None]


def echo(reply: Reply, message: Message) -> None:
    """Answer a prompt with itself."""
    if message["type"] == "generate":
        reply.text(message["prompt"])


def silent(_reply: Reply, _message: Message) -> None:
    """Never answer."""


def letters(reply: Reply, message: Message) -> None:
    """Stream a prompt's characters; without the last ones if it says so."""
    if message["type"] != "generate":
        return
    text = message["prompt"]
    for seq, letter in enumerate(text.rstrip(".")):
        reply.send("delta", seq=seq, token_ids=list(letter.encode()), text=letter)
    if not text.endswith("."):
        reply.text(text)


def failing_first(times: int, code: str = "queue_full", **fields: Any) -> Script:
    """Fail so often with a retryable error, then answer."""
    left = iter(range(times))

    def script(reply: Reply, message: Message) -> None:
        if message["type"] == "generate":
            reply.text("ok") if next(left, None) is None else reply.error(code, retryable=True, **fields)

    return script


class Scripted:
    """`seen`: every message received, in order. `models`: what `info` says; None: `info` is not answered."""

    def __init__(self, script: Script = echo, models: list[Message] | None = None, **options: Any) -> None:
        self.script = script
        self.models: list[Message] | None = [MODEL] if models is None else models
        self.options = options
        self.endpoint = options.pop("endpoint", "tcp://127.0.0.1:*")
        self.reading = options.pop("reading", True)
        self.seen: list[Message] = []
        self.owed = 0
        self.changed = threading.Condition()
        self.loop: asyncio.AbstractEventLoop
        self.socket: zmq.Socket[bytes]

    def __enter__(self) -> "Scripted":
        self.started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        assert self.started.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the socket, as a killed server would. Idempotent."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.ended.set)
            self.thread.join(WAIT_S)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        with zmq.Context() as context:
            self.socket = context.socket(zmq.ROUTER)
            self.socket.linger = self.options.pop("linger", 0)
            self.socket.sndhwm = 0
            for name, value in self.options.items():
                setattr(self.socket, name, value)
            self.socket.bind(self.endpoint)
            self.endpoint = self.socket.last_endpoint.decode()
            self.loop.add_reader(self.socket.fileno(), self._read)
            self.started.set()
            await self.ended.wait()
            self.loop.remove_reader(self.socket.fileno())
            self.socket.close()

    def resume(self) -> None:
        """Begin to read."""
        self.reading = True
        self.loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        while self.reading:
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(peer, frames)
        self.look_again()

    def look_again(self) -> None:
        """A send takes the edge of a waiting message away."""
        if self.reading and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.loop.call_soon(self._read)

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        message = msgpack.unpackb(frames[0], strict_map_key=False)
        reply = Reply(self, peer, message)
        if message["type"] == "info" and self.models is not None:
            reply.send("info", protocol=1, server="scripted", models=self.models, limits={}, state="serving")
        elif message["type"] == "ping":
            reply.send("pong")
        else:
            self.script(reply, message)
        with self.changed:
            self.seen.append(message)
            self.changed.notify_all()

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.seen if message["type"] == kind]

    def wait(self, what: Callable[[], bool]) -> None:
        """Block this thread until `what` holds."""
        with self.changed:
            assert self.changed.wait_for(what, WAIT_S), "the server has not seen it"

    async def until(self, what: Callable[[], bool]) -> None:
        """Until `what` holds, which is looked at whenever the server has taken or paid something."""
        await anyio.to_thread.run_sync(self.wait, what)

    async def until_cancelled(self, id_: str) -> None:
        await self.until(lambda: any(message["id"] == id_ for message in self.of("cancel")))


def held() -> tuple[int, int]:
    """This process's threads and open files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def given_back(before: tuple[int, int]) -> bool:
    """Whether no more is held than before. Asked a few times: a thread that was joined is listed a moment longer."""
    return any(now[0] <= before[0] and now[1] <= before[1] for now in (held() for _ in range(5_000)))


async def failing(work: Awaitable[object]) -> HeadwayError:
    """How the work fails."""
    with pytest.raises(HeadwayError) as caught:
        await work
    return caught.value


async def leave_at_end(stream: Stream) -> None:
    async for _ in stream:
        pass


def balanced(books: Counters) -> bool:
    """Whether each request that was sent has one ending, or none yet."""
    return books.sent == books.answered + books.timed_out + books.cancelled + books.lost + books.live
