"""The client library against the real router and real workers."""

import asyncio

import anyio
import pytest

from headway import Client, HeadwayError, SyncClient
from headway.scheduler.spec import PolicySpec
from tests.live import Live, echo, live

pytestmark = pytest.mark.anyio

GREEDY = PolicySpec(window="greedy")


async def test_a_time_out_equal_to_the_usual_latency_loses_nothing_at_either_end() -> None:
    with live(echo(fixed_ms=20, max_num_seqs=256), policy=GREEDY) as server:
        async with Client(server.address, concurrency=50, max_retries=0) as client:
            endings: list[str] = []

            async def call(number: int) -> None:
                try:
                    assert await client.call(number, deadline_ms=20) == number, "an answer of another call"
                    endings.append("answered")
                except HeadwayError as error:
                    endings.append(error.code)

            for start in range(0, 2000, 50):
                async with anyio.create_task_group() as tasks:
                    for number in range(start, start + 50):
                        tasks.start_soon(call, number)
            assert len(endings) == 2000
            assert set(endings) <= {"answered", "deadline_exceeded", "deadline_unreachable"}
            books = client.counters
            assert books.sent == books.answered + books.timed_out + books.cancelled
            await client.ping()  # what is before it on the wire has been taken up, and decided in the turn after
            status = (await client.status()).counters
            # one whose time was over when it came is refused at the door, before the core
            assert books.sent == sum(n for name, n in status.items() if name.startswith(("ended.", "refused.")))


async def test_the_advertised_concurrency_is_kept() -> None:
    with live(echo("stream", mode="iteration", fixed_ms=1, max_num_seqs=10), policy=GREEDY) as server:
        async with Client(server.address) as client:
            answers = await asyncio.gather(*(client.generate(f"text {number}") for number in range(40)))
        assert [answer.text for answer in answers] == [f"text {number}" for number in range(40)]
        batches = server.clients[0].status()["batches"]
        assert max(batch["running"] for batch in batches) <= 7
        assert max(answer.timing.queue_ms for answer in answers if answer.timing) < 1000


async def test_a_full_queue_is_tried_again_within_the_deadline() -> None:
    with live(echo(fixed_ms=5), policy=PolicySpec(window="greedy", queue_max=4)) as server:
        async with Client(server.address, concurrency=64) as client:
            answers = await asyncio.gather(*(client.call(number, deadline_ms=20_000) for number in range(64)))
            assert answers == list(range(64))
            assert client.counters.retries > 0


async def test_streams_cancellation_and_info() -> None:
    with live(echo("stream", mode="iteration", fixed_ms=2)) as server:
        async with Client(server.address) as client:
            stream = client.stream("naïve 🙂")
            assert "".join([delta.text async for delta in stream]) == "naïve 🙂" == stream.result.text
            with anyio.move_on_after(0.1):
                await client.generate("x" * 5000, max_new_tokens=5000)
            assert (await client.generate("next")).text == "next"
            status = await client.status()
            assert status.counters["ended.cancelled"] == 1
            assert [worker["running"] for worker in status.workers] == [0]


async def test_the_blocking_client() -> None:
    def blocking(server: Live) -> None:
        with SyncClient(server.address) as client:
            assert client.generate("abc").text == "abc"
            stream = client.stream("xyz")
            assert [delta.text for delta in stream] == ["x", "y", "z"]

    with live(echo("stream", mode="iteration")) as server:
        await asyncio.to_thread(blocking, server)
