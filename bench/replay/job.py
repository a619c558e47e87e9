"""A whole replay: open the target, play, look at the server meanwhile; in this process or in several.

Several processes share the steady clock of the machine: each takes every n-th shot, says when it is ready, and is told
when time 0 is. They are handed their part as msgpack on standard input and answer on standard output; nothing is
pickled. One of them dying ends the replay with an error: half a load is another load.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec
from anyio.abc import Process

from headway.bench.replay.openai import OpenAI, needs_httpx
from headway.bench.replay.plan import Shot
from headway.bench.replay.player import Player, Told
from headway.bench.replay.seen import Seen
from headway.bench.replay.targets import Headway, How, Impatient, SlowLines, Target
from headway.bench.replay.watch import Watch, Watched
from headway.scheduler import clock, wire
from headway.scheduler.client import Client
from headway.scheduler.config import ConfigError
from headway.scheduler.embedded import Scheduler
from headway.scheduler.errors import HeadwayError
from headway.scheduler.spec import ServerSpec
from headway.workers.heart import die_with_parent

LEAD_NS = 200 * clock.NS_PER_MS  # from "all are ready" to time 0
LOOK_S = 0.2  # between two looks whether a model is loaded


class Job(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where to and how: exactly one of `connect`, `openai` and an embedded scheduler's settings. `clients` > 0: a
    closed loop."""

    connect: str = ""
    server_key: str = ""
    timeout_ms: int = 5_000
    openai: str = ""
    openai_key: str = ""
    how: How = How()
    concurrency: int = 0
    clients: int = 0
    think_ns: int = 0
    seed: int = 0


@asynccontextmanager
async def opened(job: Job, spec: ServerSpec | None) -> AsyncIterator[tuple[Target, Client | None]]:
    """The target, and a client that can ask headway how it is, if it is headway. Raises HeadwayError."""
    async with AsyncExitStack() as stack:
        if spec is not None:
            keys = {name: getattr(spec, name) for name in spec.model_fields_set - {"models", "policy", "bind"}}
            scheduler = await stack.enter_async_context(Scheduler(models=spec.models, policy=spec.policy, **keys))
            yield Headway(scheduler, job.how), scheduler
        elif job.openai:
            httpx = needs_httpx()
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            client = await stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=None))
            yield OpenAI(client, job.openai, job.how, job.openai_key), None
        else:
            key = job.server_key or None
            line = await stack.enter_async_context(
                Impatient(job.connect, curve_server_key=key, timeout_ms=job.timeout_ms, max_retries=0)
            )
            slow = SlowLines(job.connect, key.encode() if key else None, job.how.slow_ms)
            stack.callback(slow.close)
            yield Headway(line, job.how, slow=slow), line


async def play(
    job: Job,
    shots: Sequence[Shot],
    *,
    spec: ServerSpec | None = None,
    told: Told | None = None,
    started: Callable[[int], None] | None = None,
) -> tuple[list[Seen], Watched | None]:
    """In this process. Interrupted, it gives up what is under way, and returns what has ended. `started` is told when
    its time 0 will be, on the steady clock."""
    async with opened(job, spec) as (target, client):
        check(target, shots)
        if client is not None:
            await until_served(client, job, shots)
        start_ns = clock.now_ns() + LEAD_NS
        if started is not None:
            started(start_ns)
        player = Player(target, start_ns, concurrency=job.concurrency, told=told, seed=job.seed)
        async with watching(client, start_ns) as watch:
            seen = await _until_interrupted(player, job, shots)
        return seen, watch.found if watch is not None else None


async def kind_of(client: Client, job: Job) -> str:
    """What the wanted model does; of several, the first. Raises HeadwayError."""
    return (await _served(client, job, None))[0].kind


async def until_served(client: Client, job: Job, shots: Sequence[Shot]) -> None:
    """Wait for the models that the shots need. Raises HeadwayError."""
    await _served(client, job, {shot.kind for shot in shots})


async def _served(client: Client, job: Job, kinds: set[str] | None) -> list[wire.ModelInfo]:
    """The models of the wanted name, once all these kinds are among them (None: any). A server listens before its
    models are loaded, so they are waited for. Raises HeadwayError `no_worker` after `timeout_ms`."""
    until_ns = clock.now_ns() + job.timeout_ms * clock.NS_PER_MS
    while True:
        models = (await client.info()).models
        served = [model for model in models if model.workers and job.how.model in ("", model.name)]
        missing = (kinds or set()) - {model.kind for model in served}
        if served and not missing:
            return served
        if clock.now_ns() > until_ns:
            name = f" called {job.how.model!r}" if job.how.model else ""
            text = f"no model{name} that serves {', '.join(sorted(missing)) or 'anything'} within {job.timeout_ms} ms"
            raise HeadwayError("no_worker", f"{text}; --timeout-ms waits longer")
        await anyio.sleep(LOOK_S)


def check(target: Target, shots: Sequence[Shot]) -> None:
    """That the target can do what the load asks for, before anything is sent. Raises ConfigError."""
    for shot in {shot.kind: shot for shot in shots}.values():
        target.load(shot)
    if not target.slow and any(shot.slow for shot in shots):
        raise ConfigError("slow readers need a connection that can be read slowly; an embedded scheduler has none")


async def _until_interrupted(player: Player, job: Job, shots: Sequence[Shot]) -> list[Seen]:
    """All shots; those that have ended, if the task is cancelled before."""
    try:
        if job.clients:
            return await player.play_closed(shots, job.clients, job.think_ns)
        return await player.play(shots)
    except asyncio.CancelledError:
        return [one for one in player.seen if one.code]


@asynccontextmanager
async def watching(client: Client | None, start_ns: int) -> AsyncIterator[Watch | None]:
    """Looks at the server inside the block, and once more at its end."""
    if client is None:
        yield None
        return
    watch = Watch(client, start_ns)
    await watch.begin()
    looking = asyncio.create_task(watch.run())
    try:
        yield watch
        await watch.look()
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


# ---------------------------------------------------------------- several processes


class Part(msgspec.Struct, frozen=True):
    """What a process is handed."""

    job: Job
    shots: list[Shot]


READY, PLAYED, FAILED = "ready", "played", "failed"


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process says: that it is ready, what it saw, or what went wrong."""

    what: str
    seen: list[Seen] = []
    code: str = ""
    message: str = ""


async def play_in(processes: int, job: Job, shots: Sequence[Shot]) -> tuple[list[Seen], Watched | None]:
    """In so many processes. Interrupted, it has each give up what is under way, and returns what has ended. Raises
    HeadwayError, also if one of them dies."""
    parts = [list(shots[index::processes]) for index in range(processes)]
    share = msgspec.structs.replace(job, concurrency=-(-job.concurrency // processes))
    async with AsyncExitStack() as stack:
        target_client = (
            None
            if job.openai
            else await stack.enter_async_context(
                Impatient(
                    job.connect, curve_server_key=job.server_key or None, timeout_ms=job.timeout_ms, max_retries=0
                )
            )
        )
        if target_client is not None:
            await until_served(target_client, job, shots)
        children = []
        for index, part in enumerate(parts):
            clients = len(range(index, job.clients, processes)) if job.clients else 0
            if not part or (job.clients and not clients):
                continue
            process = await anyio.open_process([sys.executable, "-m", __name__], stderr=None, start_new_session=True)
            child = _Child(process)
            stack.push_async_callback(child.end)
            await child.say(Part(msgspec.structs.replace(share, clients=clients, seed=job.seed + index), part))
            children.append(child)
        for child in children:
            await child.hear(READY)
        start_ns = clock.now_ns() + LEAD_NS
        async with watching(target_client, start_ns) as watch:
            for child in children:
                await child.say(start_ns)
            try:
                words = [await child.hear(PLAYED) for child in children]
            except asyncio.CancelledError:
                for child in children:
                    child.interrupt()
                words = [await child.hear(PLAYED) for child in children]
        seen = [one for word in words for one in word.seen]
        seen.sort(key=lambda one: one.due_ns)
        return seen, watch.found if watch is not None else None


class _Child:
    """One process of a replay. Messages are msgpack behind their length in 8 bytes. It is in a session of its own, so
    that Ctrl-C reaches it through this process alone, and once."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._data = bytearray()  # what has come: hearing may be cancelled, and goes on after it
        self._heard: dict[str, Word] = {}

    async def say(self, value: object) -> None:
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(framed(value))
        except (anyio.BrokenResourceError, OSError):
            raise HeadwayError("internal", "a process of the replay has died") from None

    async def hear(self, what: str) -> Word:
        """Its next word; one that was heard already, again."""
        if what in self._heard:
            return self._heard[what]
        assert self._process.stdout is not None
        data = self._data
        try:
            while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8]):
                data += await self._process.stdout.receive()
        except anyio.EndOfStream:
            raise HeadwayError("internal", "a process of the replay has died") from None
        word = msgspec.msgpack.decode(bytes(data[8:]), type=Word)
        data.clear()
        if word.what != what:
            raise HeadwayError(word.code, word.message)
        self._heard[what] = word
        return word

    def interrupt(self) -> None:
        """As Ctrl-C would."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        with anyio.CancelScope(shield=True):
            await self._process.aclose()


def framed(value: object) -> bytes:
    """A message between processes."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(8) + body


def _heard(kind: Any) -> Any:
    length = int.from_bytes(sys.stdin.buffer.read(8))
    return msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=kind)


def main() -> None:
    """One process of several."""
    from headway.bench.replay.player import run

    part: Part = _heard(Part)

    async def work() -> list[Seen]:
        async with opened(part.job, None) as (target, _):
            _say(Word(READY))
            start_ns: int = await anyio.to_thread.run_sync(_heard, int)
            player = Player(target, start_ns, concurrency=part.job.concurrency, seed=part.job.seed)
            return await _until_interrupted(player, part.job, part.shots)

    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever started the replay ignores it
    try:
        _say(Word(PLAYED, run(work())))
    except HeadwayError as error:
        _say(Word(FAILED, code=error.code, message=error.message))
    except ConfigError as error:
        _say(Word(FAILED, code="invalid_request", message=str(error)))


def _say(word: Word) -> None:
    sys.stdout.buffer.write(framed(word))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
