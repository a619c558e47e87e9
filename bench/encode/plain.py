"""The floors: the same work behind one socket, without a scheduler. `single` runs one text at a time, `batch` up to 32
that wait, in the order of arrival, padded together: what one writes first.

    MODEL=folder python -m headway.bench.encode.plain batch tcp://127.0.0.1:5999

Speaks as much of protocol 1 as `embed` needs, so that the same client asks all. No second process and no checks: the
transport costs less than headway's.
"""

import signal
import sys

import msgspec
import zmq

from headway.bench.encode.peers.work import MAX_BATCH, MiniLM
from headway.bench.raw_broker import drain


def main() -> None:
    """Serve until told to end."""
    way, address = sys.argv[1:]
    most = {"single": 1, "batch": MAX_BATCH}[way]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    work = MiniLM()
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    waiting: list[list[bytes]] = []
    while True:
        if not waiting:
            socket.poll()
        waiting += drain(socket)
        batch, waiting = waiting[:most], waiting[most:]
        messages = [msgspec.msgpack.decode(body) for _, body in batch]
        vectors = work([message["text"] for message in messages])
        for (client, _), message, vector in zip(batch, messages, vectors, strict=True):
            answer = {"type": "result", "id": message["id"], "embedding": vector}
            socket.send_multipart([client, msgspec.msgpack.encode(answer)])


if __name__ == "__main__":
    main()
