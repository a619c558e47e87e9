"""The blocking client: from any thread, several at once, and without a trace after it is closed."""

import gc
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from headway.scheduler.errors import HeadwayError
from headway.scheduler.sync_client import SyncClient
from tests.scripted import MODEL, Message, Reply, Scripted, given_back, held


def answer(reply: Reply, message: Message) -> None:
    """Echo a prompt, in pieces if asked for; say nothing to one that begins with a dot."""
    kind = message["type"]
    if kind == "generate" and not message["prompt"].startswith("."):
        text = message["prompt"]
        for seq, letter in enumerate(text if message.get("stream") else ""):
            reply.send("delta", seq=seq, token_ids=[ord(letter)], text=letter)
        if not text.endswith("."):
            reply.text(text)
    elif kind == "embed":
        reply.send("result", embedding=[1.0])
    elif kind == "classify":
        reply.send("result", scores={"a": 1.0})
    elif kind == "score":
        reply.send("result", scores={"score": 0.5})
    elif kind == "call":
        reply.send("result", value=message["payload"])
    elif kind == "status":
        reply.send("status", state="serving", uptime_s=1.0, counters={}, lanes=[], workers=[], batches=[])


def test_every_method() -> None:
    with Scripted(answer) as server, SyncClient(server.endpoint, tenant="t") as client:
        assert client.generate("hi", max_new_tokens=3).text == "hi"
        stream = client.stream("abc")
        assert [delta.text for delta in stream] == ["a", "b", "c"]
        assert stream.result.text == "abc"
        assert client.embed("x").vector == (1.0,)
        assert client.classify("x").label == "a"
        assert client.score("x", "y").score == 0.5
        assert client.call({"x": (1, 2)}, tokens=3) == {"x": [1, 2]}
        assert client.info().models[0].name == "echo"
        assert client.status().state == "serving"
        assert client.ping() > 0
        assert client.counters.answered == 6
        assert client.late == 0
        assert repr(client).startswith(f"<SyncClient {server.endpoint}")
    assert server.of("generate")[0]["tenant"] == "t"


def test_errors_come_out_as_they_are() -> None:
    with Scripted(answer) as server, SyncClient(server.endpoint) as client:
        with pytest.raises(HeadwayError, match="deadline_exceeded"):
            client.generate(".", deadline_ms=10)
        with pytest.raises(TypeError, match="payload: a set cannot be sent"):
            client.call({1})
        with pytest.raises(HeadwayError, match=r"params\.top_k"):
            client.stream("x", top_k=-1)
    with pytest.raises(RuntimeError, match="with SyncClient"):
        client.ping()
    with pytest.raises(ValueError, match="endpoint"):
        SyncClient("nonsense")
    with SyncClient("tcp://127.0.0.1:9", timeout_ms=50) as client, pytest.raises(HeadwayError, match="unreachable"):
        client.ping()


def test_many_threads_at_once_get_their_own_answers() -> None:
    with Scripted(answer, models=[{**MODEL, "concurrency": 4}]) as server, SyncClient(server.endpoint) as client:

        def ask(number: int) -> bool:
            text = f"t{number}"
            if number % 4 == 0:
                return "".join(delta.text for delta in client.stream(text)) == text
            return client.generate(text).text == text

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(ask, range(400)))
        assert client.counters.answered == 400


def test_leaving_a_stream_cancels_its_request() -> None:
    with Scripted(answer) as server, SyncClient(server.endpoint, concurrency=1) as client:
        for delta in client.stream("abc."):
            assert delta.text == "a"
            break
        server.wait(lambda: len(server.of("cancel")) == 1)
        with client.stream("abc.") as stream:
            assert next(iter(stream)).seq == 0
        server.wait(lambda: len(server.of("cancel")) == 2)
        assert client.generate("free again").text == "free again"


def test_an_interrupted_wait_cancels_the_request() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals go to the main thread")
    main = threading.main_thread().ident
    assert main is not None

    def script(_reply: Reply, message: Message) -> None:
        if message["type"] == "generate":
            signal.pthread_kill(main, signal.SIGINT)

    with Scripted(script) as server, SyncClient(server.endpoint) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate("x")
        server.wait(lambda: len(server.of("cancel")) == 1)


def test_closing_ends_the_calls_of_other_threads() -> None:
    with Scripted(answer) as server, ThreadPoolExecutor(4) as pool:
        client = SyncClient(server.endpoint)
        with client:
            calls = [pool.submit(client.generate, ".") for _ in range(4)]
            server.wait(lambda: len(server.of("generate")) == 4)
        for call in calls:
            with pytest.raises(HeadwayError, match="cancelled: the client was closed"):
                call.result()
        client.close()


def rounds(endpoint: str, times: int) -> None:
    for _ in range(times):
        with SyncClient(endpoint) as client:
            assert client.generate("x").text == "x"
            stream = client.stream("ab.")
            assert next(iter(stream)).text == "a"
    gc.collect()


def in_this_thread(work: Callable[[], None]) -> None:
    work()


def in_another_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("where", [in_this_thread, in_another_thread])
def test_a_host_is_as_it_was_before(where: Callable[[Callable[[], None]], None]) -> None:
    """Public report B66: threads, files, signal handlers, logging, environment and random state."""

    def host() -> tuple[object, ...]:
        logger = logging.getLogger()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        return handlers, list(logger.handlers), logger.level, dict(os.environ), random.getstate()

    with Scripted(answer) as server:
        rounds(server.endpoint, 1)
        before, count = host(), held()
        where(lambda: rounds(server.endpoint, 5))
        assert host() == before
        assert given_back(count), f"{count} before, {held()} after"
