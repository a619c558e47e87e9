"""A worker process: one engine, one connection to the scheduler, one loop.

Lives here: building the engine, registering, the loop (drain the socket, step the engine, send its reports), leaving.
Never here: what to run next (the scheduler decides) or how it is computed (the engine does). The engine is used from
the main thread only; `heart.py` has the other thread.

One registration is one connection with an identity of its own. When the connection breaks, whoever answers next may be
another scheduler that counts its batches from 1 again: what was running is dropped, and the worker registers anew as a
new worker. So no report can ever reach the wrong batch, and a scheduler's restart is survived. Nothing received is
unpickled or evaluated; what does not decode is counted and logged.

    python -m headway.workers.process --connect tcp://10.0.0.7:5556 --name gpu0 --spec '{"engine": "echo"}'
"""

import argparse
import gc
import importlib
import logging
import os
import signal
import socket as sockets
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from types import FrameType
from typing import Any

import msgspec
import pydantic
import zmq

from headway.scheduler import link
from headway.scheduler.clock import NS_PER_MS, NS_PER_S, now_ns
from headway.scheduler.profile import ProfileError, cost_for, profile_of, tuned
from headway.scheduler.spec import ENGINES, ModelSpec
from headway.workers.custom import CannotLoad, load_custom
from headway.workers.engine import Engine, Report
from headway.workers.heart import EXIT_ORPHAN, Heart, Log, die_with_parent, orphaned
from headway.workers.line import Line, pack
from headway.workers.oneshot import code_of, text_of

READY_AGAIN_NS = 2 * NS_PER_S  # a Ready or its Welcome may be lost while a scheduler starts
DRAIN_NS_MAX = 30 * NS_PER_S  # a worker stopped by hand: new work never ends, so the scheduler's is given back
LINGER_MS = 2000  # last reports and the Bye of an orderly end

EXIT_LEFT = 0
EXIT_BROKEN = 1  # the engine raised, in a step or while it loaded
EXIT_CANNOT_LOAD = 2  # as asked it cannot be made; the text says what to change
EXIT_TOLD_TWICE = 5  # a second signal: at once, whatever runs

_MODULES = {
    "generate": "headway.workers.generate.make",
    "embed": "headway.workers.embed",
    "classify": "headway.workers.classify",
    "score": "headway.workers.classify",
    "echo": "headway.workers.echo",
}


def make_engine(spec: ModelSpec) -> Engine:
    """The engine of `spec` and its profile. Raises CannotLoad, or what loading the model raises."""
    try:
        spec = tuned(spec, profile_of(spec))
    except ProfileError as error:
        raise CannotLoad(str(error)) from None
    module = _MODULES.get(spec.engine)
    if module is None:
        return load_custom(spec.engine, spec)
    try:
        make: Callable[[ModelSpec], Engine] = importlib.import_module(module).make_engine
    except ModuleNotFoundError as error:
        raise CannotLoad(
            f"engine {spec.engine!r} needs the package {error.name!r}; install it with: pip install 'headway[worker]'"
        ) from error
    return make(spec)


def card_of(engine: Engine, spec: ModelSpec, log: Log) -> link.Card:
    """The engine's card, with the cost that its profile tells of, if it was measured on a device like this one."""
    profile = profile_of(spec)
    if profile is None:
        return engine.card
    cost_ns, differ = cost_for(profile, engine.card.facts)
    if differ:
        log.warning("the cost in %s was measured elsewhere and is not used: %s", spec.profile, "; ".join(differ))
        return engine.card
    return msgspec.structs.replace(engine.card, prior_ns=cost_ns)


class Worker:
    """The loop around one engine."""

    def __init__(
        self,
        engine: Engine,
        heart: Heart,
        open_line: Callable[[], Line],
        log: Log,
        *,
        name: str,
        verify: bool,
        card: link.Card | None = None,
    ) -> None:
        self._engine = engine
        self._heart = heart
        self._open_line = open_line
        self._log = log
        self._verify = verify
        self._ready = link.encode(link.Ready(link.LINK, name, os.getpid(), sockets.gethostname(), card or engine.card))
        self._open: dict[int, set[int]] = {}  # batch -> requests that are owed an ending
        self._draining = False
        self._drain_by_ns: int | None = None
        self._exit: int | None = None  # a code: the loop ends
        self._welcomed = False
        self._ready_at_ns = 0
        self._bad_messages = 0
        self._on: dict[type, Callable[[Line, Any], None]] = {
            link.Run: self._run,
            link.Drop: self._drop,
            link.Stop: self._stop,
            link.Welcome: self._welcome,
            link.Again: self._unknown,
        }

    def __repr__(self) -> str:
        running = sum(map(len, self._open.values()))
        return f"<Worker {'registered' if self._welcomed else 'waiting'}, {running} running>"

    def run(self) -> int:
        """Serve until told to leave. Returns the exit code."""
        while self._exit is None:
            line = self._open_line()
            self._welcomed, self._ready_at_ns = False, 0
            self._heart.beat_for(line.identity)
            try:
                self._serve(line)
            finally:
                line.close(LINGER_MS if self._exit is not None else 0)
            if self._exit is None:
                self._log.warning("the connection to the scheduler broke; registering again")
                self._abandon()
        return self._exit

    def drain(self) -> None:
        """Leave when what is running has ended, or after DRAIN_NS_MAX. Called by a signal handler."""
        self._draining = True
        self._drain_by_ns = now_ns() + DRAIN_NS_MAX

    # ------------------------------------------------------------ the loop

    def _serve(self, line: Line) -> None:
        """One registration: until the process must end (`_exit` says how) or the connection breaks."""
        while True:
            for body in line.received():
                self._take(line, body)
            if self._exit is not None or line.broken:
                return
            if self._draining and (not self._engine.busy or self._late()):
                self._leave(line, EXIT_LEFT, "drained")
                return
            if not self._engine.busy:
                self._wait(line)
            elif not self._step(line):
                return

    def _wait(self, line: Line) -> None:
        """Nothing to compute: sleep until something comes, registering meanwhile."""
        self._heart.busy = False
        if self._welcomed:
            line.wait(None)
            return
        left_ns = self._ready_at_ns - now_ns()
        if line.wait(max(0, left_ns), writable=left_ns <= 0):
            line.send(self._ready)
            self._ready_at_ns = now_ns() + READY_AGAIN_NS

    def _step(self, line: Line) -> bool:
        """One step of the engine and its reports. False: the engine is broken and the worker leaves."""
        heart = self._heart
        heart.busy = True
        heart.progress += 1
        try:
            for report in self._engine.step():
                self._send(line, report)
        except BaseException as error:
            self._log.error("the engine broke", exc_info=True)
            self._fail_all(line, error)
            self._leave(line, EXIT_BROKEN, f"the engine broke: {text_of(error)}")
            return False
        heart.progress += 1
        return True

    def _send(self, line: Line, report: Report) -> None:
        body, cut = pack(report, verify=self._verify)
        self._settle(report)
        for batch, rid in cut:
            self._log.error("a result of batch %d cannot be sent; request %d ends with an error", batch, rid)
            self._engine.cancel(batch, [rid])
        line.send(body)

    def _leave(self, line: Line, code: int, reason: str) -> None:
        self._exit = code
        self._log.info("leaving: %s", reason)
        line.send(link.encode(link.Bye(reason)))

    def _late(self) -> bool:
        return self._drain_by_ns is not None and now_ns() >= self._drain_by_ns

    # ------------------------------------------------------------ what is owed

    def _settle(self, report: Report) -> None:
        """Strike out what `report` ends."""
        if isinstance(report, link.Step):
            for row in report.rows:
                if row.finish:
                    self._close(row.batch, (row.rid,))
        elif isinstance(report, link.Failed) and report.rids:
            self._close(report.batch, report.rids)
        else:
            self._open.pop(report.batch, None)

    def _close(self, batch: int, rids: Sequence[int]) -> None:
        left = self._open.get(batch)
        if left is not None:
            left.difference_update(rids)
            if not left:
                del self._open[batch]

    def _fail_all(self, line: Line, error: BaseException) -> None:
        for batch, rids in self._open.items():
            line.send(link.encode(link.Failed(batch, code_of(error), text_of(error), sorted(rids))))
        self._open.clear()

    def _abandon(self) -> None:
        """Nobody waits for what is running: empty the engine, so that old batches cannot meet new ones."""
        for batch, rids in self._open.items():
            self._engine.cancel(batch, sorted(rids))
        self._open.clear()
        try:
            while self._engine.busy:
                self._heart.progress += 1
                self._engine.step()
        except BaseException:
            self._log.error("the engine broke", exc_info=True)
            self._exit = EXIT_BROKEN

    # ------------------------------------------------------------ messages

    def _take(self, line: Line, body: bytes) -> None:
        try:
            message = link.decode_to_worker(body)
        except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError) as error:
            self._bad_messages += 1
            if self._bad_messages & (self._bad_messages - 1) == 0:  # 1, 2, 4, 8, ...
                self._log.warning("message %d that does not decode: %s", self._bad_messages, error)
            return
        self._on[type(message)](line, message)

    def _welcome(self, _line: Line, message: link.Welcome) -> None:
        if not self._welcomed:
            self._log.info("registered")
        self._welcomed = True
        if message.link != link.LINK:
            self._log.warning("the scheduler speaks link version %d, this worker %d", message.link, link.LINK)

    def _unknown(self, line: Line, _message: link.Again) -> None:
        """The scheduler took it for lost: what it was working on runs elsewhere by now. Said before the welcome, it
        only means that a heartbeat, which has a connection of its own, overtook the registration."""
        if not self._welcomed:
            return
        self._log.warning("the scheduler does not know this worker any more")
        line.give_up()

    def _run(self, line: Line, message: link.Run) -> None:
        self._welcomed = True
        batch, items = message.batch, message.items
        self._open[batch] = {item.rid for item in items}
        try:
            self._engine.add(batch, items)
        except Exception as error:
            self._log.error("the engine did not take batch %d", batch, exc_info=True)
            rids = [item.rid for item in items]
            self._engine.cancel(batch, rids)
            self._send(line, link.Failed(batch, code_of(error), text_of(error), rids))

    def _drop(self, _line: Line, message: link.Drop) -> None:
        self._engine.cancel(message.batch, message.rids)

    def _stop(self, _line: Line, message: link.Stop) -> None:
        self._draining = True
        if not message.drain:
            self._log.info("told to leave at once")
            self._exit = EXIT_LEFT


# ---------------------------------------------------------------- the process


class _Prefixed(Log):
    """Each line begins with the worker's name."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        return f"{self.extra['name'] if self.extra else ''}: {msg}", kwargs


def run_worker(
    connect: str,
    spec: ModelSpec,
    *,
    name: str,
    parent_pid: int | None = None,
    heartbeat_ms: int = 500,
    curve: str | None = None,
) -> int:
    """Build the engine of `spec`, register at `connect` as `name`, and serve. Returns the process's exit code.

    With `parent_pid` the worker belongs to that process: it dies with it, and leaves SIGINT and SIGTERM to it. Without,
    the first signal drains and the second ends. `curve`: the scheduler's public key (Z85), if it uses CURVE. Exit
    codes: 0 told to leave, 1 the engine broke, 2 it cannot be made as asked, 3 orphaned, 4 no heartbeat, 5 told twice.
    """
    log = _Prefixed(logging.getLogger("headway.worker"), {"name": name.replace("%", "%%")})
    if parent_pid is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        die_with_parent(parent_pid)
        if orphaned(parent_pid):
            log.error("process %d is not the parent of this worker; leaving", parent_pid)
            return EXIT_ORPHAN
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heart = Heart(context, connect, log, heartbeat_ms=heartbeat_ms, parent_pid=parent_pid, curve=curve)
    heart.start()  # before the model loads: an orphan must not finish loading
    try:
        engine = _loaded(spec, log)
        return engine if isinstance(engine, int) else _work(engine, heart, context, connect, spec, name, curve, log)
    finally:
        heart.stop()
        context.term()


def _loaded(spec: ModelSpec, log: Log) -> Engine | int:
    """The engine, or the exit code: EXIT_CANNOT_LOAD says that trying again does not help."""
    began_ns = now_ns()
    try:
        engine = make_engine(spec)
    except (CannotLoad, pydantic.ValidationError) as error:  # their text says it all
        log.error("cannot load engine %r: %s", spec.engine, error)
        return EXIT_CANNOT_LOAD
    except Exception:  # a device still full, a disk not yet there
        log.error("cannot load engine %r", spec.engine, exc_info=True)
        return EXIT_BROKEN
    log.info("loaded engine %r in %d ms: %s", spec.engine, (now_ns() - began_ns) // NS_PER_MS, engine.card.facts)
    return engine


def _work(
    engine: Engine,
    heart: Heart,
    context: "zmq.Context[zmq.Socket[bytes]]",
    connect: str,
    spec: ModelSpec,
    name: str,
    curve: str | None,
    log: Log,
) -> int:
    alarm_fd, ring_fd = os.pipe()
    os.set_blocking(ring_fd, False)

    def open_line() -> Line:
        return Line(context, connect, name=name, curve=curve, alarm_fd=alarm_fd, log=log)

    worker = Worker(
        engine, heart, open_line, log, name=name, verify=spec.engine not in ENGINES, card=card_of(engine, spec, log)
    )
    if heart.parent_pid is None and threading.current_thread() is threading.main_thread():
        _drain_on_signals(worker, ring_fd)
    gc.collect()
    gc.freeze()  # a whole collection among all that torch brings takes a fifth of a second, in the midst of an answer
    try:
        return worker.run()
    finally:
        engine.close()
        os.close(alarm_fd)
        os.close(ring_fd)


def _drain_on_signals(worker: Worker, ring_fd: int) -> None:
    told = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal told
        if told:
            os._exit(EXIT_TOLD_TWICE)
        told = True
        worker.drain()
        os.write(ring_fd, b"!")

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headway.workers.process", description="One headway worker.")
    parser.add_argument("--connect", required=True, help="where the scheduler waits for workers")
    parser.add_argument("--name", required=True, help="what people call this worker")
    parser.add_argument("--spec", required=True, help="the model, as the JSON of a ModelSpec")
    parser.add_argument("--parent", type=int, help="process id of the parent to die with")
    parser.add_argument("--heartbeat-ms", type=int, default=500)
    parser.add_argument("--curve-server-key", help="the scheduler's public key (Z85, 40 characters)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        spec = ModelSpec.model_validate_json(args.spec)
    except pydantic.ValidationError as error:
        parser.error(f"--spec: {error}")
    logging.basicConfig(
        stream=sys.stderr, level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))  # read once, when torch is imported
    return run_worker(
        args.connect,
        spec,
        name=args.name,
        parent_pid=args.parent,
        heartbeat_ms=args.heartbeat_ms,
        curve=args.curve_server_key,
    )


if __name__ == "__main__":
    sys.exit(main())
