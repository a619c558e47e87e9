"""A real scheduler in a thread of this process, with real worker processes, and a raw client that speaks only pyzmq and
msgpack: the independent second implementation of the protocol."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import msgpack
import zmq

from headway.scheduler.runtime import Runtime
from headway.scheduler.spec import ModelSpec, PolicySpec, ServerSpec

ANSWER_MS = 20_000
SPEC_KEYS = ("workers", "max_batch", "max_num_seqs", "max_input_tokens")


class Raw:
    """A DEALER and msgpack, nothing else."""

    def __init__(self, address: str, identity: bytes | None = None, *, hwm: int | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if hwm is not None:
            self.socket.set_hwm(hwm)
        self.socket.connect(address)
        self._kept: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        self.socket.send(msgpack.packb(message))

    def send_frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_ms: int = ANSWER_MS) -> dict[str, Any]:
        """The next message; AssertionError if none comes in time."""
        if self._kept:
            return self._kept.pop(0)
        assert self.socket.poll(timeout_ms), f"no answer within {timeout_ms} ms"
        message: dict[str, Any] = msgpack.unpackb(self.socket.recv(), strict_map_key=False)
        return message

    def silent(self, for_ms: int) -> bool:
        """Whether nothing comes for a while."""
        return not self._kept and not self.socket.poll(for_ms)

    def ending(self, request_id: str, timeout_ms: int = ANSWER_MS) -> dict[str, Any]:
        """The result or error of this request; other messages keep their order for later."""
        kept: list[dict[str, Any]] = []
        while True:
            message = self.receive(timeout_ms)
            if message.get("id") == request_id and message["type"] in ("result", "error"):
                self._kept = kept + self._kept
                return message
            kept.append(message)

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a request and return its ending."""
        self.send(**message)
        return self.ending(message["id"])

    def status(self) -> dict[str, Any]:
        self.send(type="status", id="?", batches=256)
        kept: list[dict[str, Any]] = []
        while (message := self.receive())["type"] != "status":
            kept.append(message)
        self._kept = kept + self._kept
        return message

    def wait_ready(self, workers: int = 1) -> None:
        """Until that many workers serve."""
        for _ in range(2000):
            if len(self.status()["workers"]) >= workers:
                return
            self.socket.poll(20)
        raise AssertionError("no worker came")

    def close(self) -> None:
        self.context.destroy(0)


class Live:
    """A running server."""

    def __init__(self, runtime: Runtime) -> None:
        assert runtime.front is not None
        self.runtime = runtime
        self.address = runtime.front.address
        self.clients: list[Raw] = []

    def client(self, identity: bytes | None = None, *, hwm: int | None = None) -> Raw:
        client = Raw(self.address, identity, hwm=hwm)
        self.clients.append(client)
        return client


def echo(name: str = "echo", **options: Any) -> ModelSpec:
    """An echo model; SPEC_KEYS are the spec's own."""
    keys = {key: options.pop(key) for key in SPEC_KEYS if key in options}
    return ModelSpec(name=name, engine="echo", options=options, **keys)


@contextmanager
def live(*models: ModelSpec, policy: PolicySpec | None = None, ready: bool = True, **keys: Any) -> Iterator[Live]:
    """A server in a thread, ended with the block."""
    spec = ServerSpec(
        bind=keys.pop("bind", "tcp://127.0.0.1:*"),
        models=models or (echo(),),
        policy=policy or PolicySpec(),
        log_level="warning",
        **keys,
    )
    started = threading.Event()
    box: list[Any] = []

    async def main() -> None:
        runtime = Runtime(spec, front=True)
        try:
            box.append(runtime)
            started.set()
            await runtime.run()
        finally:
            await runtime.close()

    def body() -> None:
        try:
            anyio.run(main)
        except BaseException as error:
            box.insert(0, error)
            started.set()

    thread = threading.Thread(target=body)
    thread.start()
    started.wait(30)
    if isinstance(box[0], BaseException):
        thread.join()
        raise box[0]
    server = Live(box[0])
    try:
        if ready:
            server.client().wait_ready(sum(model.workers for model in spec.models))
        yield server
    finally:
        for client in server.clients:
            client.close()
        box[0].waker._loop.call_soon_threadsafe(box[0].stop)
        thread.join(30)
        assert not thread.is_alive(), "the scheduler did not stop"
