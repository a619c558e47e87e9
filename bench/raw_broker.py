"""The floor: the least that a two-hop msgpack broker costs in Python; what `bench.overhead` compares with.

    python -m headway.bench.raw_broker single tcp://127.0.0.1:5999

`single` is the classical ROUTER/DEALER broker: client DEALER -> ROUTER, broker, DEALER -> worker DEALER, and back, each
message on its own. `batched` is a harder floor: a greedy batch of up to 32 requests in one message each way between
broker and worker, so the second hop costs almost nothing. Both decode and encode msgpack once in the broker and once in
the worker, and do nothing else: no checks, no limits, no deadlines, no errors, no cancellation, no statistics.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

MAX_BATCH = 32
DRAIN_MAX = 256
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode

Socket = zmq.Socket[bytes]


def drain(socket: Socket) -> list[list[bytes]]:
    """Every message that is here, up to DRAIN_MAX, without blocking."""
    found: list[list[bytes]] = []
    try:
        while len(found) < DRAIN_MAX:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return found


def sockets(front_address: str, back_kind: int, worker: Callable[[str], None]) -> tuple[Socket, Socket, zmq.Poller]:
    """The broker's two sockets, and a worker process that ends with this one."""
    back_address = f"ipc://@headway-raw-broker-{os.getpid()}"
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(back_kind)
    front.set_hwm(0)
    back.set_hwm(0)
    front.bind(front_address)
    back.bind(back_address)
    multiprocessing.get_context("fork").Process(target=worker, args=(back_address,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    return front, back, poller


def connected(address: str) -> Socket:
    """The worker's socket."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def answer(request: Any, payload: object) -> bytes:
    """What the client gets."""
    return encode({"type": "result", "id": request["id"], "value": payload})


# ---------------------------------------------------------------- message by message


def single_worker(address: str) -> None:
    """Answer each request with its payload."""
    socket = connected(address)
    while True:
        identity, body = socket.recv_multipart()
        request = decode(body)
        socket.send_multipart([identity, answer(request, request["payload"])])


def single(address: str) -> None:
    """Pass each message on as it comes, both ways."""
    front, back, poller = sockets(address, zmq.DEALER, single_worker)
    while True:
        ready = dict(poller.poll())
        if back in ready:
            for identity, body in drain(back):
                front.send_multipart([identity, encode(decode(body))])
        if front in ready:
            for identity, body in drain(front):
                back.send_multipart([identity, encode(decode(body))])


# ---------------------------------------------------------------- in batches


def batch_worker(address: str) -> None:
    """Answer each batch with itself."""
    socket = connected(address)
    socket.send(b"")
    while True:
        socket.send(encode([[key, payload] for key, payload in decode(socket.recv())]))


def batched(address: str) -> None:
    """Collect what comes while the worker is busy, and pass it on as one batch."""
    front, back, poller = sockets(address, zmq.ROUTER, batch_worker)
    worker_name = back.recv_multipart()[0]
    waiting: list[list[Any]] = []
    owners: dict[int, tuple[bytes, Any]] = {}
    key, busy = 0, False
    while True:
        ready = dict(poller.poll())
        if back in ready:
            for number, payload in decode(back.recv_multipart()[1]):
                identity, request = owners.pop(number)
                front.send_multipart([identity, answer(request, payload)])
            busy = False
        if front in ready:
            for identity, body in drain(front):
                request = decode(body)
                key += 1
                owners[key] = (identity, request)
                waiting.append([key, request["payload"]])
        if waiting and not busy:
            back.send_multipart([worker_name, encode(waiting[:MAX_BATCH])])
            del waiting[:MAX_BATCH]
            busy = True


BROKERS = {"single": single, "batched": batched}

if __name__ == "__main__":
    BROKERS[sys.argv[1]](sys.argv[2])
