"""The client library against a scripted server: what it sends, what it returns, what it refuses, and streams."""

import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest

from headway.scheduler import wire
from headway.scheduler.client import Client, Stream
from headway.scheduler.client_types import Alternative, Counters, GenerateOptions, Options, TokenLogprob
from tests.scripted import (
    MODEL,
    Message,
    Reply,
    Scripted,
    failing,
    leave_at_end,
    letters,
)

pytestmark = pytest.mark.anyio


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


async def test_logprobs_come_as_one_value_for_each_token() -> None:
    def script(reply: Reply, message: Message) -> None:
        columns = {"chosen": [-0.5, -1.0], "top_ids": [[97, 9], [9, 98]], "top": [[-0.5, -2.0], [-0.25, -1.0]]}
        if message["params"]["logprobs"] == 0:
            columns = {"chosen": [-0.5, -1.0]}
        if message.get("stream"):
            reply.send("delta", seq=0, token_ids=[97], text="a", logprobs={"chosen": [-0.5]})
            reply.send("delta", seq=1, token_ids=[98], text="b", logprobs={"chosen": [-1.0]})
        reply.text("ab", logprobs=columns)

    chosen = (TokenLogprob(97, -0.5), TokenLogprob(98, -1.0))
    tops = ((Alternative(97, -0.5), Alternative(9, -2.0)), (Alternative(9, -0.25), Alternative(98, -1.0)))
    with Scripted(script) as server:
        async with Client(server.endpoint) as client:
            assert (await client.generate("x", logprobs=0)).logprobs == chosen
            answer = await client.generate("x", logprobs=2)
            assert answer.logprobs == tuple(
                TokenLogprob(one.token_id, one.logprob, top) for one, top in zip(chosen, tops, strict=True)
            )
            stream = client.stream("x", logprobs=0)
            pieces = [delta.logprobs async for delta in stream]
            assert pieces == [chosen[:1], chosen[1:]]
            assert stream.result.logprobs == chosen


@pytest.mark.parametrize(
    "columns",
    [{"chosen": [-0.5]}, {"chosen": [-0.5, 0.0], "top": [[0.0]], "top_ids": [[1]]}, {"chosen": [], "top": []}],
)
async def test_logprobs_of_other_tokens_than_the_answers_are_refused(columns: dict[str, Any]) -> None:
    with Scripted(lambda reply, _: reply.text("ab", logprobs=columns)) as server:
        async with Client(server.endpoint) as client:
            error = await failing(client.generate("x", logprobs=1))
    assert error.code == "internal"
    assert "logprobs for every token" in error.message


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
