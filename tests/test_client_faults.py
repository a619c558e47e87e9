"""The client, a server out of order, and connections that come and go."""

import asyncio
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from headway.scheduler import wire
from headway.scheduler.client import Client
from headway.scheduler.client_types import Counters
from headway.scheduler.errors import HeadwayError
from tests.scripted import (
    MODEL,
    Message,
    Reply,
    Scripted,
    balanced,
    echo,
    failing,
    failing_first,
    given_back,
    held,
    silent,
)

pytestmark = pytest.mark.anyio


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
            await client.socket.until_connected(5000)
            async with anyio.create_task_group() as group:
                for _ in range(3000):
                    group.start_soon(client.generate, "x" * 6000)
                await anyio.wait_all_tasks_blocked()
                error = await failing(client.generate("impatient", deadline_ms=50))
                assert "deadline_ms (50)" in error.message
                assert client.counters.sent < 3000  # the mark was hit
                server.resume()
            assert client.counters.answered == 3000
            assert client.counters == Counters(sent=3000, answered=3000)
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
                    await again.until(lambda: bool(again.of("info")))  # it may be another server by now
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
    calls = 2000
    with Scripted(reading=False, rcvhwm=1) as server:
        async with Client(server.endpoint, concurrency=calls) as client:
            await client.socket.until_connected(5000)
            async with anyio.create_task_group() as group:
                for _ in range(calls):
                    group.start_soon(client.generate, "x" * 10_000)
                await anyio.wait_all_tasks_blocked()
                assert 0 < client.counters.live < calls  # some are with libzmq, some wait for it
                server.stop()
                with Scripted(endpoint=server.endpoint) as again:
                    await again.until(lambda: len(again.of("generate")) >= calls)
                    await client.ping()
            assert len({message["id"] for message in again.of("generate")}) == len(again.of("generate")) == calls
            books = client.counters
            assert books.sent == books.answered + books.lost
            assert (books.answered, books.late) == (calls, 0)
            assert books.lost > 0


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
            assert client.socket._monitor.poll(5000)  # libzmq knows of the loss; the loop has not run since
            with Scripted(endpoint=server.endpoint):
                mailbox = client.socket.start("1", wire.Ping(id="1"))
                asyncio.get_running_loop().call_soon(client.socket._turn)  # polling has taken the signal away
                assert isinstance(await mailbox.take(), wire.Pong)
                client.socket.finish(mailbox)


async def test_closing_soon_after_a_loss() -> None:
    with Scripted(silent) as server:
        async with Client(server.endpoint, max_retries=0) as client:
            task = asyncio.create_task(client.generate("x"))
            await server.until(lambda: len(server.of("generate")) == 1)
            server.stop()
            await failing(task)
            reopening = client.socket._reopening
            assert reopening is not None
        assert reopening.cancelled()


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
