"""Starts worker processes, watches them, starts them again with a growing pause, and at last gives up.

A slot is one worker that the operator asked for. Its process may end and be replaced; a process that says it cannot
load (exit code 2: a missing package, a bad folder) is not tried again, since trying does not mend that. The processes
end with this one, however it ends: they watch their parent. Time is an argument, as everywhere.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

import anyio

from headway.scheduler.clock import NS_PER_MS, NS_PER_S
from headway.scheduler.spec import ModelSpec, ServerSpec

log = logging.getLogger("headway.scheduler")

POLL_NS = 100 * NS_PER_MS  # how often processes are looked at; a lost connection is noticed at once anyway
PAUSE_NS, PAUSE_NS_MAX = 500 * NS_PER_MS, 30 * NS_PER_S  # before a restart: doubles each time
SETTLED_NS = 60 * NS_PER_S  # a worker that served this long has its restarts forgotten
CANNOT_LOAD = 2  # a worker's exit code for what a restart does not mend
GRACE_S = 5.0  # for workers to leave when told, before they are killed
LOOK_S = 0.01
# Read by glibc when a process starts: large blocks, as weights are, ask for huge pages. A CPU step is 8 to 12% shorter.
HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


@dataclass(slots=True)
class Slot:
    """One wanted worker. `pid` 0: not running; `ready_ns` 0: not registered yet."""

    spec: ModelSpec
    name: str
    process: "subprocess.Popen[bytes] | None" = None
    start_at_ns: int = 0
    ready_ns: int = 0
    restarts: int = 0
    given_up: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A process ended. `given_up`: why no other will be started for its slot, or empty."""

    slot: Slot
    pid: int
    reason: str
    given_up: str


class Supervisor:
    """The worker processes of this machine that belong to this scheduler."""

    def __init__(self, spec: ServerSpec, connect: str) -> None:
        self._spec = spec
        self._connect = connect
        self._next_poll_ns = 0
        self.stopping = False
        self.hurry = False  # do not wait for anybody any more
        self.slots: list[Slot] = []
        for model in spec.models:
            numbers = count()
            self.slots += [Slot(model, f"{model.name}-{next(numbers)}") for _ in range(model.workers)]

    def __repr__(self) -> str:
        running = sum(slot.process is not None for slot in self.slots)
        return f"<Supervisor {running} of {len(self.slots)} running>"

    @property
    def wakeup_ns(self) -> int:
        """When `poll` is due."""
        return self._next_poll_ns if self.slots and not self.stopping else 1 << 62

    def poll(self, now_ns: int) -> list[Ended]:
        """Look at the processes, start those that are due, and tell which ended."""
        if now_ns < self._next_poll_ns or self.stopping:
            return []
        self._next_poll_ns = now_ns + POLL_NS
        ended = [
            self._ended(slot, _how(code), now_ns, hopeless=code == CANNOT_LOAD)
            for slot in self.slots
            if slot.process is not None and (code := slot.process.poll()) is not None
        ]
        for slot in self.slots:
            if slot.process is None and not slot.given_up and now_ns >= slot.start_at_ns:
                try:
                    self._start(slot)
                except OSError as error:  # no memory, no process left: it may pass
                    ended.append(self._ended(slot, f"could not be started: {error.strerror}", now_ns))
        return ended

    def ready(self, pid: int, now_ns: int) -> None:
        """A worker with this process id has registered."""
        for slot in self.slots:
            if slot.pid == pid:
                slot.ready_ns = now_ns

    def _start(self, slot: Slot) -> None:
        command = [
            sys.executable,
            "-m",
            "headway.workers.process",
            "--connect",
            self._connect,
            "--name",
            slot.name,
            "--parent",
            str(os.getpid()),
            "--heartbeat-ms",
            str(self._spec.heartbeat_ms),
            "--log-level",
            self._spec.log_level,
            "--spec",
            slot.spec.model_dump_json(exclude_unset=True),  # a profile fills in what is left out
        ]
        if self._spec.curve is not None:
            command += ["--curve-server-key", self._spec.curve.public]
        slot.ready_ns = 0
        slot.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=worker_environment(os.environ))
        log.info("worker %s started (process %d)", slot.name, slot.process.pid)

    def _ended(self, slot: Slot, how: str, now_ns: int, *, hopeless: bool = False) -> Ended:
        pid, slot.process = slot.pid, None
        if slot.ready_ns and now_ns - slot.ready_ns > SETTLED_NS:
            slot.restarts = 0
        if hopeless:
            slot.given_up = "it cannot load its model; see its log above"
        elif slot.restarts >= self._spec.restarts_max:
            slot.given_up = f"it ended {slot.restarts + 1} times in a row, last it {how}; see its log above"
        pause_ns = min(PAUSE_NS << slot.restarts, PAUSE_NS_MAX)
        slot.restarts += 1
        slot.start_at_ns = now_ns + pause_ns
        after = f"given up: {slot.given_up}" if slot.given_up else f"starting again in {pause_ns / NS_PER_S:.1f} s"
        log.warning("worker %s (process %d) %s; %s", slot.name, pid, how, after)
        return Ended(slot, pid, f"worker {slot.name} {how}", slot.given_up)

    def hopeless(self, model: ModelSpec) -> str:
        """Why no worker of this model will ever come from here, or empty."""
        mine = [slot for slot in self.slots if slot.spec is model]
        return mine[0].given_up if mine and all(slot.given_up for slot in mine) else ""

    def kill(self, pid: int) -> None:
        """End a process that is stuck; it is started again like any that ended."""
        for slot in self.slots:
            if slot.process is not None and slot.pid == pid:
                slot.process.kill()

    async def stop(self, *, at_once: bool = False) -> None:
        """Wait for the processes to leave, as they were told to; kill those that have not after GRACE_S."""
        self.stopping = True
        left = [(slot, slot.process) for slot in self.slots if slot.process is not None]
        for slot, process in left:
            if at_once or not slot.ready_ns:  # one that still loads has nothing to finish, and hears nothing
                process.kill()
        for _ in range(int(GRACE_S / LOOK_S)):
            if self.hurry or all(process.poll() is not None for _, process in left):
                break
            await anyio.sleep(LOOK_S)
        for slot, process in left:
            if process.poll() is None:
                if not self.hurry:
                    log.warning("worker %s does not leave; it is killed", slot.name)
                process.kill()
            process.wait()
            slot.process = None


def _how(code: int) -> str:
    return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"


def worker_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker, made from this process's: huge pages, unless the operator tunes glibc himself."""
    name, value = HUGE_PAGES
    return {name: value, **own}
