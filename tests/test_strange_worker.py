"""A worker that says strange things, played over a real socket: each costs at most its own requests, never the loop."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headway.scheduler import link
from headway.scheduler.spec import ModelSpec, PolicySpec
from headway.scheduler.text import TextPlane
from tests.live import Live, Raw, live

BYTES = link.Tokenizer(kind="bytes")


class Played:
    """A registered worker whose words are the test's."""

    def __init__(self, address: str, card: link.Card) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(address)
        self.say(link.Ready(link.LINK, "played", 0, "elsewhere", card))

    def say(self, message: Any) -> None:
        self.socket.send(link.encode(message))

    def hear(self) -> Any:
        """The next message that is no welcome."""
        while True:
            assert self.socket.poll(5000), "the scheduler says nothing"
            message = link.decode_to_worker(self.socket.recv())
            if type(message) is not link.Welcome:
                return message

    def close(self) -> None:
        self.context.destroy(1000)


def card(kind: str, **changes: Any) -> link.Card:
    fields: dict[str, Any] = {
        "name": "m",
        "kind": kind,
        "mode": "iteration" if kind == "generate" else "oneshot",
        "max_batch": 8,
        "max_num_seqs": 8,
        "max_input_tokens": 100,
        "tokenizer": BYTES,
    }
    return link.Card(**(fields | changes))


@contextmanager
def stage(folder: Path, played: link.Card, **keys: Any) -> Iterator[tuple[Live, Raw, Played]]:
    """A server without workers of its own, a client, and the played worker."""
    address = f"ipc://{folder}/w"
    spec = ModelSpec(name="other", engine="echo", workers=0)
    with live(spec, workers_bind=address, ready=False, policy=PolicySpec(window="greedy"), **keys) as server:
        worker = Played(address, played)
        client = server.client()
        try:
            client.wait_ready()
            yield server, client, worker
        finally:
            worker.close()


def row(batch: int, rid: int, *tokens: int, **fields: str) -> link.Step:
    return link.Step(1000, 1, 1, [link.Row(batch, rid, list(tokens), **fields)])


def test_a_code_of_its_own_becomes_an_engine_error(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed")) as (_, client, worker):
        client.send(type="embed", id="1", text="x")
        run = worker.hear()
        worker.say(link.Done(run.batch, 5, 1, [link.Outcome(run.items[0].rid, code="my_code", message="oh")]))
        ending = client.ending("1")
        assert (ending["code"], ending["message"]) == ("engine_error", "oh")


def test_an_embedding_that_is_no_floats_is_not_taken_and_the_loop_lives(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed")) as (_, client, worker):
        client.send(type="embed", id="1", text="x")
        run = worker.hear()
        worker.say(link.Done(run.batch, 5, 1, [link.Outcome(run.items[0].rid, embedding=b"abc")]))
        worker.say(link.Done(run.batch, 5, 1, [link.Outcome(run.items[0].rid, embedding=link.pack_floats([1.0]))]))
        assert client.ending("1")["embedding"] == [1.0]
        assert client.status()["counters"]["bad_link_messages"] == 1


def test_a_batch_that_forgets_a_request_ends_it_with_an_error(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed")) as (_, client, worker):
        client.send(type="embed", id="1", text="x")
        worker.say(link.Done(worker.hear().batch, 5, 1, []))
        assert client.ending("1")["code"] == "engine_error"


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 40])
def test_token_ids_out_of_range_are_not_taken(tmp_path: Path, token: int) -> None:
    with stage(tmp_path, card("generate")) as (_, client, worker):
        client.send(type="generate", id="1", prompt="x")
        run = worker.hear()
        worker.socket.send(msgspec.msgpack.encode(["step", 5, 1, 1, [[run.batch, run.items[0].rid, [token]]]]))
        worker.say(row(run.batch, run.items[0].rid, 104, 105, finish="stop"))
        assert client.ending("1")["text"] == "hi"


def test_a_tokenizer_that_cannot_be_read_refuses_the_worker_not_the_server(tmp_path: Path) -> None:
    broken = card("generate", tokenizer=link.Tokenizer(kind="json", data=b"{nonsense"))
    with stage(tmp_path, card("embed")) as (server, client, _):
        second = Played(server.runtime.crew.hub.address, broken)
        assert second.hear() == link.Stop(drain=False)
        second.close()
        assert client.ask(type="generate", id="1", prompt="x")["code"] == "unknown_model"


@pytest.mark.parametrize("length", [3, 600])
def test_a_tokenizer_that_raises_fails_one_request(tmp_path: Path, length: int) -> None:
    words = Tokenizer(WordLevel({"known": 0}, unk_token="none"))
    picky = card("generate", tokenizer=link.Tokenizer(kind="json", data=words.to_str().encode()))
    with stage(tmp_path, picky) as (_, client, worker):
        assert client.ask(type="generate", id="1", prompt="x" * length)["code"] == "internal"
        client.send(type="generate", id="2", prompt="known")
        run = worker.hear()
        worker.say(row(run.batch, run.items[0].rid, 0, finish="stop"))
        assert client.ending("2")["type"] == "result"


def test_both_texts_of_a_pair_arrive_and_count(tmp_path: Path) -> None:
    with stage(tmp_path, card("score")) as (_, client, worker):
        client.send(type="score", id="1", text="hello", text_pair="you")
        run = worker.hear()
        item = run.items[0]
        assert (bytes(link.unpack_ids(item.ids)), bytes(link.unpack_ids(item.ids_pair))) == (b"hello", b"you")
        worker.say(link.Done(run.batch, 5, 8, [link.Outcome(item.rid, scores={"score": 0.5})]))
        ending = client.ending("1")
        assert ending["scores"] == {"score": 0.5}
        assert ending["usage"]["prompt_tokens"] == 8
        assert client.ask(type="score", id="2", text="x" * 60, text_pair="y" * 60)["code"] == "too_long"


def test_a_workers_last_words_count(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed")) as (_, client, worker):
        client.send(type="embed", id="1", text="x")
        run = worker.hear()
        worker.say(link.Done(run.batch, 5, 1, [link.Outcome(run.items[0].rid, embedding=link.pack_floats([2.0]))]))
        worker.say(link.Bye("told to"))
        worker.close()
        assert client.ending("1")["embedding"] == [2.0]


def test_who_leaves_in_order_puts_no_blame_on_what_it_ran(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed")) as (server, client, worker):
        client.send(type="embed", id="1", text="x")
        for _ in range(4):
            worker.hear()
            worker.say(link.Bye("moving on"))
            worker.close()
            worker = Played(server.runtime.crew.hub.address, card("embed"))
        run = worker.hear()
        worker.say(link.Done(run.batch, 5, 1, [link.Outcome(run.items[0].rid, embedding=link.pack_floats([3.0]))]))
        assert client.ending("1")["embedding"] == [3.0]
        worker.close()


def test_a_silent_worker_is_asked_to_register_again_when_it_speaks(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed"), lost_after_ms=300, heartbeat_ms=100) as (_, client, worker):
        client.send(type="embed", id="1", text="x")
        assert type(worker.hear()) is link.Run
        while client.status()["workers"]:
            client.socket.poll(20)
        worker.say(link.Beat(1, False))
        assert type(worker.hear()) is link.Again
        worker.say(link.Ready(link.LINK, "played", 0, "elsewhere", card("embed")))
        run = worker.hear()
        worker.say(link.Done(run.batch, 5, 1, [link.Outcome(run.items[0].rid, embedding=link.pack_floats([4.0]))]))
        assert client.ending("1")["embedding"] == [4.0]


@pytest.fixture
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Long texts are tokenised only once the event is set."""
    gate, encode = threading.Event(), TextPlane.encode

    def waiting(plane: TextPlane, text: str, *, special: bool) -> list[int]:
        if len(text) > 512:
            gate.wait(30)
        return encode(plane, text, special=special)

    monkeypatch.setattr(TextPlane, "encode", waiting)
    yield gate
    gate.set()


LONG = {"type": "embed", "text": "y" * 600}


def test_the_door_is_bounded_and_keeps_deadlines(tmp_path: Path, slow_tokenizer: threading.Event) -> None:
    with stage(tmp_path, card("embed", max_input_tokens=1000)) as (server, client, worker):
        client.send(**LONG, id="late", deadline_ms=150)
        assert client.ending("late", 5000)["code"] == "deadline_exceeded"
        client.send(**LONG, id="gone")
        client.send(type="cancel", id="gone")
        assert client.ending("gone")["code"] == "cancelled"
        object.__setattr__(server.runtime.spec.policy, "queue_max", 2)
        for number in range(3):
            client.send(**LONG, id=str(number))
        assert client.ending("2")["code"] == "queue_full"
        slow_tokenizer.set()
        run = worker.hear()
        outcomes = [link.Outcome(item.rid, embedding=link.pack_floats([1.0])) for item in run.items]
        worker.say(link.Done(run.batch, 5, 1, outcomes))
        assert client.ending("0")["type"] == "result"


def test_draining_waits_for_the_door_and_tells_whoever_is_left_there(
    tmp_path: Path, slow_tokenizer: threading.Event
) -> None:
    with stage(tmp_path, card("embed", max_input_tokens=1000)) as (server, client, _):
        client.send(**LONG, id="1")
        while not server.runtime.door.waiting:
            client.status()
        server.runtime.waker._loop.call_soon_threadsafe(server.runtime.drain, 200)
        assert client.ending("1", 5000)["code"] == "shutting_down"
        slow_tokenizer.set()


def test_payloads_are_bounded_in_bytes_whatever_size_they_claim(tmp_path: Path) -> None:
    policy = PolicySpec(window="greedy", queue_mib=1)
    spec = ModelSpec(name="other", engine="echo", workers=0)
    address = f"ipc://{tmp_path}/w"
    with live(spec, workers_bind=address, ready=False, policy=policy) as server:
        worker = Played(address, card("call", tokenizer=None))
        client = server.client()
        client.wait_ready()
        for number in range(3):
            client.send(type="call", id=str(number), payload=b"x" * 700_000, tokens=0)
        refused = client.ending("1")
        assert refused["code"] == "queue_full"
        assert "queue_mib" in refused["message"]
        worker.close()


def test_no_socket_uses_libzmqs_own_heartbeats(tmp_path: Path) -> None:
    """They abort the process when a peer that filled its queue goes away (libzmq 4.3.5)."""
    with stage(tmp_path, card("embed")) as (server, _, _):
        assert server.runtime.front is not None
        for socket in (server.runtime.front.socket, server.runtime.crew.hub.socket):
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
            assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1


def test_padding_is_counted(tmp_path: Path) -> None:
    with stage(tmp_path, card("embed")) as (_, client, worker):
        client.send(type="embed", id="1", text="abcde")
        run = worker.hear()
        worker.say(link.Done(run.batch, 5, 12, [link.Outcome(run.items[0].rid, embedding=link.pack_floats([2.0]))]))
        assert client.ending("1")["type"] == "result"
        status = client.status()
        assert (status["counters"]["tokens.input"], status["counters"]["tokens.computed"]) == (5, 12)
        (batch,) = status["batches"]
        assert (batch["input_tokens"], batch["computed_tokens"]) == (5, 12)
