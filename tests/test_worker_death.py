"""Worker processes, signals and deaths: of the worker, of its parent, of the thread that started it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.scheduler.link import Bye, Done, Step, Stop
from headway.workers import heart, process
from headway.workers.echo import CRASH_CODE
from tests.played_scheduler import WAIT_MS, Scheduler, calls, texts, values


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    made = Scheduler(f"ipc://{tmp_path}/w")
    yield made
    made.close()
    made.context.term()


Start = Callable[..., "subprocess.Popen[bytes]"]


def command(scheduler: Scheduler, parent: int | str | None, **options: Any) -> list[str]:
    spec = json.dumps({"name": "m", "engine": "echo", "options": options})
    words = ["-m", "headway.workers.process", "--connect", scheduler.address, "--name", "w", "--heartbeat-ms", "20"]
    return [sys.executable, *words, "--spec", spec, *(["--parent", str(parent)] if parent is not None else [])]


@pytest.fixture
def start() -> Iterator[Start]:
    begun: list[subprocess.Popen[bytes]] = []

    def popen(words: list[str]) -> "subprocess.Popen[bytes]":
        begun.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return begun[-1]

    yield popen
    for child in begun:
        child.kill()
        child.communicate()


def code_of(child: "subprocess.Popen[bytes]") -> int:
    return child.wait(WAIT_MS / 1000)


def test_a_child_leaves_signals_to_its_parent(scheduler: Scheduler, start: Start) -> None:
    child = start(command(scheduler, os.getpid()))
    worker, ready = scheduler.welcome()
    assert ready.pid == child.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        child.send_signal(number)
    scheduler.send(worker, calls(1, "still here"))
    assert values(scheduler.next(Done)[1]) == ["still here"]
    scheduler.send(worker, Stop())
    assert scheduler.next(Bye)[1].reason == "drained"
    assert code_of(child) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_started_by_hand_a_signal_drains(scheduler: Scheduler, start: Start, number: int) -> None:
    child = start(command(scheduler, None, mode="iteration", fixed_ms=1))
    worker, _ = scheduler.welcome()
    if number == signal.SIGTERM:  # the other one comes while it is idle
        scheduler.send(worker, texts(1, "x" * 100))
        scheduler.next(Step)
    child.send_signal(number)
    said = 1
    while not isinstance(message := scheduler.any()[1], Bye):
        said += sum(len(row.tokens) for row in message.rows) if isinstance(message, Step) else 0
    assert said == (100 if number == signal.SIGTERM else 1)
    assert code_of(child) == 0


def test_heartbeats_go_on_in_an_endless_step_and_a_second_signal_ends_it(scheduler: Scheduler, start: Start) -> None:
    child = start(command(scheduler, None, hang_on="forever"))
    worker, _ = scheduler.welcome()
    scheduler.send(worker, calls(1, "forever"))
    while not scheduler.beat(worker).busy:
        pass
    beats = [scheduler.beat(worker) for _ in range(10)]
    assert {(beat.busy, beat.progress) for beat in beats} == {(True, 1)}, "alive, busy, and stuck"
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    assert code_of(child) == process.EXIT_TOLD_TWICE


def test_a_crash_is_a_crash(scheduler: Scheduler, start: Start) -> None:
    child = start(command(scheduler, os.getpid(), crash_on="poison"))
    worker, _ = scheduler.welcome()
    scheduler.send(worker, calls(1, "poison"))
    assert code_of(child) == CRASH_CODE


def test_a_worker_that_is_not_its_parents_child_leaves(scheduler: Scheduler, start: Start) -> None:
    assert code_of(start(command(scheduler, os.getppid()))) == heart.EXIT_ORPHAN


def test_a_wrong_spec_is_said(scheduler: Scheduler, start: Start) -> None:
    child = start([*command(scheduler, None)[:-1], '{"engin": "echo"}'])
    _, said = child.communicate(timeout=WAIT_MS / 1000)
    assert child.returncode == process.EXIT_CANNOT_LOAD
    assert b"engin" in said


PARENT = """
import os, subprocess, sys, threading
words = [str(os.getpid()) if word == "ME" else word for word in sys.argv[1:]]
def start():
    subprocess.Popen(words)
    sys.stdin.readline()
if words[0] == "thread":
    del words[0]
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    print("the thread is gone", flush=True)
else:
    start()
threading.Event().wait()
"""


def killed_parent(child: "subprocess.Popen[bytes]") -> None:
    """Kill it; its children, which share its stderr, must be gone before that reaches its end."""
    child.kill()
    child.communicate(timeout=5)


def test_a_killed_parent_takes_its_worker_along_from_an_endless_step(scheduler: Scheduler, start: Start) -> None:
    parent = start([sys.executable, "-c", PARENT, *command(scheduler, "ME", hang_on="forever")])
    worker, _ = scheduler.welcome()
    scheduler.send(worker, calls(2, "forever"))
    while not scheduler.beat(worker).busy:
        pass
    killed_parent(parent)


def test_the_thread_that_started_a_worker_may_end(scheduler: Scheduler, start: Start) -> None:
    """Linux ties "die with the parent" to that thread; the worker must outlive it, and still not the process."""
    parent = start([sys.executable, "-c", PARENT, "thread", *command(scheduler, "ME", hang_on="forever")])
    worker, _ = scheduler.welcome()
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(b"\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == b"the thread is gone\n"
    scheduler.send(worker, calls(1, "fine"))
    assert values(scheduler.next(Done)[1]) == ["fine"]
    killed_parent(parent)


def test_a_killed_parent_takes_its_worker_along_while_it_loads(scheduler: Scheduler, start: Start) -> None:
    parent = start([sys.executable, "-c", PARENT, *command(scheduler, "ME", load_ms=600_000)])
    child = _child_of(parent.pid)
    os.kill(child, 0)
    killed_parent(parent)


def _child_of(pid: int) -> int:
    """The first child of a process, once it has one."""
    for _ in range(100_000):
        children = psutil.Process(pid).children()
        if children:
            return children[0].pid
    raise AssertionError("no child came")
