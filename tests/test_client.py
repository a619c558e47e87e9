"""The client library against a scripted server: answers, faults, deadlines, retries, and books that balance."""

import asyncio
import contextlib
import gc
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgpack
import numpy as np
import pytest
import zmq

from headway.scheduler import wire
from headway.scheduler.client import Client, Stream
from headway.scheduler.client_types import Counters, GenerateOptions, Options
from headway.scheduler.errors import HeadwayError
from headway.scheduler.retry import BASE_MS, CAP_MS, Retry
from tests.scripted import MODEL, Message, Reply, Scripted, echo, given_back, held

pytestmark = pytest.mark.anyio


def silent(_reply: Reply, _message: Message) -> None:
    """Never answer."""


def balanced(books: Counters) -> bool:
    return books.sent == books.answered + books.timed_out + books.cancelled + books.lost + books.live


async def failing(work: Awaitable[object]) -> HeadwayError:
    with pytest.raises(HeadwayError) as caught:
        await work
    return caught.value


# ---------------------------------------------------------------- what goes well


async def test_generate_sends_only_what_was_given_and_returns_all_of_the_answer() -> None:
    def script(reply: Reply, _message: Message) -> None:
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        timing = {"queue_ms": 1.0, "total_ms": 2.5, "ttft_ms": 1.5, "batch_size": 4}
        reply.text("abc", usage=usage, timing=timing, model="echo", finish_reason="length")

    with Scripted(script) as server:
        async with Client(server.endpoint, tenant="acme") as client:
            answer = await client.generate("hé", max_new_tokens=3, stop="x", logit_bias={5: -1}, seed=None, priority=2)
            books = client.counters
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abc", (97, 98, 99), "length")
    assert answer.usage == wire.Usage(2, 3)
    assert answer.timing == wire.Timing(1.0, 2.5, 1.5, 4)
    assert (answer.model, answer.attempts) == ("echo", 1)
    (sent,) = server.of("generate")
    assert sent.pop("id")
    assert sent == {
        "type": "generate",
        "tenant": "acme",
        "priority": 2,
        "prompt": "hé",
        "params": {"max_new_tokens": 3, "stop": ["x"], "logit_bias": {5: -1.0}},
    }
    assert books == Counters(sent=1, answered=1)


async def test_the_other_kinds() -> None:
    def script(reply: Reply, message: Message) -> None:
        answers: dict[str, Message] = {
            "embed": {"embedding": [0.5, -1.0]},
            "classify": {"scores": {"neg": 0.2, "pos": 0.8}},
            "score": {"scores": {"score": 0.7}},
            "call": {"value": {"got": message.get("payload"), 1: None}},
        }
        if message["type"] == "status":
            reply.send("status", state="serving", uptime_s=1.0, counters={"x": 1}, lanes=[], workers=[], batches=[])
        else:
            reply.send("result", **answers[message["type"]])

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            assert (await client.embed("a")).vector == (0.5, -1.0)
            assert (await client.embed(input_ids=np.arange(3))).vector == (0.5, -1.0)
            assert (await client.classify("a", model="m")).label == "pos"
            assert (await client.score("a", "b")).score == 0.7
            assert await client.call({"x": np.ones(2), 3: b"y"}, tokens=9) == {
                "got": {"x": [1.0, 1.0], 3: b"y"},
                1: None,
            }
            assert await client.call(None) == {"got": None, 1: None}
            info = await client.info()
            status = await client.status(batches=3)
            assert await client.ping() > 0
            assert client.late == 0
    assert info.models[0].name == "echo"
    assert status.counters == {"x": 1}
    assert server.of("embed")[1]["input_ids"] == [0, 1, 2]
    assert server.of("call")[0]["tokens"] == 9
    assert server.of("status")[0]["batches"] == 3


async def test_messages_and_every_option_are_the_wires() -> None:
    assert GenerateOptions.__annotations__.keys() - Options.__annotations__.keys() == set(wire.Params.__struct_fields__)
    assert set(Options.__annotations__) < set(wire.Generate.__struct_fields__)

    def script(reply: Reply, message: Message) -> None:
        reply.text(message["messages"][0]["content"])

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            assert (await client.generate(messages=[{"role": "user", "content": "hi"}])).text == "hi"


# ---------------------------------------------------------------- refused before anything is sent


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda c: c.generate("x", temperature=math.nan), "params.temperature"),
        (lambda c: c.generate("x", seed=1 << 63), "params.seed"),
        (lambda c: c.generate("x", bogus=1), "params.bogus"),
        (lambda c: c.generate(), "prompt"),
        (lambda c: c.generate("x", input_ids=[1]), "prompt"),
        (lambda c: c.generate("x", deadline_ms=1.5), "deadline_ms"),
        (lambda c: c.generate("x", priority=11), "priority"),
        (lambda c: c.generate(messages=[{"role": "user", "content": "x", "name": "y"}]), "messages[0].name"),
        (lambda c: c.embed("x", bogus=1), "bogus"),
        (lambda c: c.score("x", None), "text_pair"),
        (lambda c: c.status(batches=257), "batches"),
    ],
)
async def test_a_bad_request_is_refused_here(ask: Callable[[Any], Awaitable[object]], field: str) -> None:
    with Scripted() as server:
        async with Client(server.endpoint) as client:
            error = await failing(ask(client))
            assert client.counters.sent == 0
    assert (error.code, error.field) == ("invalid_request", field)


async def test_a_value_that_cannot_be_sent_is_refused_by_its_path() -> None:
    with Scripted() as server:
        async with Client(server.endpoint) as client:
            with pytest.raises(TypeError, match=r"^payload\.scores\[2\]: a set cannot be sent; send a list$"):
                await client.call({"scores": [1, 2, {3}]})
            with pytest.raises(TypeError, match=r"^params\.seed: an integer of 65 bits"):
                await client.generate("x", seed=1 << 64)


async def test_wrong_arguments_and_wrong_use_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="tcp://host:port or ipc://path"):
        Client("localhost:5555")
    with pytest.raises(ValueError, match="concurrency is 0"):
        Client(concurrency=0)
    with pytest.raises(ValueError, match="max_retries is -1"):
        Client(max_retries=-1)
    with pytest.raises(RuntimeError, match="async with"):
        await Client().ping()
    with Scripted() as server:
        client = Client(server.endpoint)
        async with client:
            assert repr(client).startswith(f"<Client {server.endpoint} (sent=0")
        assert (await failing(client.ping())).code == "cancelled"
        with pytest.raises(RuntimeError, match="make a new one"):
            await client.__aenter__()


# ---------------------------------------------------------------- streams


def letters(reply: Reply, message: Message) -> None:
    """Stream a prompt's characters; without the last ones if it says so."""
    if message["type"] != "generate":
        return
    text = message["prompt"]
    for seq, letter in enumerate(text.rstrip(".")):
        reply.send("delta", seq=seq, token_ids=list(letter.encode()), text=letter)
    if not text.endswith("."):
        reply.text(text)


async def test_a_stream_gives_pieces_and_then_the_whole() -> None:
    with Scripted(letters) as server:
        async with Client(server.endpoint) as client:
            stream = client.stream("héllo", max_new_tokens=9)
            with pytest.raises(RuntimeError, match="last piece was not reached"):
                _ = stream.result
            deltas = [delta async for delta in stream]
            assert [delta.seq for delta in deltas] == list(range(5))
            assert "".join(delta.text for delta in deltas) == stream.result.text == "héllo"
            assert sum((delta.token_ids for delta in deltas), ()) == stream.result.token_ids
            assert [delta async for delta in stream] == []
            assert not server.of("cancel")
    assert server.of("generate")[0]["stream"] is True


async def leave_by_break(stream: Stream) -> None:
    async for _ in stream:
        break


async def leave_by_error(stream: Stream) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for _ in stream:
            raise ZeroDivisionError


async def leave_by_context(stream: Stream) -> None:
    async with stream:
        assert (await anext(aiter(stream))).text == "a"


async def leave_by_cancellation(stream: Stream) -> None:
    async def read() -> None:
        async for delta in stream:
            if delta.text == "b":
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(read)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_context, leave_by_cancellation])
async def test_leaving_a_stream_cancels_its_request(leave: Callable[[Stream], Awaitable[None]]) -> None:
    with Scripted(letters) as server:
        async with Client(server.endpoint, concurrency=1) as client:
            stream = client.stream("abc.")
            await leave(stream)
            await server.until(lambda: len(server.of("cancel")) == 1)
            assert server.of("cancel")[0]["id"] == server.of("generate")[0]["id"]
            with pytest.raises(RuntimeError, match="make a new one"):
                await leave_by_break(stream)
            async for delta in client.stream("xyz"):  # the slot is free again
                assert delta.text in "xyz"
            assert (client.counters.cancelled, client.counters.answered) == (1, 1)


async def test_two_streams_of_one_task_take_two_slots() -> None:
    with Scripted(letters, models=[{**MODEL, "concurrency": 2}]) as server:
        async with Client(server.endpoint) as client:
            first, second = client.stream("ab"), client.stream("cd")
            pairs = [(a.text, b.text) for a, b in [(await anext(aiter(first)), await anext(aiter(second)))]]
            assert pairs == [("a", "c")]


async def test_a_missing_piece_is_a_fault_and_not_a_gap_in_the_text() -> None:
    def script(reply: Reply, message: Message) -> None:
        if message["type"] == "generate":
            reply.send("delta", seq=0, token_ids=[1], text="a")
            reply.send("delta", seq=2, token_ids=[3], text="c")

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            stream = client.stream("x")
            error = await failing(leave_at_end(stream))
            assert error.code == "internal"
            assert "piece 1" in error.message
            await server.until(lambda: len(server.of("cancel")) == 1)


async def leave_at_end(stream: Stream) -> None:
    async for _ in stream:
        pass


# ---------------------------------------------------------------- deadlines


async def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    with Scripted(silent) as server:
        async with Client(server.endpoint) as client:
            error = await failing(client.generate("x", deadline_ms=30))
            assert error.code == "deadline_exceeded"
            assert "deadline_ms (30)" in error.message
            (sent,) = server.of("generate")
            assert 0 < sent["deadline_ms"] <= 30
            await server.until_cancelled(sent["id"])
            assert client.counters == Counters(sent=1, timed_out=1)


async def test_a_stream_past_its_deadline_tells_what_it_had() -> None:
    with Scripted(letters) as server:
        async with Client(server.endpoint) as client:
            error = await failing(leave_at_end(client.stream("ab.", deadline_ms=100)))
    assert (error.code, error.partial) == ("deadline_exceeded", {"text": "ab", "token_ids": [97, 98]})


@pytest.mark.parametrize("deadline_ms", [0, -5])
async def test_a_deadline_that_has_passed_is_not_sent(deadline_ms: int) -> None:
    with Scripted() as server:
        async with Client(server.endpoint) as client:
            await client.generate("x")
            assert (await failing(client.generate("x", deadline_ms=deadline_ms))).code == "deadline_exceeded"
            assert client.counters.sent == 1


async def test_waiting_for_a_slot_counts_against_the_deadline() -> None:
    with Scripted(silent, models=[{**MODEL, "concurrency": 1}]) as server:
        async with Client(server.endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(failing, client.generate("first"))
            await server.until(lambda: len(server.of("generate")) == 1)
            error = await failing(client.generate("second", deadline_ms=20))
            assert error.code == "deadline_exceeded"
            assert "not sent" in error.message
            client.close()
    assert len(server.of("generate")) == 1


async def test_the_server_is_told_the_time_that_is_left() -> None:
    def script(reply: Reply, _message: Message) -> None:
        reply.text("x", later_ms=50)

    with Scripted(script, models=[{**MODEL, "concurrency": 1}]) as server:
        async with Client(server.endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(client.generate, "first")
            await server.until(lambda: len(server.of("generate")) == 1)
            await client.generate("second", deadline_ms=5000)
    assert 0 < server.of("generate")[1]["deadline_ms"] <= 4960


async def test_a_late_answer_is_counted_and_goes_to_nobody() -> None:
    def script(reply: Reply, message: Message) -> None:
        if message["type"] == "cancel":  # too late: the answer was under way
            reply.send("cancel_ack", found=False)
            reply.text("late")
        elif message["prompt"] == "fast":
            reply.text("fast")

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            await failing(client.generate("slow", deadline_ms=10))
            await server.until(lambda: len(server.of("cancel")) == 1)
            assert (await client.generate("fast")).text == "fast"
            assert client.late == 1


async def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    with Scripted(silent) as server:
        async with Client(server.endpoint) as client:
            task = asyncio.create_task(client.generate("x"))
            await server.until(lambda: len(server.of("generate")) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.until(lambda: len(server.of("cancel")) == 1)
            assert client.counters == Counters(sent=1, cancelled=1)


async def test_a_time_out_equal_to_the_usual_latency_loses_and_mixes_nothing() -> None:
    """Public report B58: answered + timed out == sent, and late answers go to nobody."""
    calls, at_once, seed = 3000, 50, 58
    rng = random.Random(seed)

    def script(reply: Reply, message: Message) -> None:
        if message["type"] == "generate":
            reply.text(message["prompt"], later_ms=rng.uniform(15, 25))

    outcomes: dict[str, int] = {"answered": 0, "deadline_exceeded": 0}
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(what))

    async def caller(client: Client, mine: range) -> None:
        for number in mine:
            try:
                answer = await client.generate(str(number), deadline_ms=22)
            except HeadwayError as error:
                outcomes[error.code] += 1
            else:
                outcomes["answered"] += 1
                assert answer.text == str(number)

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            await client.ping()
            async with anyio.create_task_group() as group:
                for first in range(at_once):
                    group.start_soon(caller, client, range(first, calls, at_once))
            await server.until(lambda: server.owed == 0)
            await client.ping()  # behind every answer still on its way
            books = client.counters
    gc.collect()
    assert not complaints
    assert sum(outcomes.values()) == calls, f"seed {seed}"
    assert balanced(books)
    assert books.live == 0
    assert books.sent == len(server.of("generate"))
    assert books.timed_out == books.late == books.sent - books.answered
    assert books.answered == outcomes["answered"] > 0
    assert books.timed_out > 0


# ---------------------------------------------------------------- tries


def failing_first(times: int, code: str = "queue_full", **fields: Any) -> Callable[[Reply, Message], None]:
    left = iter(range(times))

    def script(reply: Reply, message: Message) -> None:
        if message["type"] == "generate":
            reply.text("ok") if next(left, None) is None else reply.error(code, retryable=True, **fields)

    return script


async def test_a_retryable_error_is_tried_again_under_the_same_id() -> None:
    with Scripted(failing_first(2, retry_after_ms=1)) as server:
        async with Client(server.endpoint, rng=random.Random(1)) as client:
            answer = await client.generate("x")
            assert (answer.text, answer.attempts) == ("ok", 3)
            assert client.counters == Counters(sent=3, answered=3, retries=2)
    assert len({message["id"] for message in server.of("generate")}) == 1


async def test_without_a_deadline_tries_are_counted() -> None:
    with Scripted(failing_first(99)) as server:
        async with Client(server.endpoint, max_retries=2) as client:
            assert (await failing(client.generate("x"))).code == "queue_full"
            assert (await failing(client.generate("x"))).retryable
    assert len(server.of("generate")) == 6


async def test_a_retry_that_would_miss_the_deadline_is_not_waited_for() -> None:
    with Scripted(failing_first(99, retry_after_ms=60_000)) as server:
        async with Client(server.endpoint) as client:
            error = await failing(client.generate("x", deadline_ms=50_000))
            assert (error.code, error.retry_after_ms) == ("queue_full", 60_000)
    assert len(server.of("generate")) == 1


@pytest.mark.parametrize("code", ["engine_error", "deadline_exceeded", "too_long", "code_of_a_newer_server"])
async def test_other_errors_are_not_tried_again(code: str) -> None:
    def script(reply: Reply, _message: Message) -> None:
        reply.error(code, field="prompt", partial={"text": "a", "token_ids": [1]})

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            error = await failing(client.generate("x"))
    assert error.code == (code if code != "code_of_a_newer_server" else "internal")
    assert (error.message, error.field) == (f"said {code}", "prompt")
    assert error.partial == {"text": "a", "token_ids": [1]}
    assert len(server.of("generate")) == 1


async def test_a_stream_is_tried_again_only_before_its_first_piece() -> None:
    tries = iter(range(9))

    def script(reply: Reply, _message: Message) -> None:
        if next(tries) == 0:
            reply.error("worker_lost", retryable=True)
        else:
            reply.send("delta", seq=0, token_ids=[1], text="a")
            reply.error("worker_lost", retryable=True)

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            error = await failing(leave_at_end(client.stream("x")))
    assert (error.code, error.partial) == ("worker_lost", {"text": "a", "token_ids": [1]})
    assert len(server.of("generate")) == 2


async def test_the_back_off_is_capped_jittered_and_bounded_below() -> None:
    error = HeadwayError("queue_full", "full", retry_after_ms=300)
    retry = Retry(4, random.Random(7))
    for tries in range(1, 5):
        delays = [retry.delay_ms(error, tries, None) for _ in range(200)]
        extra = [delay - 300 for delay in delays if delay is not None]
        ceiling = min(CAP_MS, BASE_MS * 2 ** (tries - 1))
        assert 0 <= min(extra) < 0.1 * ceiling
        assert 0.9 * ceiling < max(extra) <= ceiling
    assert retry.delay_ms(error, 5, None) is None
    assert (retry.delay_ms(error, 1000, 1e9) or 0) <= 300 + CAP_MS
    assert retry.delay_ms(error, 1, 300) is None
    assert Retry(0).delay_ms(error, 1, 1e9) is None
    assert retry.delay_ms(HeadwayError("engine_error", "no"), 1, None) is None


# ---------------------------------------------------------------- concurrency


@pytest.mark.parametrize(("given", "most"), [(None, 3), (5, 5)])
async def test_no_more_are_in_flight_than_the_server_advertises(given: int | None, most: int) -> None:
    flying: list[str] = []
    heights: list[int] = []

    def script(reply: Reply, message: Message) -> None:
        flying.append(message["id"])
        heights.append(len(flying))
        reply.server.loop.call_later(0.002, lambda: (flying.pop(), reply.text("x")))

    models = [{**MODEL, "name": "other", "kind": "embed", "concurrency": 1}, {**MODEL, "concurrency": 3}]
    with Scripted(script, models=models) as server:
        async with Client(server.endpoint, concurrency=given) as client, anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(client.generate, "x")
    assert max(heights) == most
    assert len(heights) == 40


async def test_a_new_advertisement_moves_the_limit() -> None:
    with Scripted(silent, models=[{**MODEL, "concurrency": 1}]) as server:
        async with Client(server.endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(failing, client.generate("first"))
            await server.until(lambda: len(server.of("generate")) == 1)
            server.models = [{**MODEL, "concurrency": 2}]
            await client.info()
            group.start_soon(failing, client.generate("second"))
            await server.until(lambda: len(server.of("generate")) == 2)
            client.close()


async def test_a_model_that_is_not_there_is_the_servers_to_refuse() -> None:
    def script(reply: Reply, _message: Message) -> None:
        reply.error("unknown_model", field="model")

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            assert (await failing(client.generate("x", model="nobody"))).code == "unknown_model"


# ---------------------------------------------------------------- a server out of order


async def test_duplicates_strangers_and_rubbish_harm_no_call() -> None:
    def script(reply: Reply, message: Message) -> None:
        reply.raw(b"\xc1")
        reply.raw(b"")
        reply.raw(b"", b"two frames")
        reply.raw(msgpack.packb([1]))
        reply.raw(msgpack.packb({"type": "result", "id": "a stranger's", "text": "no"}))
        reply.raw(
            msgpack.packb({"type": "error", "id": None, "code": "x", "message": "", "retryable": False, "http": 4})
        )
        reply.send("a_newer_kind", x=1)
        reply.send("accepted")
        reply.text(message["prompt"], a_newer_field=1)
        reply.text("a second ending")

    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            answers = [(await client.generate(str(number))).text for number in range(20)]
            await client.ping()
            assert answers == [str(number) for number in range(20)]
            assert client.late == 8 * 20
            assert client.counters.answered == 20


@pytest.mark.parametrize(
    ("kind", "fields", "what"),
    [
        ("result", {"text": 5}, "result message cannot be read"),
        ("result", {"embedding": [1.0]}, "lacks text and token_ids"),
        ("pong", {}, "a Pong"),
    ],
)
async def test_an_answer_that_makes_no_sense_ends_its_call(kind: str, fields: Message, what: str) -> None:
    with Scripted(lambda reply, _message: reply.send(kind, **fields)) as server:
        async with Client(server.endpoint) as client:
            error = await failing(client.generate("x"))
    assert error.code == "internal"
    assert what in error.message


async def test_a_server_that_does_not_read_blocks_nobody() -> None:
    """Public report B13, the client's side: past the high-water mark requests wait here, and all go in the end."""
    with Scripted(reading=False, rcvhwm=1) as server:
        async with Client(server.endpoint, concurrency=10_000, timeout_ms=20_000) as client:
            async with anyio.create_task_group() as group:
                for _ in range(2500):
                    group.start_soon(client.generate, "x" * 4000)
                await anyio.wait_all_tasks_blocked()
                error = await failing(client.generate("impatient", deadline_ms=50))
                assert "deadline_ms (50)" in error.message
                assert client.counters.sent < 2500  # the mark was hit
                server.resume()
            assert client.counters.answered == 2500
            assert client.counters == Counters(sent=2500, answered=2500)
            assert client.late == 0
    assert not [message for message in server.of("generate") if message["prompt"] == "impatient"]


# ---------------------------------------------------------------- connections


async def test_nobody_there() -> None:
    async with Client("tcp://127.0.0.1:9", timeout_ms=150) as client:
        for work in (client.ping(), client.info(), client.generate("x")):
            error = await failing(work)
            assert error.code == "unreachable"
            assert "tcp://127.0.0.1:9: no connection within 150 ms" in error.message
            assert "headway serve" in error.message
        error = await failing(client.generate("x", deadline_ms=20))
        assert error.code == "deadline_exceeded"
        assert "no connection" in error.message


async def test_an_address_that_makes_no_sense() -> None:
    with pytest.raises(HeadwayError, match="cannot connect to 'tcp://nonsense'"):
        await Client("tcp://nonsense").__aenter__()


async def test_somebody_there_who_does_not_answer() -> None:
    server = Scripted(silent)
    server.models = None
    with server:
        async with Client(server.endpoint, timeout_ms=100) as client:
            error = await failing(client.generate("x"))
    assert error.code == "unreachable"
    assert "connected, but `info` was not answered within 100 ms" in error.message


async def test_a_lost_connection_ends_what_was_running_and_a_new_one_is_used() -> None:
    with Scripted(silent) as server:
        async with Client(server.endpoint, timeout_ms=5000) as client:
            async with anyio.create_task_group() as group:
                answers: list[str] = []

                async def ask() -> None:
                    answer = await client.generate("x")
                    answers.append(f"{answer.text} {answer.attempts}")

                group.start_soon(ask)
                await server.until(lambda: len(server.of("generate")) == 1)
                server.stop()
                with Scripted(endpoint=server.endpoint) as again:
                    await again.until(lambda: len(again.of("generate")) == 1)
                    assert again.of("generate")[0]["id"] == server.of("generate")[0]["id"]
                    await client.ping()
            assert answers == ["x 2"]
            assert client.counters == Counters(sent=2, answered=1, lost=1, retries=1)


async def test_a_lost_connection_without_retries() -> None:
    with Scripted(silent) as server:
        async with Client(server.endpoint, max_retries=0, timeout_ms=100) as client:
            task = asyncio.create_task(client.generate("x"))
            await server.until(lambda: len(server.of("generate")) == 1)
            server.stop()
            error = await failing(task)
            assert error.code == "unreachable"
            assert "lost while this request was running" in error.message
            assert "no connection within 100 ms" in (await failing(client.generate("y"))).message


async def test_what_was_queued_for_a_lost_connection_is_not_sent_twice() -> None:
    calls = 1500
    with Scripted(reading=False, rcvhwm=1) as server:
        async with Client(server.endpoint, concurrency=calls) as client:
            async with anyio.create_task_group() as group:
                for _ in range(calls):
                    group.start_soon(client.generate, "x" * 8000)
                await anyio.wait_all_tasks_blocked()
                server.stop()
                with Scripted(endpoint=server.endpoint) as again:
                    await again.until(lambda: len(again.of("generate")) >= calls)
                    await client.ping()
            assert len({message["id"] for message in again.of("generate")}) == len(again.of("generate")) == calls
            books = client.counters
            assert books.sent == books.answered + books.lost
            assert (books.answered, books.late) == (calls, 0)


async def test_answers_that_came_before_the_loss_count() -> None:
    calls = 600  # more than are read in one turn
    replies: list[Reply] = []

    def script(reply: Reply, _message: Message) -> None:
        replies.append(reply)

    with Scripted(script, linger=5000) as server:
        async with Client(server.endpoint, concurrency=calls, max_retries=0) as client:
            async with anyio.create_task_group() as group:
                for _ in range(calls):
                    group.start_soon(client.generate, "x")
                await server.until(lambda: len(server.of("generate")) == calls)
                server.loop.call_soon_threadsafe(lambda: [reply.text("x") for reply in replies])
                server.stop()  # blocks this loop, so that answers and loss are found together
            assert client.counters == Counters(sent=calls, answered=calls)


async def test_a_loss_that_is_noticed_late_does_not_hit_what_was_sent_after_it() -> None:
    with Scripted() as server:
        async with Client(server.endpoint) as client:
            await client.ping()
            server.stop()
            with Scripted(endpoint=server.endpoint):
                assert client.socket._dealer.poll(5000, zmq.POLLOUT)  # connected again; the loop has not run
                mailbox = client.socket.start("1", wire.Ping(id="1"))
                assert isinstance(await mailbox.take(), wire.Pong)
                client.socket.finish(mailbox)


async def test_closing_ends_a_wait_for_a_connection() -> None:
    async with Client("tcp://127.0.0.1:9", timeout_ms=60_000) as client:
        tasks = [asyncio.create_task(failing(work)) for work in (client.ping(), client.generate("x"))]
        await anyio.wait_all_tasks_blocked()
        client.close()
        assert [(await task).code for task in tasks] == ["cancelled"] * 2


async def test_closing_ends_every_call_and_every_wait() -> None:
    with Scripted(failing_first(99, retry_after_ms=60_000), models=[{**MODEL, "concurrency": 2}]) as server:
        async with Client(server.endpoint) as client, anyio.create_task_group() as group:
            errors: list[str] = []

            async def ask() -> None:
                errors.append((await failing(client.generate("x"))).code)

            for _ in range(4):  # two back off, two wait for their slots
                group.start_soon(ask)
            await server.until(lambda: len(server.of("generate")) == 2)
            await client.ping()
            client.close()
    assert errors == ["cancelled"] * 4
    assert balanced(client.counters)


async def test_curve() -> None:
    public, secret = zmq.curve_keypair()
    with Scripted(curve_secretkey=secret, curve_publickey=public, curve_server=True) as server:
        async with Client(server.endpoint, curve_server_key=public.decode()) as client:
            assert (await client.generate("secret")).text == "secret"
        async with Client(server.endpoint, curve_server_key=zmq.curve_keypair()[0], timeout_ms=300) as client:
            assert "curve_server_key" in (await failing(client.ping())).message
        async with Client(server.endpoint, timeout_ms=300) as client:
            assert "curve_server_key" in (await failing(client.ping())).message


async def test_threads_and_files_are_given_back() -> None:
    """Public report B66."""

    async def rounds(times: int) -> None:
        for _ in range(times):
            async with Client(server.endpoint) as client:
                assert (await client.generate("x")).text == "x"

    with Scripted() as server:
        await rounds(1)
        before = held()
        await rounds(5)
        assert given_back(before), f"{before} before, {held()} after"


async def test_over_ipc(tmp_path: Any) -> None:
    with Scripted(echo, endpoint=f"ipc://{tmp_path}/s") as server:
        async with Client(server.endpoint) as client:
            assert (await client.generate("x")).text == "x"
