"""Replays against a server that speaks the OpenAI HTTP interface: a small one made here, of the standard library."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("httpx")

from headway.bench.replay import job as jobs
from headway.bench.replay.job import Job
from headway.bench.replay.plan import Shot
from headway.bench.replay.player import run
from headway.bench.replay.seen import Seen
from headway.bench.replay.targets import How
from headway.scheduler.config import ConfigError

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Server:
    """HTTP/1.1, a connection for each request. `asked`: the bodies that came, with their path."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            self.asked.append(body | {"path": head.split()[1], "key": fields.get("authorization")})
            await self._answer(body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def play(self, shots: list[Shot], how: How = How(), *, path: str = "", key: str = "") -> list[Seen]:  # noqa: B008
        async def main() -> list[Seen]:
            listening = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            async with listening:
                port = listening.sockets[0].getsockname()[1]
                job = Job(openai=f"http://127.0.0.1:{port}{path}", openai_key=key, how=how)
                seen, watched = await jobs.play(job, shots)
                assert watched is None
            return seen

        return run(main())


def head(writer: asyncio.StreamWriter, status: str = "200 OK", kind: str = "text/event-stream") -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())


def event(writer: asyncio.StreamWriter, value: Any) -> None:
    writer.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\r\n\r\n".encode())


async def tokens(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """As many as were asked for, with usage at the end."""
    head(writer)
    writer.write(b": a comment\r\n\r\n")
    event(writer, {"choices": [{"text": ""}]})
    for place in range(body["max_tokens"]):
        event(writer, {"choices": [{"text": f" {place}"}], "usage": None})
        await writer.drain()
        await asyncio.sleep(0)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    event(writer, {"choices": [], "usage": usage})
    event(writer, "[DONE]")


def load(count: int = 5, **keys: Any) -> list[Shot]:
    return [Shot(index, index * 1_000_000, 7 + index, 1 + index, "generate", **keys) for index in range(count)]


def test_completions_are_streamed() -> None:
    server = Server(tokens)
    seen = server.play(load(tenant="me"), How(model="m", temperature=0.0), key="secret")
    assert [(one.code, one.input, one.output) for one in seen] == [("ok", 7 + i, 1 + i) for i in range(5)]
    assert all(one.sent_ns < one.first_ns <= one.last_ns <= one.done_ns for one in seen)
    asked = sorted(server.asked, key=lambda body: len(body["prompt"]))
    assert [len(body["prompt"]) for body in asked] == [7, 8, 9, 10, 11]
    first = asked[0]
    assert (first["path"], first["key"], first["model"]) == ("/v1/completions", "bearer secret", "m")
    assert (first["max_tokens"], first["ignore_eos"], first["stream"], first["user"]) == (1, True, True, "me")
    assert first["stream_options"] == {"include_usage": True}


def test_chats_are_text() -> None:
    async def chat(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        head(writer)
        event(writer, {"choices": [{"delta": {"role": "assistant"}}]})
        event(writer, {"choices": [{"delta": {"content": "a"}}]})
        event(writer, {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]})
        event(writer, "[DONE]")

    server = Server(chat)
    seen = server.play(load(1), How(tokenizer="bytes", ignore_eos=False), path="/v1/chat/completions")
    assert [(one.code, one.output) for one in seen] == [("ok", 2)]
    assert len(server.asked[0]["messages"][0]["content"]) == 7
    assert "ignore_eos" not in server.asked[0]
    with pytest.raises(ConfigError, match="chats are text"):
        server.play(load(1), path="/v1/chat/completions")


def test_an_answer_in_one_piece() -> None:
    async def whole(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        assert not body["stream"]
        head(writer, kind="application/json")
        writer.write(json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode())

    [one] = Server(whole).play(load(1), How(stream=False), path="/v1/")
    assert (one.code, one.output, one.first_ns) == ("ok", 3, 0)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("429 Too Many Requests", "http_429"),
        ("500 Oh", "http_500"),
        ("200 OK", "internal"),
        ("", "unreachable"),
    ],
)
def test_bad_endings(said: str, code: str) -> None:
    async def bad(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if said:
            head(writer, said)
            writer.write(b'data: {"choices": [{"text": "x"}]}\r\n\r\n')  # and no [DONE]

    [one] = Server(bad).play(load(1))
    assert one.code == code


def test_an_error_inside_a_stream_and_what_is_no_json() -> None:
    async def broken(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        head(writer)
        event(writer, {"error": {"message": "out of memory"}} if body["max_tokens"] == 1 else "{")

    seen = Server(broken).play(load(2))
    assert [(one.code, "out of memory" in one.message) for one in seen] == [("engine_error", True), ("internal", False)]


def test_deadlines_and_cancels_leave_the_connection() -> None:
    left = []

    async def silent(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        head(writer)
        event(writer, {"choices": [{"text": "x"}]})
        await writer.drain()
        try:
            while True:  # until the other side is gone
                writer.write(b": wait\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            left.append(1)

    shots = [Shot(0, 0, 5, 5, "generate", deadline_ms=700), Shot(1, 0, 5, 5, "generate", cancel_ms=700)]
    seen = Server(silent).play(shots)
    assert [one.code for one in seen] == ["deadline_exceeded", "cancelled"]
    assert all(one.first_ns for one in seen)
    assert len(left) == 2


def test_other_kinds_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="an OpenAI-compatible target generates"):
        Server(tokens).play([Shot(0, 0, 5, 0, "embed")])
