"""How a server ends: SIGTERM drains, a limit cuts the drain, a second signal ends at once; nothing is left behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from tests.live import Raw

STREAM = {"name": "stream", "engine": "echo", "options": {"mode": "iteration", "fixed_ms": 5}}


@contextmanager
def serving(folder: Path, **keys: object) -> Iterator[tuple["subprocess.Popen[bytes]", Raw, list[psutil.Process]]]:
    """`headway serve` as a process of its own on an ipc path, with a client and its worker processes."""
    address = f"ipc://{folder}/front"
    config = folder / "headway.yaml"
    config.write_text(
        yaml.safe_dump({"bind": address, "workers_bind": f"ipc://{folder}/back", "models": [STREAM], **keys})
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "headway", "serve", "--config", str(config)], stderr=subprocess.DEVNULL
    )
    client = Raw(address)
    try:
        client.wait_ready()
        yield server, client, psutil.Process(server.pid).children(recursive=True)
    finally:
        client.close()
        server.kill()
        server.wait()


def nothing_is_left(folder: Path, processes: list[psutil.Process]) -> None:
    assert [path.name for path in folder.iterdir()] == ["headway.yaml"]
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


def generate(client: Raw, name: str, tokens: int) -> None:
    client.send(type="generate", id=name, prompt="x" * tokens, params={"max_new_tokens": tokens}, stream=True)


def running(client: Raw, count: int) -> None:
    """Until that many requests run."""
    while sum(worker["running"] for worker in client.status()["workers"]) < count:
        client.socket.poll(5)


def test_a_drain_finishes_what_is_here_and_refuses_what_comes(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, client, workers):
        for number in range(30):  # 22 run (0.7 x 32), 8 wait
            generate(client, str(number), 80)
        running(client, 22)
        server.send_signal(signal.SIGTERM)
        while client.status()["state"] != "draining":
            pass
        generate(client, "late", 5)
        late = client.ending("late")
        assert (late["code"], late["retryable"], late["http"]) == ("shutting_down", True, 503)
        endings = [client.ending(str(number)) for number in range(30)]
        assert {(ending["type"], ending.get("text")) for ending in endings} == {("result", "x" * 80)}
        assert server.wait(20) == 0
        nothing_is_left(tmp_path, workers)


def test_a_drain_is_cut_at_its_limit(tmp_path: Path) -> None:
    with serving(tmp_path, drain_ms=300) as (server, client, workers):
        generate(client, "1", 5000)
        running(client, 1)
        server.send_signal(signal.SIGTERM)
        ending = client.ending("1")
        assert ending["code"] == "shutting_down"
        assert ending["partial"]["text"]
        assert server.wait(20) == 0
        nothing_is_left(tmp_path, workers)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, client, workers):
        generate(client, "1", 5000)
        running(client, 1)
        server.send_signal(signal.SIGTERM)
        while client.status()["state"] != "draining":
            pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(5) == 130
        nothing_is_left(tmp_path, workers)


@pytest.mark.parametrize("moment", ["serving", "loading"])
def test_workers_die_with_a_killed_scheduler(tmp_path: Path, moment: str) -> None:
    loading = {**STREAM, "options": {"mode": "iteration", "load_ms": 60_000}} if moment == "loading" else STREAM
    address = f"ipc://{tmp_path}/front"
    config = tmp_path / "headway.yaml"
    config.write_text(yaml.safe_dump({"bind": address, "models": [loading]}))
    server = subprocess.Popen(
        [sys.executable, "-m", "headway", "serve", "--config", str(config)], stderr=subprocess.DEVNULL
    )
    client = Raw(address)
    try:
        client.status() if moment == "loading" else client.wait_ready()
        workers = psutil.Process(server.pid).children(recursive=True)
        assert workers
        server.kill()
        server.wait()
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive
        server = subprocess.Popen(  # what the killed one left behind does not block the next
            [sys.executable, "-m", "headway", "serve", "--config", str(config)], stderr=subprocess.DEVNULL
        )
        assert client.status()["state"] == "serving"
    finally:
        client.close()
        server.kill()
        server.wait()
