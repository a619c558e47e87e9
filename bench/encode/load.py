"""Asking a server, closed loop and open loop, over ZeroMQ or HTTP.

A closed loop keeps so many requests in flight. An open loop sends at Poisson times drawn from a seed, whether answers
come or not, so that a slow server does not slow down who asks it. Latency counts from when a text was meant to be sent.
"""

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from headway.scheduler.clock import NS_PER_MS, NS_PER_S, now_ns

ANSWER_S = 60.0  # past that a server counts as stuck


class Asker(Protocol):
    """A connection to one server."""

    async def ask(self, text: str) -> list[float]:
        """The text's vector. Raises RuntimeError for an answer that is none."""

    async def close(self) -> None: ...


class ZmqAsker:
    """One DEALER that speaks protocol 1."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            answer = msgspec.msgpack.decode(await self._socket.recv())
            future = self._waiting.pop(answer["id"], None)
            if future is not None and not future.done():
                future.set_result(answer)

    async def ask(self, text: str) -> list[float]:
        id_ = str(next(self._ids))
        future = self._waiting[id_] = asyncio.get_running_loop().create_future()
        await self._socket.send(msgspec.msgpack.encode({"type": "embed", "id": id_, "text": text}))
        answer = await asyncio.wait_for(future, ANSWER_S)
        if answer["type"] != "result":
            raise RuntimeError(f"the server answered {answer}")
        vector: list[float] = answer["embedding"]
        return vector

    async def close(self) -> None:
        self._reader.cancel()
        self._context.destroy(0)


class HttpAsker:
    """HTTP/1.1 with as many kept connections as there are requests at once. `body` makes a request's JSON, `vector`
    finds the answer in the reply's."""

    def __init__(
        self, port: int, path: str, body: Callable[[str], object], vector: Callable[[Any], list[float]]
    ) -> None:
        self._port, self._path, self._body, self._vector = port, path, body, vector
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, text: str) -> list[float]:
        while self._free and self._free[-1][0].at_eof():  # some servers drop what idles
            self._free.pop()[1].close()
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        try:
            status, reply = await asyncio.wait_for(self._exchange(reader, writer, text), ANSWER_S)
        except BaseException:
            writer.close()
            raise
        self._free.append((reader, writer))
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {reply[:200]!r}")
        return self._vector(json.loads(reply))

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str
    ) -> tuple[int, bytes]:
        body = json.dumps(self._body(text)).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        if "content-length" in fields:
            return int(lines[0].split()[1]), await reader.readexactly(int(fields["content-length"]))
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):  # chunked
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readuntil(b"\r\n")
        return int(lines[0].split()[1]), b"".join(parts)

    async def close(self) -> None:
        for _, writer in self._free:
            writer.close()


class Sample(msgspec.Struct, frozen=True):
    """One measurement: texts a second, and each text's latency in milliseconds. `answered`: texts in all, the warm-up's
    too. `late_ms`: how far behind its own plan an open loop sent, at worst. `cpu_ms`: of the server, for one text.
    `foreign_cores`: what the rest of the machine used meanwhile."""

    server: str
    loop: str
    per_second: float
    latencies_ms: list[float]
    answered: int
    late_ms: float = 0.0
    cpu_ms: float = 0.0
    foreign_cores: float = 0.0


async def closed(asker: Asker, texts: Sequence[str], in_flight: int, warm_s: float, seconds: float) -> Sample:
    """Keep `in_flight` texts with the server for `seconds` after `warm_s`.

    Answers come in bursts, a batch at a time, so the rate is counted from the end of the first burst to the last one.
    """
    begin = now_ns() + int(warm_s * NS_PER_S)
    end = begin + int(seconds * NS_PER_S)
    order = itertools.cycle(texts)
    ended: list[int] = []
    latencies: list[float] = []
    answered = 0

    async def client() -> None:
        nonlocal answered
        while (sent := now_ns()) < end:
            await asker.ask(next(order))
            answered += 1
            if begin <= (came := now_ns()) < end:
                ended.append(came)
                latencies.append((came - sent) / NS_PER_MS)

    await _all([client() for _ in range(in_flight)])
    return Sample("", "closed", _rate(ended) or len(ended) / seconds, latencies, answered)


BURST_NS = 30 * NS_PER_MS


def _rate(ended: Sequence[int]) -> float:
    """Answers a second, of sorted times, from the end of the first burst on; 0 if there was only one."""
    later = [at for at in ended if at > ended[0] + BURST_NS]
    return len(later) * NS_PER_S / (later[-1] - ended[0]) if later else 0.0


async def opened(
    asker: Asker, texts: Sequence[str], per_second: float, warm_s: float, seconds: float, seed: int
) -> Sample:
    """Send at Poisson times, `per_second` on average, for `warm_s`, and then for `seconds` that count."""
    rng = random.Random(seed)
    begin = now_ns()
    counted, end = begin + int(warm_s * NS_PER_S), begin + int((warm_s + seconds) * NS_PER_S)
    latencies: list[float] = []
    tasks: list[Awaitable[None]] = []
    late_ns = 0
    loop = asyncio.get_running_loop()

    async def one(due: int, text: str) -> None:
        await asker.ask(text)
        if due >= counted:
            latencies.append((now_ns() - due) / NS_PER_MS)

    due = begin
    for text in itertools.cycle(texts):
        due += int(rng.expovariate(per_second) * NS_PER_S)
        if due >= end:
            break
        await asyncio.sleep(max(0, due - now_ns()) / NS_PER_S)
        late_ns = max(late_ns, now_ns() - due)
        tasks.append(loop.create_task(one(due, text)))
    await _all(tasks)
    return Sample("", "open", len(latencies) / seconds, latencies, len(tasks), late_ns / NS_PER_MS)


async def _all(jobs: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*jobs)
