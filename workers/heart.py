"""The heart of a worker process: a thread that says "alive" and watches the parent, whatever the main thread computes.

Lives here: heartbeats with the progress number, on a socket of their own (identity `beat:` + the worker's), and dying
with the parent, by the kernel's hand where that is safe and by looking otherwise. Never here: the engine or the
worker's own socket, which belong to the main thread. The forward pass cannot starve it as long as the engine lets go of
the interpreter lock now and then, as torch does. A heart that fails ends the process: without one nobody would know.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import zmq

from headway.scheduler import link
from headway.scheduler.clock import NS_PER_MS, NS_PER_S, now_ns

BEAT_PREFIX = b"beat:"
BEATS_KEPT_MAX = 4  # older ones say nothing new
PARENT_CHECK_NS = 200 * NS_PER_MS  # an orphan is gone within a second
EXIT_ORPHAN = 3
EXIT_HEART = 4

_PR_SET_PDEATHSIG = 1

Log = logging.LoggerAdapter[logging.Logger]


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when `parent_pid` dies: it can even while a library keeps the interpreter.

    Linux ties that to the *thread* that started this process, so it is asked only when that was the parent's main
    thread; a worker started from another thread must survive its end, and relies on `orphaned` alone.
    """
    if sys.platform != "linux":
        return
    try:
        of_main_thread = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
    except OSError:
        return
    if str(os.getpid()) in of_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def orphaned(parent_pid: int | None) -> bool:
    """Whether the process that started this one is gone."""
    return parent_pid is not None and os.getppid() != parent_pid


def secure(socket: zmq.Socket[bytes], server_key: str | None) -> None:
    """CURVE as a client with a fresh key pair, if the server's public key (Z85, 40 characters) is given."""
    if server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key.encode("ascii")


class Heart:
    """The thread. The main thread writes `progress` and `busy`, and calls `beat_for` at each registration."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connect: str,
        log: Log,
        *,
        heartbeat_ms: int,
        parent_pid: int | None,
        curve: str | None,
    ) -> None:
        self.progress = 0
        self.busy = False
        self._context = context
        self._connect = connect
        self._log = log
        self._period_ns = heartbeat_ms * NS_PER_MS
        self.parent_pid = parent_pid
        self._curve = curve
        self._identity = b""
        self._over = False
        self._wake = threading.Event()
        self._rss = psutil.Process().memory_info
        self._thread = threading.Thread(target=self._run, name="headway-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; its socket is closed."""
        self._over = True
        self._wake.set()
        self._thread.join()

    def beat_for(self, identity: bytes) -> None:
        """From now on the beats are those of the worker socket `identity`; the first goes out at once."""
        self._identity = identity
        self._wake.set()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # they must wake the main thread
        try:
            self._live()
        except BaseException:
            self._log.critical("the heartbeat thread failed; leaving", exc_info=True)
            os._exit(EXIT_HEART)

    def _live(self) -> None:
        identity, socket, due_ns = b"", None, 0
        while not self._over:
            if orphaned(self.parent_pid):
                self._log.error("the parent process is gone; leaving")
                os._exit(EXIT_ORPHAN)
            if identity != self._identity:
                if socket is not None:
                    socket.close(linger=0)
                identity, due_ns = self._identity, 0
                socket = self._open(identity)
            now = now_ns()
            if socket is not None and now >= due_ns:
                due_ns = now + self._period_ns if self._beat(socket) else now
            self._wake.wait(min(self._period_ns, PARENT_CHECK_NS) / NS_PER_S)
            self._wake.clear()
        if socket is not None:
            socket.close(linger=0)

    def _open(self, identity: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, BEAT_PREFIX + identity)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # never a queue of stale beats for a scheduler that is not there
        socket.setsockopt(zmq.SNDHWM, BEATS_KEPT_MAX)
        socket.setsockopt(zmq.LINGER, 0)
        secure(socket, self._curve)
        socket.connect(self._connect)
        return socket

    def _beat(self, socket: zmq.Socket[bytes]) -> bool:
        """One beat, if the connection is there."""
        try:
            socket.send(link.encode(link.Beat(self.progress, self.busy, self._rss().rss)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
