"""The embedded scheduler: real worker processes, no socket towards the caller, and nothing of the host is touched."""

import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import psutil
import pytest

import headway
from headway import HeadwayError, ModelSpec, PolicySpec, Scheduler

pytestmark = pytest.mark.anyio

ECHO = ModelSpec(name="echo", engine="echo")
STREAM = ModelSpec(name="stream", engine="echo", options={"mode": "iteration", "fixed_ms": 2})


async def test_generate_stream_call_and_questions() -> None:
    async with Scheduler(models=[ECHO, STREAM], log_level="warning") as s:
        answer = await s.generate("naïve 🙂")
        assert (answer.text, answer.finish_reason, answer.model) == ("naïve 🙂", "stop", "stream")
        stream = s.stream("abc")
        assert [delta.text async for delta in stream] == ["a", "b", "c"]
        assert stream.result.text == "abc"
        assert await s.call({"a": [1, None]}) == {"a": [1, None]}
        assert {model.name for model in (await s.info()).models} == {"echo", "stream"}
        status = await s.status(batches=8)
        assert status.counters["ended.ok"] == 3
        assert len(status.batches) == 3
        assert await s.ping() >= 0
        assert s.counters.sent == s.counters.answered == 3


async def test_many_callers_share_batches() -> None:
    slow = ModelSpec(name="echo", engine="echo", options={"fixed_ms": 20})
    async with Scheduler(models=[slow], policy=PolicySpec(window="greedy"), log_level="warning") as s:
        answers = await asyncio.gather(*(s.call(number) for number in range(64)))
        assert answers == list(range(64))
        assert max(batch["size"] for batch in (await s.status(batches=64)).batches) == 32


async def test_cancelling_the_caller_cancels_the_request() -> None:
    async with Scheduler(models=[STREAM], log_level="warning") as s:
        with anyio.move_on_after(0.1):
            await s.generate("x" * 5000, max_new_tokens=5000)
        stream = s.stream("y" * 5000, max_new_tokens=5000)
        async for _ in stream:
            break
        stream.close()
        assert (await s.generate("next")).text == "next"
        status = await s.status()
        assert status.counters["ended.cancelled"] == 2
        assert [worker["running"] for worker in status.workers] == [0]


async def test_errors_are_the_clients_errors() -> None:
    async with Scheduler(models=[STREAM], log_level="warning") as s:
        with pytest.raises(HeadwayError) as caught:
            await s.generate("")
        assert (caught.value.code, caught.value.field) == ("invalid_request", "prompt")
        with pytest.raises(HeadwayError) as caught:
            await s.generate("x", temperature=float("nan"))
        assert caught.value.field == "params.temperature"
        with pytest.raises(HeadwayError) as caught:
            await s.generate("x" * 2000, max_new_tokens=2000, deadline_ms=150)
        assert caught.value.code == "deadline_exceeded"
        with pytest.raises(HeadwayError) as caught:
            await s.embed("x")
        assert caught.value.code == "unknown_model"


async def test_a_model_that_cannot_be_loaded_is_said_at_once() -> None:
    with pytest.raises(HeadwayError, match="cannot load") as caught:
        async with Scheduler(models=[ModelSpec(name="m", engine="no_such_module:thing")], log_level="error"):
            pass
    assert caught.value.code == "no_worker"


async def test_drain_finishes_what_is_here_and_refuses_what_comes() -> None:
    async with Scheduler(models=[STREAM], log_level="warning") as s:
        running = asyncio.create_task(s.generate("x" * 50))
        await asyncio.sleep(0)
        draining = asyncio.create_task(s.drain(10_000))
        await asyncio.sleep(0)
        with pytest.raises(HeadwayError) as caught:
            await s.generate("late")
        assert caught.value.code == "shutting_down"
        assert (await running).text == "x" * 50
        await draining


async def test_a_killed_worker_costs_nobody_an_answer() -> None:
    slow = ModelSpec(name="echo", engine="echo", options={"fixed_ms": 200})
    async with Scheduler(models=[slow], log_level="error") as s:
        answers = [asyncio.create_task(s.call(number)) for number in range(5)]
        await asyncio.sleep(0)
        pid = (await s.status()).workers[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        assert [await answer for answer in answers] == list(range(5))


def footprint() -> tuple[Any, ...]:
    """What a library could leave behind in its host."""
    gc.collect()
    process = psutil.Process()
    return (
        threading.active_count(),
        process.num_fds(),
        len(process.children(recursive=True)),
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        logging.getLogger().handlers[:],
        logging.getLogger().level,
        warnings.filters[:],
        dict(os.environ),
        gc.get_threshold(),
        random.getstate(),
    )


def five_rounds() -> None:
    async def once() -> None:
        async with Scheduler(models=[ECHO], log_level="error") as s:
            assert await s.call(1) == 1

    for _ in range(5):
        anyio.run(once)


def in_a_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("place", [lambda work: work(), in_a_thread], ids=["main thread", "other thread"])
def test_five_starts_and_stops_leave_the_host_as_it_was(place: Callable[[Callable[[], None]], None]) -> None:
    def mine(number: int, frame: object) -> None:
        """The host's own handler."""

    before_handler = signal.signal(signal.SIGTERM, mine)
    try:
        five_rounds()  # what is loaded once, lazily, is loaded now
        before = footprint()
        place(five_rounds)
        after = footprint()
        assert after == before
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before_handler)


def test_importing_headway_is_cheap_and_starts_nothing() -> None:
    code = (
        "import sys, threading, headway;"
        "print(sorted({'torch', 'transformers', 'zmq', 'numpy'} & set(sys.modules)), threading.active_count())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["[]", "1"]
    assert set(headway.__all__) <= set(dir(headway)) | set(headway._HOMES)
    assert all(getattr(headway, name) for name in headway.__all__)


async def test_after_a_drain_everything_is_refused_and_nothing_hangs() -> None:
    async with Scheduler(models=[ECHO], log_level="warning") as s:
        await s.drain(1000)
        await s.drain(1000)
        with pytest.raises(HeadwayError) as caught:
            await s.call(1)
        assert caught.value.code == "shutting_down"
