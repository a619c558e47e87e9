"""`headway serve` and `headway worker` as processes: a real server, a real worker, real signals, the echo engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEADWAY = [sys.executable, "-m", "headway"]
PATIENCE_S = 60
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}


@contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A long-running command, which is killed if the test leaves it behind."""
    process = subprocess.Popen([*HEADWAY, *arguments], stderr=subprocess.PIPE, text=True, env=CLEAN)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def log_until(process: "subprocess.Popen[str]", word: str) -> str:
    """What the process wrote up to the first line with `word` in it."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError(f"it ended without {word!r}:\n{''.join(lines)}")


def ask(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*HEADWAY, *arguments], capture_output=True, text=True, env=CLEAN, timeout=PATIENCE_S)


def test_a_server_from_start_to_drain(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    with started("serve", "--engine", "echo", "--bind", address) as server:
        head = log_until(server, "registered")
        assert all(
            part in head for part in (address, "echo: echo on auto, 1 worker x 1 thread", "adaptive, at most 100 ms")
        )
        assert ask("call", '{"a": [1, 2]}', "--connect", address).stdout == '{"a":[1,2]}\n'
        status = json.loads(ask("status", "--batches", "5", "--json", "--connect", address).stdout)
        assert (status["state"], len(status["batches"]), status["counters"]["ended.ok"]) == ("serving", 1, 1)
        refused = ask("generate", "x", "--connect", address)
        assert (refused.returncode, "unknown_model" in refused.stderr) == (4, True)
        second = ask("serve", "--engine", "echo", "--bind", address)
        assert (second.returncode, "Traceback" in second.stderr, address in second.stderr) == (2, False, True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


def test_a_worker_started_by_hand(tmp_path: Path) -> None:
    clients, workers = f"ipc://{tmp_path}/s", f"ipc://{tmp_path}/w"
    with started("serve", "--engine", "echo", "--workers", "0", "--bind", clients, "--workers-bind", workers) as server:
        log_until(server, "clients connect")
        with started("worker", "--connect", workers, "--engine", "echo", "--worker-name", "mine") as worker:
            log_until(worker, "registered")
            assert ask("call", "7", "--connect", clients).stdout == "7\n"
            [shown] = json.loads(ask("status", "--json", "--connect", clients).stdout)["workers"]
            assert shown["worker"] == "mine"
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0


def test_an_engine_that_cannot_be_loaded(tmp_path: Path) -> None:
    for command in (["serve", "--bind", f"ipc://{tmp_path}/s"], ["worker", "--connect", f"ipc://{tmp_path}/w"]):
        ended = ask(*command, "--engine", "no_such_module:make")
        assert (ended.returncode, "no_such_module" in ended.stderr) == (5, True), ended.stderr
