"""A ROUTER that plays the scheduler, for tests of a worker alone."""

from typing import Any, TypeVar

import msgspec
import zmq

from headway.scheduler import link
from headway.scheduler.link import Done, Item, Ready, Run, Welcome, pack_ids

WAIT_MS = 20_000  # a test that waits longer has failed
T = TypeVar("T")


class Scheduler:
    """A ROUTER and what came through it."""

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        self.address = address
        self.context = zmq.Context()
        self.open(secret)

    def open(self, secret: bytes | None = None) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if secret is not None:
            self.socket.curve_server, self.socket.curve_secretkey = True, secret
        self.socket.bind(self.address)

    def close(self) -> None:
        """As a scheduler that dies: the next one starts on the same address with `open`."""
        self.socket.close(0)

    def any(self) -> tuple[bytes, Any]:
        assert self.socket.poll(WAIT_MS), "nothing came in time"
        identity, body = self.socket.recv_multipart()
        return identity, link.decode_from_worker(body)

    def next(self, kind: type[T]) -> tuple[bytes, T]:
        """The next message that is no heartbeat, which must be of this kind."""
        while True:
            identity, message = self.any()
            if not identity.startswith(b"beat:"):
                assert isinstance(message, kind), message
                return identity, message

    def beat(self, worker: bytes) -> link.Beat:
        while True:
            identity, message = self.any()
            if identity == b"beat:" + worker:
                assert isinstance(message, link.Beat)
                return message

    def send(self, worker: bytes, message: link.ToWorker) -> None:
        self.socket.send_multipart([worker, link.encode(message)])

    def welcome(self) -> tuple[bytes, Ready]:
        worker, ready = self.next(Ready)
        self.send(worker, Welcome())
        return worker, ready

    def silent(self, for_ms: int) -> bool:
        """Whether only heartbeats come until there was nothing for so long."""
        while self.socket.poll(for_ms):
            if not self.any()[0].startswith(b"beat:"):
                return False
        return True


def calls(batch: int, *payloads: object) -> Run:
    return Run(batch, [Item(n, payload=msgspec.Raw(msgspec.msgpack.encode(p))) for n, p in enumerate(payloads)])


def texts(batch: int, *prompts: str) -> Run:
    return Run(batch, [Item(n, pack_ids([*prompt.encode()])) for n, prompt in enumerate(prompts)])


def values(done: Done) -> list[object]:
    return [o.message if o.code else msgspec.msgpack.decode(o.value) for o in done.outcomes]
