"""Which servers there are, how each is started, and how it is asked.

headway and the two floors run in this environment. The peers run in their own, one virtual environment each under a
folder: `NAME/bin/python` (made with `python3 -m venv FOLDER/mosec`, then `FOLDER/mosec/bin/pip install mosec torch
transformers`; `litserve` likewise; for `infinity` install `infinity-emb[torch,server]`). One that is not there, or does
not come up, is left out, and it is said why.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headway.bench.encode.load import Asker, HttpAsker, ZmqAsker
from headway.bench.overhead import free_address
from headway.scheduler import clock

PEERS = Path(os.environ.get("HEADWAY_PEERS", "~/.cache/headway-peers/venvs"))
HERE = Path(__file__).parent / "peers"
START_S = 120
STOP_S = 10
MAX_BATCH = 32
MAX_WAIT_MS = 5

CONFIG = """
bind: {address}
log_level: warning
models:
  - {{name: minilm, engine: embed, model: minilm, device: cpu, workers: 1, threads: {threads}, max_batch: 32}}
"""


class Kind(msgspec.Struct, frozen=True):
    """One kind of server. `command` takes (address, port, python of its environment) and says what to run."""

    name: str
    label: str
    command: Callable[[str, str, str], Sequence[str]]
    asker: Callable[[str, int], Asker]
    venv: str = ""  # the name of its environment; "": this one


class Server(msgspec.Struct, frozen=True):
    """One that runs."""

    kind: Kind
    address: str
    process: psutil.Process

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def asker(self) -> Asker:
        """A new connection; made inside a running loop."""
        return self.kind.asker(self.address, self.port)

    def cpu_s(self) -> float:
        """CPU time that it and its children have used."""
        total = 0.0
        for process in [self.process, *self.process.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total


def _http(
    path: str, body: Callable[[str], object], vector: Callable[[Any], list[float]]
) -> Callable[[str, int], Asker]:
    return lambda _, port: HttpAsker(port, path, body, vector)


def _infinity(_address: str, port: str, python: str) -> Sequence[str]:
    flags = "--engine torch --device cpu --dtype float32 --no-bettertransformer --no-compile --no-model-warmup"
    program = str(Path(python).with_name("infinity_emb"))
    where = ["--model-id", os.environ["MODEL"], "--served-model-name", "minilm", "--host", "127.0.0.1", "--port", port]
    return [program, "v2", *where, "--batch-size", str(MAX_BATCH), "--log-level", "warning", *flags.split()]


def kinds(config: Path) -> tuple[Kind, ...]:
    """All kinds; headway reads `config`."""
    here = [sys.executable, "-m"]
    zmq = lambda address, _: ZmqAsker(address)  # noqa: E731

    def floor(way: str) -> Callable[[str, str, str], Sequence[str]]:
        return lambda address, *_: [*here, "headway.bench.encode.plain", way, address]

    plain = _http("/predict", lambda text: {"text": text}, lambda answer: answer["y"])
    return (
        Kind("headway", "headway", lambda *_: [*here, "headway", "serve", "--config", str(config)], zmq),
        Kind("single", "one at a time", floor("single"), zmq),
        Kind("batch", "batches of 32", floor("batch"), zmq),
        Kind(
            "mosec",
            "mosec",
            lambda _, port, python: [
                python, f"{HERE}/mosec_server.py", "--address", "127.0.0.1", "--port", port, "--timeout", "60000",
                "--log-level", "warning",
            ],
            _http("/inference", lambda text: {"text": text}, lambda answer: answer["y"]),
            "mosec",
        ),
        Kind("litserve", "LitServe", lambda _, __, python: [python, f"{HERE}/litserve_server.py"], plain, "litserve"),
        Kind(
            "infinity",
            "infinity",
            _infinity,
            _http(
                "/embeddings",
                lambda text: {"model": "minilm", "input": [text]},
                lambda answer: answer["data"][0]["embedding"],
            ),
            "infinity",
        ),
    )  # fmt: skip


def missing(kind: Kind, peers: Path) -> str:
    """Why it cannot be started, or empty."""
    python = peers / kind.venv / "bin" / "python"
    return f"there is no {python}" if kind.venv and not python.is_file() else ""


@contextmanager
def started(kind: Kind, address: str, peers: Path, settings: Mapping[str, str], log: Path) -> Iterator[Server]:
    """The server, in a session of its own, ended with the block. Raises TimeoutError if it does not answer."""
    port = address.rpartition(":")[2]
    python = str(peers / kind.venv / "bin" / "python") if kind.venv else sys.executable
    environment = {**os.environ, **settings, "PORT": port}
    if kind.venv:
        environment.pop("PYTHONPATH", None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(kind.command(address, port, python)),
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(kind, address, psutil.Process(process.pid))
            asyncio.run(_until_it_answers(server, process, log))
            yield server
        finally:
            _end(process)


async def _until_it_answers(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    limit_ns = clock.now_ns() + START_S * clock.NS_PER_S
    while clock.now_ns() < limit_ns and process.poll() is None:
        asker = server.asker()
        try:
            await asyncio.wait_for(asker.ask("Is anybody there?"), 5)
        except (OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.2)
        else:
            return
        finally:
            await asker.close()
    lines = _said(log)
    ended = f"it ended with {process.returncode}" if process.poll() is not None else f"no answer within {START_S} s"
    raise TimeoutError(f"{ended}; it said last: {lines[-1][:200] if lines else 'nothing'}")


def _said(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all of its session."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: children that outlived it
    except ProcessLookupError:
        return


def new_address() -> str:
    """A loopback address that nobody listens on."""
    return free_address()
