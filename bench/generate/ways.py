"""The ways of generating that are compared, each a server or process of its own that stays up for all rounds.

headway goes the whole way: client, router, worker processes. Transformers by itself runs in a process driven through
pipes (`plain`). Other servers speak HTTP and live in virtual environments of their own, because their requirements
exclude each other: a way whose environment is not there is skipped, saying so.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import anyio
import msgspec

from headway.bench.generate.processes import cpu_s, memory_mib
from headway.bench.generate.work import Answer, Done, Job, Run, Work, run_of
from headway.bench.overhead import free_address
from headway.scheduler import clock
from headway.scheduler.client import Client
from headway.scheduler.errors import HeadwayError

START_S_MAX = 600.0
STOP_S_MAX = 20.0
KV_BYTES_SPARE = 1.5  # of the cache over what the work needs

Ask = Callable[[Work], Awaitable[Answer]]


class CannotStartError(Exception):
    """This way is not available here; the text says why."""


class Way(Protocol):
    """`run` gives answers in the order of the work, never more than `concurrency` at once."""

    name: str
    process: "subprocess.Popen[bytes]"

    def run(self, work: Sequence[Work], concurrency: int) -> list[Answer]: ...


def measure(way: Way, work: Sequence[Work], concurrency: int, threads: int) -> tuple[Run, list[Answer]]:
    """One run and its answers."""
    before_s, began_ns = cpu_s(way.process.pid), clock.now_ns()
    answers = way.run(work, concurrency)
    wall_ns, spent_s = clock.now_ns() - began_ns, cpu_s(way.process.pid) - before_s
    return run_of(way.name, concurrency, threads, answers, wall_ns, spent_s, memory_mib(way.process.pid)), answers


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End it, by force if it does not listen."""
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def thread_environment(threads: int) -> dict[str, str]:
    """For a process that computes with `threads` threads."""
    count = str(threads)
    return {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "HF_HUB_OFFLINE": "1"}


async def closed_loop(ask: Ask, work: Sequence[Work], concurrency: int) -> list[Answer]:
    """`concurrency` clients, each sending its next request when its last one is answered."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(work))

    async def client() -> None:
        for at, one in waiting:
            answers[at] = await ask(one)

    async with anyio.create_task_group() as clients:
        for _ in range(concurrency):
            clients.start_soon(client)
    return [answers[at] for at in range(len(work))]


async def until_ready(address: str, process: "subprocess.Popen[bytes]", workers: int) -> None:
    """Wait until `headway serve` in this process has so many workers. Raises CannotStartError."""
    async with Client(address) as client:
        limit_ns = clock.now_ns() + int(START_S_MAX * clock.NS_PER_S)
        while clock.now_ns() < limit_ns and process.poll() is None:
            try:
                if sum(model.workers for model in (await client.info()).models) >= workers:
                    return
            except HeadwayError as error:
                if error.code != "unreachable":
                    raise
            await anyio.sleep(0.2)
    raise CannotStartError("headway serve did not come up; its log is above")


class Headway:
    """`headway serve` with `workers` worker processes of `threads` threads each."""

    def __init__(self, folder: Path, workers: int, threads: int, concurrency: int, kv_mib: int) -> None:
        self.name = "headway"
        self.address = free_address()
        model = {
            "name": "m",
            "engine": "generate",
            "model": str(folder),
            "device": "cpu",
            "dtype": "float32",
            "workers": workers,
            "threads": threads,
            "max_num_seqs": max(2, concurrency),
            "kv_mib": kv_mib,
        }
        config = {
            "bind": self.address,
            "log_level": "warning",
            "policy": {"in_flight_fraction": 1.0},
            "models": [model],
        }
        self._folder = tempfile.TemporaryDirectory(prefix="headway-bench-")
        path = Path(self._folder.name) / "headway.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command = [sys.executable, "-m", "headway", "serve", "--config", str(path)]
        self.process = subprocess.Popen(command, env=environment)
        anyio.run(until_ready, self.address, self.process, workers)

    def run(self, work: Sequence[Work], concurrency: int) -> list[Answer]:
        return anyio.run(self._run, work, concurrency)

    async def _run(self, work: Sequence[Work], concurrency: int) -> list[Answer]:
        async with Client(self.address, concurrency=concurrency) as client:
            return await closed_loop(lambda one: ask(client, one), work, concurrency)


async def ask(client: Client, one: Work) -> Answer:
    """One request, streamed."""
    sent_ns, stamps, tokens = clock.now_ns(), list[int](), list[int]()
    async for delta in client.stream(input_ids=one.ids, max_new_tokens=one.new, temperature=0.0, ignore_eos=True):
        stamps += [clock.now_ns()] * (len(delta.token_ids))
        tokens += delta.token_ids
    return Answer(sent_ns, stamps, tokens)


class Plain:
    """Transformers by itself. `way`: solo, static or continuous; they can share a `process`."""

    def __init__(self, name: str, way: str, process: "subprocess.Popen[bytes]") -> None:
        self.name, self._way, self.process = name, way, process

    def run(self, work: Sequence[Work], concurrency: int) -> list[Answer]:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Job(self._way, list(work), concurrency)) + b"\n")
        self.process.stdin.flush()
        return msgspec.json.decode(_line(self.process), type=Done).answers


def start_plain(folder: Path, threads: int) -> "subprocess.Popen[bytes]":
    """The process for Plain, ready."""
    command = [sys.executable, "-m", "headway.bench.generate.plain", str(folder), str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=thread_environment(threads))
    while _line(process) != b"ready\n":
        pass
    return process


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    """The next line that is for us; libraries may print their own."""
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        if not line:
            raise CannotStartError(f"transformers by itself ended with {process.wait()}; its log is above")
        if line[:1] == b"{" or line == b"ready\n":
            return line


class Http:
    """A server with OpenAI's completions, streamed. `extra`: fields that make it ignore ends of texts."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], port: int, model: str, extra: dict[str, bool]
    ) -> None:
        self.name, self._port, self._model, self._extra = name, port, model, extra
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        asyncio.run(self._until_ready())

    async def _until_ready(self) -> None:
        limit_ns = clock.now_ns() + int(START_S_MAX * clock.NS_PER_S)
        while clock.now_ns() < limit_ns and self.process.poll() is None:
            try:
                await self._ask(Work("hello there", [], 2))
                return
            except (OSError, RuntimeError, ValueError, IndexError):
                await asyncio.sleep(0.5)
        stop(self.process)
        raise CannotStartError(f"{self.name} did not come up (exit code {self.process.returncode})")

    def run(self, work: Sequence[Work], concurrency: int) -> list[Answer]:
        return asyncio.run(closed_loop(self._ask, work, concurrency))

    async def _ask(self, one: Work) -> Answer:
        body = {
            "model": self._model,
            "prompt": one.text,
            "max_tokens": one.new,
            "temperature": 0,
            "stream": True,
            **self._extra,
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        raw = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
        )
        sent_ns, stamps = clock.now_ns(), list[int]()
        writer.write(head.encode() + raw)
        try:
            status = int((await reader.readline()).split()[1])
            if status != 200:
                raise RuntimeError(f"{self.name} answered {status}: {(await reader.read(500))!r}")
            while line := await reader.readline():
                data = line.strip().removeprefix(b"data:").strip()
                if data.startswith(b"{") and any(one.get("text") for one in json.loads(data).get("choices") or ()):
                    stamps.append(clock.now_ns())
        finally:
            writer.close()
        # A piece of text may hold several tokens (bytes of one character): the count is what was asked for.
        if not stamps:
            raise RuntimeError(f"{self.name} streamed nothing")
        return Answer(sent_ns, stamps + [stamps[-1]] * (one.new - len(stamps)))


def vllm(venv: Path, folder: Path, threads: int, concurrency: int, context: int) -> Http:
    """vLLM's CPU build, as its own page advises: tcmalloc and Intel's OpenMP loaded first where they are there."""
    python = _python(venv, "vLLM")
    port = _port()
    libraries = [Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"), venv / "lib" / "libiomp5.so"]
    environment = thread_environment(threads) | {
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    options = ["--dtype", "float32", "--max-num-seqs", str(concurrency), "--max-model-len", str(context)]
    options += ["--max-num-batched-tokens", str(max(1024, context)), "--no-enable-prefix-caching"]
    options += ["--disable-uvicorn-access-log"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "m", *options]
    return Http("vLLM (CPU)", command, environment, port, "m", {"ignore_eos": True})


def transformers_serve(venv: Path, folder: Path, threads: int) -> Http:
    """Transformers' own server with its continuous batching."""
    program = Path(_python(venv, "transformers serve")).with_name("transformers")
    port = _port()
    command = [str(program), "serve", str(folder), "--continuous-batching", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--cb-num-blocks", "256", "--cb-block-size", "64"]
    command += ["--cb-max-batch-tokens", "512"]
    return Http("transformers serve", command, thread_environment(threads), port, str(folder), {})


def endless(folder: Path, into: Path) -> Path:
    """The model of `folder` whose end of text is an id that greedy decoding does not choose, for servers that have no
    switch to ignore it: links, and two files changed."""
    for path in folder.iterdir():
        if path.name in ("config.json", "generation_config.json"):
            config = json.loads(path.read_text())
            vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
            (into / path.name).write_text(json.dumps(config | {"eos_token_id": vocabulary - 1}))
        else:
            (into / path.name).symlink_to(path)
    return into


def _python(venv: Path, name: str) -> str:
    python = venv / "bin" / "python"
    if not python.exists():
        raise CannotStartError(f"{name} is not installed in {venv}")
    return str(python)


def _port() -> int:
    return int(free_address().rpartition(":")[2])
