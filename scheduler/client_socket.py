"""The client's one DEALER: sends without blocking, drains on readiness, and puts each answer into its id's mailbox.

Nothing here awaits a message from the socket. A callback of the event loop reads until the socket would block and puts
what it finds into mailboxes, so no time-out or cancellation can ever take a message out of the socket and lose it. An
answer whose id has no mailbox is counted and dropped.

A connection that was lost is not revived by libzmq but replaced: what had come is read, what was still queued to go is
thrown away with the old socket, and each request that was on its way ends as `unreachable`. It may then be sent again
under the same id: to the server, the new socket is another client. (ZMQ_IMMEDIATE would also forget the queue, but it
drops answers that have come and were not read yet.) What cannot be sent yet waits here, and its deadline is stamped
when it goes.
"""

import asyncio
from collections import deque
from typing import Any, Protocol, get_args

import anyio
import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from headway.scheduler import clock, wire
from headway.scheduler.client_types import Counters
from headway.scheduler.errors import HeadwayError
from headway.scheduler.keepalive import keep_alive

TURN_MESSAGES_MAX = 256  # read in one go; then the loop may run others
RECONNECT_MS = 100  # from a loss to the next attempt, and between attempts, at first;
RECONNECT_MS_MAX = 2_000  # doubled each time up to this

Answer = wire.ServerMessage | HeadwayError

_HANDSHAKE_WHY = "something answers, but not as a headway server does, or curve_server_key is wrong or missing"
_WHY: dict[int, str] = {
    zmq.EVENT_CLOSED: "nothing accepts connections there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _HANDSHAKE_WHY,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _HANDSHAKE_WHY,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: _HANDSHAKE_WHY,
}
_UP, _DOWN = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
_EVENTS = sum({*map(int, _WHY), int(_UP), int(_DOWN)})  # distinct bits
QUESTIONS = (wire.Ping, wire.Info, wire.Status)  # no deadline, no cancel, not in the books


_KNOWN = frozenset(kind.__struct_config__.tag for kind in get_args(wire.ServerMessage))


class _Head(msgspec.Struct):
    """As much as is read of an answer that cannot be decoded."""

    type: str
    id: str | None = None


class Mailbox:
    """What has come for one id and was not taken yet. From `Socket.start` to `Socket.finish` it owns its id. `came_ns`:
    when that came which was taken last; its taker may be a turn of the loop later, or many."""

    __slots__ = ("_arrived", "_waiting", "came_ns", "ending", "expires_ns", "id", "message", "on_wire")

    def __init__(self, id_: str, message: wire.ClientMessage, expires_ns: int | None) -> None:
        self.id = id_
        self.message = message
        self.expires_ns = expires_ns
        self.on_wire = False
        self.ending = ""  # then: answered | lost | cancelled
        self.came_ns = 0
        self._waiting: deque[tuple[int, Answer]] = deque()
        self._arrived = anyio.Event()

    @property
    def booked(self) -> bool:
        return self.on_wire and not isinstance(self.message, QUESTIONS)

    def put(self, answer: Answer, ending: str = "answered") -> bool:
        """Whether it was taken: a server that goes on after an ending is out of order, and the first ending counts."""
        if self.ending:
            return False
        if not isinstance(answer, wire.Delta):
            self.ending = ending
        self._waiting.append((clock.now_ns(), answer))
        self._arrived.set()
        return True

    async def take(self) -> Answer:
        """The next answer. If it is cancelled while waiting, it has taken none."""
        while not self._waiting:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._next()

    def take_now(self) -> Answer | None:
        return self._next() if self._waiting else None

    def _next(self) -> Answer:
        self.came_ns, answer = self._waiting.popleft()
        return answer

    def stamped(self) -> wire.ClientMessage:
        """The message with the time that is left now."""
        message = self.message
        if self.expires_ns is not None and isinstance(message, wire.Request):
            left_ms = -(-(self.expires_ns - clock.now_ns()) // clock.NS_PER_MS)
            message = msgspec.structs.replace(message, deadline_ms=left_ms)
        return message


class Line(Protocol):
    """The way to a scheduler: a socket to a server, or a scheduler in this process.

    `start` takes a message and returns its mailbox, which must be given to `finish` whatever happens. `connected` and
    `gone` are set once there is a connection, and once the line is closed.
    """

    endpoint: str
    connected: anyio.Event
    gone: anyio.Event
    info: wire.InfoReply | None
    info_ns: int

    @property
    def counters(self) -> Counters: ...

    def check_open(self) -> None: ...

    def close(self) -> None: ...

    async def until_connected(self, timeout_ms: int) -> None: ...

    def unreachable(self, what: str) -> HeadwayError: ...

    def start(self, id_: str, message: wire.ClientMessage, expires_ns: int | None = None) -> Mailbox: ...

    def finish(self, mailbox: Mailbox, timed_out: bool = False) -> None: ...

    def ask_info(self) -> None: ...


class Socket:
    """A connection to one server, and the books of what went over it. Used from one event loop only.

    `info` is the newest the server told of itself, at `info_ns`. It is asked for again after a lost connection.
    """

    def __init__(self, endpoint: str, curve_server_key: bytes | None = None) -> None:
        self.endpoint = endpoint
        self.connected = anyio.Event()
        self.info: wire.InfoReply | None = None
        self.info_ns = 0
        self._why = "no answer from there yet"
        self._live: dict[str, Mailbox] = {}
        self._unsent: dict[str, None] = {}  # ids in order; what to send is in their mailboxes
        self._cancels: deque[str] = deque()
        self._books = dict.fromkeys(("sent", "answered", "timed_out", "cancelled", "lost", "late"), 0)
        self._turn_due = False
        self.gone = anyio.Event()  # closed, for whoever waits for something else
        self._curve_server_key = curve_server_key
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise HeadwayError("unreachable", f"cannot connect to {endpoint!r}: {error}") from None

    def _open(self) -> None:
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.IPV6: int("[" in self.endpoint),
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
            zmq.MAXMSGSIZE: wire.FRAME_BYTES_MAX,
        }
        for option, value in options.items():
            dealer.set(option, value)
        keep_alive(dealer)
        if self._curve_server_key is not None:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = self._curve_server_key
        self._monitor = dealer.get_monitor_socket(_EVENTS)
        dealer.connect(self.endpoint)
        self._reopening: asyncio.TimerHandle | None = None
        self._loop.add_reader(dealer.fileno(), self._turn)
        self._loop.add_reader(self._monitor.fileno(), self._turn)

    def _shut(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
        if not self._dealer.closed:
            self._loop.remove_reader(self._dealer.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=0)

    def close(self) -> None:
        """End what is live as cancelled, and give back every thread and file. Idempotent."""
        if self.closed:
            return
        self.gone.set()
        self.connected.set()  # wakes whoever waits for a connection; it looks for `closed`
        for mailbox in self._live.values():
            mailbox.put(HeadwayError("cancelled", "the client was closed while this request was running"), "cancelled")
        self._shut()
        self._context.destroy(linger=0)

    @property
    def closed(self) -> bool:
        return self.gone.is_set()

    def check_open(self) -> None:
        if self.closed:
            raise HeadwayError("cancelled", "the client is closed")

    @property
    def counters(self) -> Counters:
        return Counters(live=sum(mailbox.booked for mailbox in self._live.values()), **self._books)

    async def until_connected(self, timeout_ms: int) -> None:
        """Return when there is a connection. Raises HeadwayError `unreachable` after `timeout_ms`."""
        with anyio.move_on_after(timeout_ms / 1000):
            await self.connected.wait()
            self.check_open()
            return
        raise self.unreachable(f"no connection within {timeout_ms} ms; {self._why}")

    def unreachable(self, what: str) -> HeadwayError:
        advice = "check the address, and that a server runs there (headway serve)"
        return HeadwayError("unreachable", f"{self.endpoint}: {what}; {advice}")

    # ------------------------------------------------------------ requests

    def start(self, id_: str, message: wire.ClientMessage, expires_ns: int | None = None) -> Mailbox:
        """Send `message` as soon as can be. The mailbox must be given to `finish`, whatever happens."""
        assert id_ not in self._live, id_
        self.check_open()
        self._watch()  # first, so that a loss that libzmq has seen already does not hit what is sent after it
        mailbox = self._live[id_] = Mailbox(id_, message, expires_ns)
        self._unsent[id_] = None
        self._flush()
        return mailbox

    def finish(self, mailbox: Mailbox, timed_out: bool = False) -> None:
        """Nobody waits for this id any longer. If it has not ended, the server is told to cancel it. Idempotent."""
        if self._live.get(mailbox.id) is not mailbox:
            return
        del self._live[mailbox.id]
        self._unsent.pop(mailbox.id, None)
        if not mailbox.booked:
            return
        self._books[mailbox.ending or ("timed_out" if timed_out else "cancelled")] += 1
        if not mailbox.ending and not self.closed:
            self._cancels.append(mailbox.id)
            self._watch()
            self._flush()

    def ask_info(self) -> None:
        """Ask for fresh `info` without waiting for it."""
        if self.connected.is_set() and not self.closed:
            self._try_send(wire.encode(wire.Info()))

    def _flush(self) -> None:
        """Send what waits, as far as the high-water mark allows; the rest goes when the socket says so."""
        if not self.connected.is_set():
            return
        while self._cancels and self._try_send(wire.encode(wire.Cancel(id=self._cancels[0]))):
            self._cancels.popleft()
        while self._unsent and not self._cancels:
            id_ = next(iter(self._unsent))
            mailbox = self._live[id_]
            if not self._try_send(wire.encode(mailbox.stamped())):
                break
            del self._unsent[id_]
            mailbox.on_wire = True
            self._books["sent"] += mailbox.booked
        self._look_again()

    def _try_send(self, body: bytes) -> bool:
        try:
            self._dealer.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # ------------------------------------------------------------ the loop's callback

    def _turn(self) -> None:
        """The socket or its monitor may have something. libzmq signals edges: stop only when both would block."""
        self._turn_due = False
        if self._dealer.closed:
            return
        self._read()
        self._watch()
        self._flush()

    def _look_again(self) -> None:
        """A send takes the edge of a waiting message away, so ask; asking also lets libzmq see freed room."""
        events = int(self._dealer.get(zmq.EVENTS))
        wanted = zmq.POLLIN | (zmq.POLLOUT if self._unsent or self._cancels else 0)
        if events & wanted and not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _read(self) -> bool:
        """Read up to TURN_MESSAGES_MAX messages; whether there may be more."""
        for _ in range(TURN_MESSAGES_MAX):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._deliver(frames)
        return True

    def _deliver(self, frames: list[bytes]) -> None:
        id_, answer = _answer_of(frames)
        if isinstance(answer, (wire.Accepted, wire.CancelAck)):
            return
        if isinstance(answer, wire.InfoReply):
            self.info, self.info_ns = answer, clock.now_ns()
            if id_ is None:  # it was asked for by `ask_info`
                return
        mailbox = self._live.get(id_) if id_ is not None else None
        if answer is None or mailbox is None or not mailbox.put(answer):
            self._books["late"] += 1

    def _watch(self) -> None:
        """Take note of connections made and lost."""
        while not self._monitor.closed and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = int(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
            if event == _UP:
                self.connected.set()
                if self.info is not None:  # it may be another server by now
                    self.ask_info()
            elif event == _DOWN and self.connected.is_set():
                self._lost()
            else:
                self._why = _WHY.get(event, self._why)

    def _lost(self) -> None:
        while self._read():  # what came before the end still counts
            pass
        self._shut()
        self._reopening = self._loop.call_later(RECONNECT_MS / 1000, self._open)
        self.connected = anyio.Event()
        self._why = "the connection was lost and is not back yet"
        self._cancels.clear()  # the server ends what a vanished client wanted
        self._unsent.clear()  # they wait for a connection again, but not for ever
        for mailbox in self._live.values():
            mailbox.put(self.unreachable("the connection was lost while this request was running"), "lost")


def _answer_of(frames: list[bytes]) -> tuple[str | None, Answer | None]:
    """Whom a message is for, and what it says; None for one of a kind that is not known here."""
    if len(frames) != 1:
        return None, None
    try:
        answer = wire.decode_answer(frames[0])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError) as error:
        return _unreadable(frames[0], error)
    return answer.id, answer


def _unreadable(body: bytes, error: Exception) -> tuple[str | None, Answer | None]:
    try:
        head = msgspec.msgpack.decode(body, type=_Head)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError):
        return None, None
    if head.type not in _KNOWN:  # a newer server may say more than this client knows
        return None, None
    return head.id, HeadwayError("internal", f"the server's {head.type} message cannot be read: {error}")
