"""A server that takes as long as it is told, and writes down when: what a replayer measures is held against it.

    python -m headway.bench.exact_server ipc:///tmp/s

One thread, one socket, nothing between: a `call` asks for milliseconds, and is answered that long after it was read
from the socket, one after the other. Waiting sleeps until SPIN_NS before the time and then looks at the clock, so that
no timer's slack is in it. When standard input ends, the stamps go to standard output as JSON: id -> [read, answered],
nanoseconds of the machine's steady clock.
"""

import sys
import threading
import time

import msgspec
import zmq

from headway.scheduler import clock, wire

SPIN_NS = 2 * clock.NS_PER_MS
POLL_MS = 50  # how soon the end of standard input is noticed
MODEL = wire.ModelInfo(
    name="exact",
    kind="call",
    workers=1,
    concurrency=1 << 16,
    max_batch=1,
    max_input_tokens=1 << 20,
    context_tokens=0,
    bypass_tokens=0,
    tokenizer=False,
)

Stamps = dict[str, tuple[int, int]]


def serve(address: str, stop: threading.Event) -> Stamps:
    """Until told to stop; returns the stamps."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    stamps: Stamps = {}
    try:
        while not stop.is_set():
            if socket.poll(POLL_MS):
                client, body = socket.recv_multipart()
                _answer(socket, client, wire.decode(body), clock.now_ns(), stamps)
    finally:
        context.destroy(0)
    return stamps


def _answer(socket: "zmq.Socket[bytes]", client: bytes, asked: wire.ClientMessage, read_ns: int, to: Stamps) -> None:
    if isinstance(asked, wire.Call):
        until_ns = read_ns + int(msgspec.msgpack.decode(asked.payload) * clock.NS_PER_MS)
        _wait(until_ns)
        to[asked.id] = (read_ns, until_ns)
        total_ms = (until_ns - read_ns) / clock.NS_PER_MS
        result = wire.Result(id=asked.id, value=None, timing=wire.Timing(queue_ms=0.0, total_ms=total_ms))
        socket.send_multipart([client, wire.encode(result)])
    elif isinstance(asked, wire.Info):
        found = wire.InfoReply(
            id=asked.id, protocol=wire.PROTOCOL, server="exact", models=[MODEL], limits=wire.LIMITS, state="serving"
        )
        socket.send_multipart([client, wire.encode(found)])
    elif isinstance(asked, wire.Status):
        status = wire.StatusReply(
            id=asked.id, state="serving", uptime_s=0.0, counters={}, lanes=[], workers=[], batches=[]
        )
        socket.send_multipart([client, wire.encode(status)])


def _wait(until_ns: int) -> None:
    left_ns = until_ns - clock.now_ns()
    if left_ns > SPIN_NS:
        time.sleep((left_ns - SPIN_NS) / clock.NS_PER_S)
    while clock.now_ns() < until_ns:
        pass


def _until_stdin_ends(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def main() -> None:
    stop = threading.Event()
    threading.Thread(target=_until_stdin_ends, args=(stop,), daemon=True).start()
    sys.stdout.buffer.write(msgspec.json.encode(serve(sys.argv[1], stop)))


if __name__ == "__main__":
    main()
