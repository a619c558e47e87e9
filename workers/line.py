"""A worker's connection to the scheduler: one registration, and reports that are certain to arrive readable.

Lives here: the socket with an identity of its own, noticing that the connection broke, and `pack`, which turns a result
that cannot be sent into an error for its own request. Never here: what messages mean. Nothing is queued for a scheduler
that is not connected (IMMEDIATE), and a silent peer is found by ZeroMQ's own pings, which its I/O thread answers even
while its Python is busy.
"""

import os
import secrets
from collections.abc import Iterator

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from headway.scheduler import link
from headway.scheduler.keepalive import keep_alive
from headway.scheduler.link import Done, Failed, Outcome, Row, Step
from headway.workers.engine import Report
from headway.workers.heart import Log, secure

NAME_BYTES_MAX = 100  # a ZeroMQ identity has 255 at most
RECONNECT_MS_MAX = 1000
SEND_TRY_MS = 100  # between two looks at whether a full connection is still there

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Line:
    """One registration's connection. `alarm_fd` becomes readable when a signal wants the loop awake."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connect: str,
        *,
        name: str,
        curve: str | None,
        alarm_fd: int,
        log: Log,
    ) -> None:
        label = name.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
        self.identity = f"w:{label}:{secrets.token_hex(4)}".encode()
        self._connect = connect
        self._log = log
        self._made = False
        self._broken = False
        self._refused = False
        self._alarm_fd = alarm_fd
        self._socket = context.socket(zmq.DEALER)
        self._set_options(curve)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(alarm_fd, zmq.POLLIN)
        self._socket.connect(connect)

    def __repr__(self) -> str:
        return f"<Line {self.identity.decode()} to {self._connect}{', broken' if self._broken else ''}>"

    @property
    def broken(self) -> bool:
        """Whether the connection, once made, was lost. It stays so."""
        while self._monitor.poll(0):
            self._note(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
        return self._broken

    def give_up(self) -> None:
        """It counts as lost."""
        self._broken = True

    def received(self) -> Iterator[bytes]:
        """The messages that are here already; one of several frames comes as b"", which decodes as nothing."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frames[0] if len(frames) == 1 else b""

    def wait(self, wait_ns: int | None, *, writable: bool = False) -> bool:
        """Until a message, a lost connection, an alarm, or `wait_ns` (None: no limit).

        Returns whether a message can be sent, if `writable` asks to wake for that too.
        """
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if writable else 0))
        # Waiting to send has no limit of its own: the connection may take as long as it likes to come.
        timeout_ms = None if wait_ns is None or writable else -(-wait_ns // 1_000_000)
        ready = dict(self._poller.poll(timeout_ms))
        if self._alarm_fd in ready:
            os.read(self._alarm_fd, 64)
        return bool(ready.get(self._socket, 0) & zmq.POLLOUT)

    def send(self, body: bytes) -> None:
        """Send, waiting for a scheduler that reads slowly; a lost connection loses the message, and `broken` tells."""
        while True:
            try:
                return self._socket.send(body, zmq.NOBLOCK)
            except zmq.Again:
                if self.broken:
                    return None
                self._socket.poll(SEND_TRY_MS, zmq.POLLOUT)

    def close(self, linger_ms: int) -> None:
        """Close; messages already given to `send` have `linger_ms` to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _set_options(self, curve: str | None) -> None:
        socket = self._socket
        socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        keep_alive(socket)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        secure(socket, curve)

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._made = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._broken = self._made  # before that, libzmq goes on trying
        elif not self._refused:  # libzmq tries for ever: say it once
            self._refused = True
            self._log.error("%s refused the handshake; check the server's CURVE key", self._connect)


# ---------------------------------------------------------------- packing


def pack(report: Report, *, verify: bool) -> tuple[bytes, list[tuple[int, int]]]:
    """`report` as a message, and the (batch, rid) of running requests that it had to end.

    A part that cannot be packed, or takes more than its share of a message, becomes an error of its own request.
    `verify` also reads the message back: an engine that is not ours may pack what the scheduler must refuse.
    """
    try:
        return _packed(report, link.LINK_BYTES_MAX, verify), []
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        mended, cut = _mended(report, verify, error)
        return _packed(mended, link.LINK_BYTES_MAX, verify), cut


def _packed(report: Report, bytes_max: int, verify: bool) -> bytes:
    body = link.encode(report)
    if len(body) > bytes_max:
        raise ValueError(f"{len(body)} bytes are more than the {bytes_max} it may have")
    if verify:
        link.decode_from_worker(body)
    return body


def _mended(report: Report, verify: bool, error: Exception) -> tuple[Report, list[tuple[int, int]]]:
    if isinstance(report, Done):
        share = link.LINK_BYTES_MAX // max(1, len(report.outcomes)) - 64
        outcomes = [_outcome(o, share, verify) for o in report.outcomes]
        return Done(report.batch, int(report.compute_ns), int(report.tokens), outcomes), []
    if isinstance(report, Step):
        share = link.LINK_BYTES_MAX // max(1, len(report.rows)) - 64
        rows = [_row(row, share, verify) for row in report.rows]
        cut = [(row.batch, row.rid) for row, was in zip(rows, report.rows, strict=True) if row is not was]
        return msgspec.structs.replace(report, rows=rows), cut
    if isinstance(report, Failed):
        return Failed(report.batch, "engine_error", f"an error that cannot be sent: {error}"), []
    raise TypeError(f"the engine's step returned a {type(report).__name__}; a Done, Failed or Step is a report")


def _outcome(outcome: Outcome, bytes_max: int, verify: bool) -> Outcome:
    try:
        _packed(Done(0, 0, 0, [outcome]), bytes_max, verify)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return Outcome(outcome.rid, code="engine_error", message=f"the result cannot be sent: {error}")
    return outcome


def _row(row: Row, bytes_max: int, verify: bool) -> Row:
    try:
        _packed(Step(0, 0, 0, [row]), bytes_max, verify)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return Row(row.batch, row.rid, [], "error", "engine_error", f"the tokens cannot be sent: {error}")
    return row
