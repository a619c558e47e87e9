"""The client's deadlines, tries and concurrency, and books that balance whatever happens."""

import asyncio
import gc
import random

import anyio
import pytest

from headway.scheduler.client import Client
from headway.scheduler.client_types import Counters
from headway.scheduler.errors import HeadwayError
from headway.scheduler.retry import BASE_MS, CAP_MS, Retry
from tests.scripted import (
    MODEL,
    Message,
    Reply,
    Scripted,
    balanced,
    failing,
    failing_first,
    leave_at_end,
    letters,
    silent,
)

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------- deadlines


async def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    with Scripted(silent) as server:
        async with Client(server.endpoint) as client:
            await client.info()
            error = await failing(client.generate("x", deadline_ms=100))
            assert error.code == "deadline_exceeded"
            assert "deadline_ms (100)" in error.message
            (sent,) = server.of("generate")
            assert 0 < sent["deadline_ms"] <= 100
            await server.until_cancelled(sent["id"])
            assert client.counters == Counters(sent=1, timed_out=1)


async def test_a_stream_past_its_deadline_tells_what_it_had() -> None:
    with Scripted(letters) as server:
        async with Client(server.endpoint) as client:
            error = await failing(leave_at_end(client.stream("ab.", deadline_ms=400)))
    assert (error.code, error.partial) == ("deadline_exceeded", {"text": "ab", "token_ids": [97, 98]})


@pytest.mark.parametrize("deadline_ms", [0, -5])
async def test_a_deadline_that_has_passed_is_not_sent(deadline_ms: int) -> None:
    with Scripted() as server:
        async with Client(server.endpoint) as client:
            await client.generate("x")
            for model in ("echo", "nobody"):  # with a limiter, and without one
                error = await failing(client.generate("x", model=model, deadline_ms=deadline_ms))
                assert error.code == "deadline_exceeded"
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
            await client.info()
            await failing(client.generate("slow", deadline_ms=50))
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
            reply.text(message["prompt"], later_ms=rng.choice((2, 20, 20, 20, 20, 20)))

    outcomes: dict[str, int] = {"answered": 0, "deadline_exceeded": 0}
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(what))

    async def caller(client: Client, mine: range) -> None:
        for number in mine:
            try:
                answer = await client.generate(str(number), deadline_ms=20)
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


async def test_while_a_model_loads_the_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.scheduler.client.LOADING_AGE_NS_MAX", 0)
    with Scripted(models=[]) as server:
        async with Client(server.endpoint) as client:
            await client.generate("x")  # no limit is known yet
            server.models = [{**MODEL, "concurrency": 1}]
            await client.generate("x")
            await client.ping()  # behind the answer
            assert client.socket.info is not None
            assert client.socket.info.models[0].concurrency == 1
            await client.generate("x")
            asked = len(server.of("info"))
            await client.generate("x")
            assert len(server.of("info")) == asked  # it is known now
