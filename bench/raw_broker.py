"""The floor: the least that a two-hop ROUTER/DEALER msgpack broker costs in Python; what `overhead` compares with.

Client DEALER -> ROUTER front -> greedy batches of up to 32 -> DEALER worker, and back; one msgpack message per batch
between broker and worker. No checks, no limits, no deadlines, no errors: a broker that does nothing but pass on.

    python -m headway.bench.raw_broker tcp://127.0.0.1:5999
"""

import multiprocessing
import os
import signal
import sys
from typing import Any

import msgspec
import zmq

MAX_BATCH = 32
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def worker(address: str) -> None:
    """Answer each batch with itself."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"")
    while True:
        batch = decode(socket.recv())
        socket.send(encode([[key, payload] for key, payload in batch]))


def _drain(socket: "zmq.Socket[bytes]", most: int) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    try:
        while len(found) < most:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return found


def broker(address: str) -> None:
    """Pass requests to one worker and answers back, until SIGTERM; the worker ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    back_address = f"ipc://@headway-raw-broker-{os.getpid()}"
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    front.set_hwm(0)
    back.set_hwm(0)
    front.bind(address)
    back.bind(back_address)
    multiprocessing.get_context("fork").Process(target=worker, args=(back_address,), daemon=True).start()
    worker_name = back.recv_multipart()[0]
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    waiting: list[list[Any]] = []
    owners: dict[int, tuple[bytes, str]] = {}
    key, busy = 0, False
    while True:
        ready = dict(poller.poll())
        if back in ready:
            for number, payload in decode(back.recv_multipart()[1]):
                identity, request_id = owners.pop(number)
                front.send_multipart([identity, encode({"type": "result", "id": request_id, "value": payload})])
            busy = False
        if front in ready:
            for identity, body in _drain(front, 256):
                request = decode(body)
                key += 1
                owners[key] = (identity, request["id"])
                waiting.append([key, request["payload"]])
        if waiting and not busy:
            back.send_multipart([worker_name, encode(waiting[:MAX_BATCH])])
            del waiting[:MAX_BATCH]
            busy = True


if __name__ == "__main__":
    broker(sys.argv[1])
