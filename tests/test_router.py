"""The router over real sockets with real worker processes, spoken to with nothing but pyzmq and msgpack."""

import os
import signal
from collections.abc import Iterator

import msgpack
import pytest

from headway.scheduler.spec import PolicySpec
from tests.live import Live, echo, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """One call engine and one streaming engine, shared by the tests that leave no trace."""
    with live(
        echo(), echo("stream", mode="iteration", per_token_ms=0.2), policy=PolicySpec(window="greedy")
    ) as running:
        yield running


GOOD = {"type": "call", "id": "good", "payload": 1}


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"a", b"b"),
        (b"a", b"b", b"c"),
        tuple(b"x" for _ in range(5)),
        tuple(b"x" for _ in range(1000)),
        (os.urandom(64),),
        (msgpack.packb([1, 2]),),
        (msgpack.packb(7),),
        (msgpack.packb(None),),
        (msgpack.packb({"type": "call", "id": "x", "payload": 1, "more": 2}),),
        (msgpack.packb({"type": "call"}),),
        (msgpack.packb({"v": 9, "type": "call", "id": "x", "payload": 1}),),
        (b"\x91" * 100_000,),
    ],
    ids=lambda frames: f"{len(frames)}x{len(frames[0])}",
)
def test_a_bad_message_is_answered_and_the_next_good_one_works(server: Live, frames: tuple[bytes, ...]) -> None:
    client = server.client()
    client.send_frames(*frames)
    answer = client.receive()
    assert answer["type"] == "error"
    assert answer["code"] in ("invalid_request", "unsupported_version")
    assert client.ask(**GOOD)["value"] == 1


def test_a_req_socket_sees_why_it_is_refused(server: Live) -> None:
    client = server.client()
    client.send_frames(b"", msgpack.packb(GOOD))
    assert client.socket.poll(5000)
    delimiter, body = client.socket.recv_multipart()
    assert delimiter == b""
    assert "DEALER" in msgpack.unpackb(body)["message"]


def test_too_large_a_message_is_refused_by_size(server: Live) -> None:
    client = server.client()
    client.send(type="call", id="big", payload=b"x" * (33 << 20))
    answer = client.receive()
    assert (answer["code"], answer["http"]) == ("too_large", 413)
    assert str(32 << 20) in answer["message"]
    assert client.ask(**GOOD)["value"] == 1


def test_the_same_id_of_two_clients_is_two_requests(server: Live) -> None:
    one, two = server.client(), server.client()
    one.send(type="generate", id="1", prompt="a" * 50, model="stream")
    two.send(type="generate", id="1", prompt="b" * 50, model="stream")
    assert one.ending("1")["text"] == "a" * 50
    assert two.ending("1")["text"] == "b" * 50


def test_a_live_id_is_refused_and_the_first_is_unharmed(server: Live) -> None:
    client = server.client()
    client.send(type="generate", id="1", prompt="a" * 200, model="stream")
    client.send(type="generate", id="1", prompt="b", model="stream")
    refused = client.receive()
    assert (refused["type"], refused["code"], refused["field"]) == ("error", "duplicate_id", "id")
    assert client.ending("1")["text"] == "a" * 200
    assert client.ask(type="generate", id="1", prompt="again", model="stream")["text"] == "again"


@pytest.mark.parametrize("request_id", ["\0", "🙂", "x" * 128, " "])
def test_odd_ids_are_ids(server: Live, request_id: str) -> None:
    assert server.client().ask(type="call", id=request_id, payload=[1])["value"] == [1]


@pytest.mark.parametrize("request_id", ["", "x" * 129, "x" * 10_000])
def test_ids_outside_the_limits_are_refused(server: Live, request_id: str) -> None:
    client = server.client()
    client.send(type="call", id=request_id, payload=1)
    answer = client.receive()
    assert (answer["code"], answer["field"]) == ("invalid_request", "id")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"input_ids": []}, "invalid_request", "input_ids"),
        ({"input_ids": [256]}, "invalid_request", "input_ids[0]"),
        ({"input_ids": [1, 2, 900]}, "invalid_request", "input_ids[2]"),
        ({"input_ids": [-1]}, "invalid_request", "input_ids[0]"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({}, "invalid_request", "prompt"),
        ({"prompt": "x", "input_ids": [1]}, "invalid_request", "prompt"),
        ({"prompt": "x", "model": "nope"}, "unknown_model", "model"),
        ({"prompt": "x", "model": "echo"}, "unknown_model", "model"),
        ({"prompt": "x", "deadline_ms": 0}, "deadline_exceeded", "deadline_ms"),
        ({"prompt": "x", "deadline_ms": -5}, "deadline_exceeded", "deadline_ms"),
        ({"prompt": "x", "params": {"temperature": float("nan")}}, "invalid_request", "params.temperature"),
        ({"prompt": "x", "params": {"max_new_tokens": 0}}, "invalid_request", "params.max_new_tokens"),
        ({"prompt": "x", "params": {"stop": ["a", 3]}}, "invalid_request", "params.stop[1]"),
        ({"prompt": "x", "priority": 11}, "invalid_request", "priority"),
        ({"messages": [{"role": "user", "content": "x"}]}, "invalid_request", "messages"),
    ],
)
def test_bad_fields_are_named_and_three_good_neighbours_are_right(
    server: Live, fields: dict[str, object], code: str, field: str
) -> None:
    client = server.client()
    for name in ("a", "b"):
        client.send(type="generate", id=name, prompt=name * 9, model="stream")
    client.send(**{"type": "generate", "id": "bad", "model": "stream", **fields})
    client.send(type="generate", id="c", prompt="c" * 9, model="stream")
    bad = client.ending("bad")
    assert (bad["type"], bad["code"], bad.get("field")) == ("error", code, field)
    assert [client.ending(name)["text"] for name in "abc"] == ["a" * 9, "b" * 9, "c" * 9]


def test_an_integer_key_map_arrives_as_it_is(server: Live) -> None:
    client = server.client()
    client.send(
        type="generate",
        id="1",
        prompt="xy",
        model="stream",
        params={"logit_bias": {255: -100.0}, "max_new_tokens": 9},
    )
    assert client.ending("1")["text"] == "xy"
    assert client.ask(type="call", id="2", payload={1: "a", "b": [None, 2.5, b"\0"]})["value"] == {
        1: "a",
        "b": [None, 2.5, b"\0"],
    }


def test_a_stream_adds_up_and_never_splits_a_character(server: Live) -> None:
    text = "naïve 🙂🙂 家族👨‍👩‍👧 ď"
    client = server.client()
    client.send(type="generate", id="1", prompt=text, model="stream", stream=True)
    deltas = []
    while (message := client.receive())["type"] == "delta":
        deltas.append(message)
    assert message["type"] == "result"
    assert [delta["seq"] for delta in deltas] == list(range(len(deltas)))
    assert len(deltas) > 5
    assert "".join(delta["text"] for delta in deltas) == message["text"] == text
    assert [token for delta in deltas for token in delta["token_ids"]] == message["token_ids"] == [*text.encode()]
    assert all("�" not in delta["text"] for delta in deltas)
    assert message["finish_reason"] == "stop"
    assert message["usage"] == {"prompt_tokens": len(text.encode()), "completion_tokens": len(text.encode())}
    assert message["timing"]["ttft_ms"] <= message["timing"]["total_ms"]


def test_the_token_limit_inside_a_character(server: Live) -> None:
    ending = server.client().ask(
        type="generate", id="1", prompt="ab🙂", model="stream", stream=True, params={"max_new_tokens": 4}
    )
    assert ending["finish_reason"] == "length"
    assert ending["text"] == "ab�"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["own fox"], "The quick br", "stop"),
        (["own fog"], "The quick brown fox jumps", "stop"),
        (["own fog", "own fox"], "The quick br", "stop"),
        (["jumps"], "The quick brown fox ", "stop"),
        (["quick", "The q"], "", "stop"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_never_leaks(server: Live, stop: list[str], text: str, reason: str, stream: bool) -> None:
    client = server.client()
    prompt = "The quick brown fox jumps"
    client.send(type="generate", id="1", prompt=prompt, model="stream", stream=stream, params={"stop": stop})
    pieces = []
    while (message := client.receive())["type"] == "delta":
        pieces.append(message["text"])
    assert message["text"] == text
    assert message["finish_reason"] == reason
    if stream:
        assert "".join(pieces) == text


def test_cancel_hits_exactly_one_request(server: Live) -> None:
    one, two = server.client(), server.client()
    for name in ("a", "ab", "abc"):
        one.send(type="generate", id=name, prompt=name * 60, model="stream")
    two.send(type="generate", id="b", prompt="b" * 200, model="stream")
    one.send(type="cancel", id="ab")
    one.send(type="cancel", id="zzz")
    one.send(type="cancel", id="b")
    ended = one.ending("ab")
    assert (ended["code"], ended["http"]) == ("cancelled", 499)
    assert one.ending("a")["text"] == "a" * 60
    assert one.ending("abc")["text"] == "abc" * 60
    assert two.ending("b")["text"] == "b" * 200
    acks = [one.receive() for _ in range(3)]
    assert [(ack["id"], ack["found"]) for ack in acks] == [("ab", True), ("zzz", False), ("b", False)]
    one.send(type="generate", id="abc", prompt="c" * 2000, model="stream")
    one.send(type="cancel", id="abc")
    assert one.ending("abc")["code"] == "cancelled"
    one.send(type="cancel", id="abc")
    assert [one.receive()["found"] for _ in range(2)] == [True, False]
    one.send(type="cancel", id="")
    assert one.receive()["field"] == "id"


def test_ping_info_and_accepted(server: Live) -> None:
    client = server.client()
    client.send(type="ping", id="p")
    assert client.receive() == {"type": "pong", "id": "p"}
    client.send(type="info", id="i")
    info = client.receive()
    assert info["protocol"] == 1
    assert {(model["name"], model["kind"]) for model in info["models"]} == {("echo", "call"), ("stream", "generate")}
    assert next(m for m in info["models"] if m["name"] == "stream")["concurrency"] == 22  # 0.7 x 32
    client.send(type="call", id="1", payload=1, accepted=True)
    assert client.receive() == {"type": "accepted", "id": "1"}
    assert client.receive()["type"] == "result"


def test_a_deadline_in_the_middle_of_an_answer_gives_what_there_was() -> None:
    with live(echo("stream", mode="iteration", fixed_ms=5)) as server:
        answer = server.client().ask(
            type="generate", id="1", prompt="x" * 2000, deadline_ms=400, params={"max_new_tokens": 2000}
        )
        assert (answer["code"], answer["http"]) == ("deadline_exceeded", 504)
        assert answer["partial"]["text"] == "x" * len(answer["partial"]["token_ids"])
        assert 0 < len(answer["partial"]["token_ids"]) < 2000


def test_a_vanished_client_takes_its_work_along(server: Live) -> None:
    gone, watcher = server.client(), server.client()
    gone.send(type="generate", id="1", prompt="x" * 5000, model="stream", stream=True, params={"max_new_tokens": 5000})
    assert gone.receive()["type"] == "delta"
    gone.close()
    for _ in range(200):
        running = [worker["running"] for worker in watcher.status()["workers"] if worker["model"] == "stream"]
        if running == [0]:
            break
        watcher.socket.poll(10)
    assert running == [0]


def test_one_identity_restarted_fifty_times_is_served_each_time(server: Live) -> None:
    for number in range(50):
        client = server.client(b"fixed-name")
        client.send(type="generate", id="1", prompt=f"{number:03} " + "x" * 300, model="stream")  # never read
        client.close()
        newcomer = server.client(b"fixed-name")
        newcomer.send(type="call", id="1", payload=number)
        assert newcomer.receive(1000) == {**newcomer_result(number), "timing": ANY, "usage": ANY}
        newcomer.close()


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


ANY = _Any()


def newcomer_result(value: int) -> dict[str, object]:
    return {"type": "result", "id": "1", "value": value, "model": "echo"}


def test_five_hundred_answers_wait_for_a_client_that_does_not_read() -> None:
    with live(echo(), policy=PolicySpec(window="greedy"), send_hwm=10) as server:
        slow, other = server.client(hwm=10), server.client()
        for number in range(500):
            slow.send(type="call", id=str(number), payload=b"x" * 20_000)
        for number in range(200):
            assert other.ask(type="call", id=str(number), payload=number)["value"] == number
        assert other.status()["counters"]["full_clients"] >= 1
        assert sorted(int(slow.receive()["id"]) for _ in range(500)) == list(range(500))


def test_a_reader_too_slow_for_its_outbox_loses_its_work_and_is_told() -> None:
    with live(
        echo("stream", mode="iteration"), policy=PolicySpec(window="greedy"), send_hwm=50, outbox_mib=1
    ) as server:
        slow, other = server.client(hwm=1), server.client()
        for number in range(20):
            slow.send(
                type="generate",
                id=f"{number}-" + "i" * 100,
                prompt="x" * 8000,
                stream=True,
                params={"max_new_tokens": 8000},
            )
        for _ in range(1000):
            counters = other.status()["counters"]
            if counters.get("slow_readers"):
                break
            other.socket.poll(20)
        assert counters["slow_readers"] == 1
        assert other.ask(type="generate", id="1", prompt="fine")["text"] == "fine"
        endings = []
        while len(endings) < 20:
            message = slow.receive()
            if message["type"] in ("result", "error"):
                endings.append(message)
        assert {ending["code"] for ending in endings if ending["type"] == "error"} == {"slow_reader"}


@pytest.mark.parametrize("place", [0, 4, 7])
def test_one_bad_item_in_a_batch_of_eight_fails_alone(place: int) -> None:
    with live(echo(fail_on="BAD", fixed_ms=30), policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        client.send(type="call", id="first", payload="keeps the worker busy while the eight arrive")
        for number in range(8):
            client.send(type="call", id=str(number), payload="BAD" if number == place else f"ok{number}")
        for number in range(8):
            ending = client.ending(str(number))
            if number == place:
                assert ending["code"] == "engine_error"
                assert "BAD" in ending["message"]
            else:
                assert ending["value"] == f"ok{number}"
        assert max(batch["size"] for batch in client.status()["batches"]) >= 8


def test_a_killed_worker_is_replaced_and_its_requests_run_again() -> None:
    with live(echo(fixed_ms=300), policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        pid = client.status()["workers"][0]["pid"]
        for number in range(6):
            client.send(type="call", id=str(number), payload=number)
        client.socket.poll(50)
        os.kill(pid, signal.SIGKILL)
        assert [client.ending(str(number)).get("value") for number in range(6)] == list(range(6))
        assert client.status()["counters"]["workers_lost"] == 1


def test_a_stream_goes_on_after_its_last_token_when_its_worker_is_killed() -> None:
    stream = echo("stream", mode="iteration", per_token_ms=2, workers=2)
    with live(stream, policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        text = "".join(chr(97 + i % 26) for i in range(300))
        client.send(type="generate", id="1", prompt=text, stream=True, params={"max_new_tokens": 400})
        pieces = [client.receive()["text"] for _ in range(5)]
        victim = next(w["pid"] for w in client.status()["workers"] if w["running"])
        os.kill(victim, signal.SIGKILL)
        seqs = []
        while (message := client.receive())["type"] == "delta":
            pieces.append(message["text"])
            seqs.append(message["seq"])
        assert message["text"] == text
        assert "".join(pieces) == text
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


def test_over_long_prompts_are_refused_fast_and_block_nobody() -> None:
    with live(echo("stream", mode="iteration", per_token_ms=1, max_input_tokens=1024)) as server:
        client = server.client()
        for size in (1_100, 5_000, 200_000):
            client.send(type="generate", id=str(size), prompt="x" * size)
            for number in range(5):
                client.send(type="generate", id=f"{size}-{number}", prompt="short")
            refused = client.ending(str(size), 1000)
            assert (refused["code"], refused["field"]) == ("too_long", "prompt")
            assert str(size) in refused["message"]
            assert "1024" in refused["message"]
            for number in range(5):
                assert client.ending(f"{size}-{number}")["text"] == "short"


def test_a_full_queue_refuses_with_a_hint() -> None:
    with live(echo(fixed_ms=200), policy=PolicySpec(window="greedy", queue_max=4)) as server:
        client = server.client()
        for number in range(40):
            client.send(type="call", id=str(number), payload=number)
        endings = [client.ending(str(number)) for number in range(40)]
        refused = [ending for ending in endings if ending["type"] == "error"]
        assert len(refused) >= 3
        assert {(e["code"], e["retryable"], e["http"]) for e in refused} == {("queue_full", True, 429)}
        assert all(e["retry_after_ms"] > 0 for e in refused)


def test_what_has_no_worker_yet_is_told_so() -> None:
    with live(echo(load_ms=600_000), ready=False) as server:
        answer = server.client().ask(type="call", id="1", payload=1)
        assert (answer["code"], answer["retryable"]) == ("no_worker", True)
        assert "loading" in answer["message"]


def test_a_frame_that_is_not_even_read_costs_only_its_own_connection() -> None:
    with live(echo()) as server:
        bad, good = server.client(), server.client()
        bad.send_frames(b"x" * (65 << 20))
        assert good.ask(type="call", id="1", payload=1)["value"] == 1
        bad.send(type="call", id="2", payload=2)  # libzmq connects again by itself
        assert bad.ending("2")["value"] == 2


def test_two_live_holders_of_one_name_take_it_from_each_other_and_that_is_counted() -> None:
    with live(echo(), echo("stream", mode="iteration", fixed_ms=5)) as server:
        first, watcher = server.client(b"same"), server.client()
        first.send(type="generate", id="1", prompt="x" * 3000, model="stream", params={"max_new_tokens": 3000})
        for _ in range(200):
            if any(worker["running"] for worker in watcher.status()["workers"]):
                break
            watcher.socket.poll(5)
        second = server.client(b"same")
        second.send(type="call", id="1", payload="mine")
        assert second.ending("1")["value"] == "mine"
        counters = watcher.status()["counters"]
        assert counters["identity_taken_over"] >= 1
        assert counters["ended.cancelled"] == 1
