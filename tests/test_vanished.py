"""Clients, hosts and patience that vanish: what they left running stops, and nobody else notices.

A client may close, be killed, or drop the answer it was reading; it may give up while a model loads; a host program may
be killed with its workers inside; a text may take for ever to be tokenised. Each time the work of others goes on.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import anyio
import psutil
import pytest

from headway import Client
from headway.scheduler.spec import PolicySpec
from headway.scheduler.text import TextPlane
from tests.live import Live, Raw, echo, live

GREEDY = PolicySpec(window="greedy")
LONG = {"type": "generate", "prompt": "x" * 3000, "stream": True, "params": {"max_new_tokens": 3000}}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(echo("stream", mode="iteration", fixed_ms=5, max_num_seqs=16), policy=GREEDY) as made:
        yield made


def running(watcher: Raw) -> int:
    return int(watcher.status()["workers"][0]["running"])


def is_dropped(watcher: Raw, beside: int) -> bool:
    """Whether only `beside` requests are left on the worker, soon."""
    for _ in range(400):
        if running(watcher) == beside:
            return True
        watcher.socket.poll(5)
    return False


CLIENT = """
import sys, zmq, msgpack
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
fields = {"type": "generate", "id": "1", "prompt": "x" * 3000, "stream": True, "params": {"max_new_tokens": 3000}}
socket.send(msgpack.packb(fields))
while True:
    socket.recv()
    print("piece", flush=True)
"""


def closes(server: Live) -> None:
    client = Raw(server.address)
    client.send(id="1", **LONG)
    assert client.receive()["type"] == "delta"
    client.close()


def is_killed(server: Live) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.address], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"piece\n"
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()


def drops_the_answer(server: Live) -> None:
    async def main() -> None:
        async with Client(server.address) as client:
            async for _ in client.stream("x" * 3000, max_new_tokens=3000):
                break
            await client.ping()  # the cancel is before it on the wire

    anyio.run(main)


@pytest.mark.parametrize("goes", [closes, is_killed, drops_the_answer])
def test_what_a_vanished_client_left_running_stops_and_its_neighbour_goes_on(server: Live, goes: object) -> None:
    """Its row is gone within a few steps, not after 3000 tokens; the neighbour in the same batch is answered whole."""
    assert callable(goes)
    watcher = server.client()
    text = "".join(chr(97 + at % 26) for at in range(400))
    watcher.send(type="generate", id="neighbour", prompt=text, params={"max_new_tokens": 400})
    cancelled = watcher.status()["counters"].get("ended.cancelled", 0)
    goes(server)
    assert is_dropped(watcher, beside=1)
    assert watcher.status()["counters"]["ended.cancelled"] == cancelled + 1
    assert watcher.ask(type="generate", id="short", prompt="ab")["text"] == "ab"
    assert watcher.ending("neighbour")["text"] == text
    assert running(watcher) == 0


def test_clients_that_give_up_do_not_make_a_worker_load_again() -> None:
    """Fifty clients with little patience, again and again, while the model loads and while it is slow."""
    with live(echo(load_ms=300, fixed_ms=60), ready=False, policy=GREEDY) as server:
        (slot,) = server.runtime.crew.supervisor.slots
        watcher = server.client()
        while slot.process is None:
            watcher.socket.poll(1)
        loading = psutil.Process(slot.process.pid)
        loading.suspend()  # it loads for as long as we like
        impatient = [server.client() for _ in range(50)]
        asked = 0
        while not watcher.status()["workers"]:
            for client in impatient:
                client.send(type="call", id=str(asked), payload=1, deadline_ms=100)
            asked += 1
            if asked == 5:
                loading.resume()
            watcher.socket.poll(100)
        for again in range(3):
            for client in impatient:
                client.send(type="call", id=f"late {again}", payload=1, deadline_ms=50)
                client.send(type="cancel", id=f"late {again}")
        assert watcher.ask(type="call", id="1", payload="well")["value"] == "well"
        counters = watcher.status()["counters"]
        assert (counters["workers_joined"], counters.get("workers_lost", 0), slot.restarts) == (1, 0, 0)
        assert asked >= 5


HOST = """
import anyio, headway
async def main():
    async with headway.Scheduler(engine="echo", name="e", options={"mode": "iteration", "fixed_ms": 1}) as scheduler:
        async for _ in scheduler.stream("x" * 100000, max_new_tokens=100000):
            print("piece", flush=True)
anyio.run(main)
"""


def test_a_killed_host_takes_the_workers_inside_it_along() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"piece\n"
        workers = psutil.Process(host.pid).children(recursive=True)
        assert workers
        host.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    finally:
        host.kill()
        host.wait()
        host.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Texts over 512 characters are tokenised only once the event is set."""
    gate, encode = threading.Event(), TextPlane.encode

    def waiting(plane: TextPlane, text: str, *, special: bool) -> list[int]:
        if len(text) > 512:
            gate.wait(60)
        return encode(plane, text, special=special)

    monkeypatch.setattr(TextPlane, "encode", waiting)
    yield gate
    gate.set()


def test_texts_that_take_long_to_tokenise_hold_up_nobody(slow_tokenizer: threading.Event) -> None:
    """Ten of them are being tokenised: streams, questions and cancels go on; one of 20 MB is refused by its size."""
    with live(echo("stream", mode="iteration", fixed_ms=1, max_input_tokens=4000), policy=GREEDY) as server:
        client, reader = server.client(), server.client()
        for number in range(10):
            client.send(type="generate", id=f"big {number}", prompt="y" * 2000, params={"max_new_tokens": 2})
        while server.runtime.door.waiting < 10:
            client.status()
        text = "z" * 300
        reader.send(type="generate", id="stream", prompt=text, stream=True, params={"max_new_tokens": 300})
        assert len([1 for _ in range(300) if reader.receive()["type"] == "delta"]) == 300
        assert reader.ending("stream")["text"] == text
        client.send(type="ping", id="p")
        assert client.receive()["type"] == "pong"
        client.send(type="cancel", id="big 3")
        assert client.ending("big 3")["code"] == "cancelled"
        refused = client.ask(type="generate", id="huge", prompt="y" * (20 << 20))
        assert refused["code"] == "too_long"
        slow_tokenizer.set()
        for number in (0, 1, 2, 4, 5, 6, 7, 8, 9):
            assert client.ending(f"big {number}")["text"] == "yy"
