"""A target that speaks the OpenAI HTTP interface, as vLLM, SGLang, TGI and others do: completions, streamed as SSE.

Only what is common to them is relied upon. Prompts go as token ids, which these servers take in `prompt`; the chat
interface takes text alone. `ignore_eos` is an extension that most of them know. Usage is asked for with the stream; a
server that does not send it has its pieces counted. Needs httpx, an extra.
"""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anyio

from headway.bench.replay import prompts
from headway.bench.replay.plan import Shot
from headway.bench.replay.seen import Note
from headway.bench.replay.targets import How
from headway.scheduler.config import ConfigError
from headway.scheduler.errors import HeadwayError

if TYPE_CHECKING:
    import httpx

ERROR_CHARS_MAX = 200  # of a server's own words
DONE = "[DONE]"


def needs_httpx() -> Any:
    """The library. Raises ConfigError without it."""
    try:
        import httpx
    except ImportError:
        raise ConfigError("an OpenAI-compatible target needs httpx: pip install 'headway[bench]'") from None
    return httpx


class OpenAI:
    """`url`: with or without `/v1`; with `/chat/completions` at its end, chats are sent. `key`: the bearer token."""

    slow = True  # what is not read stays in the connection

    def __init__(self, client: "httpx.AsyncClient", url: str, how: How, key: str = "") -> None:
        self._client = client
        base = url.rstrip("/")
        self._chat = base.endswith("/chat/completions")
        if not base.endswith("/completions"):
            base = f"{base}/completions" if base.endswith("/v1") else f"{base}/v1/completions"
        self._url = base
        self._how = how
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._text = prompts.texts(how.tokenizer, how.seed) if how.tokenizer else None
        if self._chat and self._text is None:
            raise ConfigError("chats are text: give --prompts text and the model's --tokenizer")

    def load(self, shot: Shot) -> bytes:
        """The request's body."""
        if shot.kind != "generate":
            raise ConfigError(f"an OpenAI-compatible target generates; the load has requests of kind {shot.kind!r}")
        tokens = max(1, shot.tokens)
        how = self._how
        body: dict[str, Any] = {"max_tokens": max(1, shot.max_new), "stream": how.stream}
        if how.model:
            body["model"] = how.model
        if self._text is not None:
            text = self._text(shot.index, tokens)
            body |= {"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}
        else:
            body["prompt"] = shot.ids if shot.ids is not None else prompts.ids(shot.index, tokens, how.seed)
        if how.stream:
            body["stream_options"] = {"include_usage": True}
        if how.ignore_eos:
            body["ignore_eos"] = True
        if how.temperature is not None:
            body["temperature"] = how.temperature
        if shot.tenant:
            body["user"] = shot.tenant
        return json.dumps(body).encode()

    async def fire(self, shot: Shot, ready: object, left_ms: int | None, note: Note) -> None:
        assert isinstance(ready, bytes)
        httpx = needs_httpx()
        with anyio.move_on_after(None if left_ms is None else left_ms / 1000):
            try:
                await self._ask(shot, ready, note)
            except httpx.HTTPError as error:
                text = str(error) or type(error).__name__
                raise HeadwayError("unreachable", f"{self._url}: {text[:ERROR_CHARS_MAX]}") from None
            return
        note.over("deadline_exceeded", f"no whole answer within {shot.deadline_ms} ms")

    async def _ask(self, shot: Shot, body: bytes, note: Note) -> None:
        async with self._client.stream("POST", self._url, content=body, headers=self._headers) as answer:
            if answer.status_code != 200:
                said = (await answer.aread())[:ERROR_CHARS_MAX].decode(errors="replace")
                note.over(f"http_{answer.status_code}", said)
                return
            if not self._how.stream:
                self._whole(json.loads(await answer.aread()), note)
                return
            pause_s = self._how.slow_ms / 1000 if shot.slow else 0.0
            async for event in _events(answer):
                if pause_s:
                    await anyio.sleep(pause_s)
                if event == DONE:
                    return
                if not self._piece(event, note):
                    return
        note.over("internal", "the stream ended without [DONE]")

    def _piece(self, text: str, note: Note) -> bool:
        """One event of a stream. Whether the answer can still end well."""
        try:
            event = json.loads(text)
        except ValueError:
            note.over("internal", f"an event is not JSON: {text[:ERROR_CHARS_MAX]}")
            return False
        if event.get("error"):
            note.over("engine_error", str(event["error"])[:ERROR_CHARS_MAX])
            return False
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            note.tokens(bool(choice.get("text") or delta.get("content")))
        _use(event.get("usage"), note)
        return True

    def _whole(self, answer: dict[str, Any], note: Note) -> None:
        _use(answer.get("usage"), note)


def _use(usage: dict[str, Any] | None, note: Note) -> None:
    """The server's own counts."""
    if usage:
        note.seen.input = int(usage.get("prompt_tokens") or note.seen.input)
        note.seen.output = int(usage.get("completion_tokens") or 0)


async def _events(answer: "httpx.Response") -> AsyncIterator[str]:
    """The data of server-sent events. Source: WHATWG HTML, 9.2.6."""
    data: list[str] = []
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)
