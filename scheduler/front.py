"""The clients' side of a scheduler: one ROUTER, checked messages in, bounded answers out.

A message that cannot be understood is answered, counted, and harms nothing. An answer that libzmq cannot take at the
moment waits in the client's outbox, in order. A client that does not read until its outbox is over the limit loses its
running requests with `slow_reader`; one whose connection ends loses them silently. Nothing blocks.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial

import zmq

from headway.scheduler import wire
from headway.scheduler.binding import Binding
from headway.scheduler.errors import HeadwayError
from headway.scheduler.keepalive import keep_alive
from headway.scheduler.peers import MORE_NOBLOCK, NOBLOCK, Peers
from headway.scheduler.spec import ServerSpec
from headway.scheduler.waker import Waker

log = logging.getLogger("headway.scheduler")

RETRY_NS = 5_000_000  # how often a full client is tried again
OVER_FACTOR = 1.25  # endings may still enter an outbox this far over its limit; past that they are counted as lost

Reply = Callable[[wire.ServerMessage], None]


class Client:
    """One connected client: answers that libzmq did not take yet, oldest first."""

    __slots__ = ("bytes", "identity", "number", "outbox", "reply", "slow")

    def __init__(self, number: int, identity: bytes) -> None:
        self.number = number
        self.identity = identity
        self.outbox: deque[bytes] = deque()
        self.bytes = 0
        self.slow = False
        self.reply: Reply = lambda _message: None


class Front:
    """`receive` yields (client number, message, reply); `gone` and `slow` yield client numbers."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", spec: ServerSpec) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or unknown peer is an error, not a silent drop
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # the newest connection owns a name
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_BYTES_MAX)
        keep_alive(self.socket)
        self.socket.setsockopt(zmq.SNDHWM, spec.send_hwm)
        self.socket.setsockopt(zmq.BACKLOG, 1024)
        self.peers = Peers(self.socket)
        try:
            self.binding = Binding(self.socket, spec.bind, curve=spec.curve, allow_public=spec.allow_public)
        except BaseException:
            self.peers.close()
            self.socket.close(0)
            raise
        self.counters: Counter[str] = Counter()
        self._outbox_bytes_max = spec.outbox_mib << 20
        self._clients: dict[int, Client] = {}
        self._full: dict[int, Client] = {}
        self._slow: list[int] = []
        self._unsent: list[tuple[Client, bytes, bool]] = []
        self._retry_ns = 0

    @property
    def address(self) -> str:
        """Where clients connect."""
        return str(self.binding.address)

    @property
    def pending(self) -> bool:
        """Whether something waits to be received."""
        return self.peers.pending

    @property
    def wakeup_ns(self) -> int:
        """When full clients are to be tried again, or never."""
        return self._retry_ns if self._full else 1 << 62

    def watch(self, waker: Waker) -> list[Callable[[], None]]:
        """Wake the loop when there is something to receive."""
        return [waker.watch(self.socket), waker.watch(self.peers.monitor)]

    # ------------------------------------------------------------ in

    def receive(self) -> Iterator[tuple[int, wire.ClientMessage, Reply]]:
        """What clients ask, without blocking; what makes no sense is answered here."""
        for number, identity, frames in self.peers.receive():
            client = self._clients.get(number) or self._client(number, identity)
            try:
                if len(frames) != 1:
                    raise HeadwayError("invalid_request", _frames(frames))
                message = wire.decode(frames[0])
            except HeadwayError as error:
                self._refuse(client, frames, error)
                continue
            if client.slow:
                self._refuse(client, frames, HeadwayError("slow_reader", "read the answers that are waiting first"))
                continue
            yield number, message, client.reply

    def renew(self, number: int) -> tuple[int, Reply]:
        """If this client may be two connections under one name: the newer one's number and reply; else its own."""
        renewed = self.peers.renew(number)
        if renewed == number:
            return number, self._clients[number].reply
        return renewed, self._client(renewed, self._clients[number].identity).reply

    def _client(self, number: int, identity: bytes) -> Client:
        client = self._clients.get(number)
        if client is None:
            client = self._clients[number] = Client(number, identity)
            client.reply = partial(self._reply, client)
        return client

    def _refuse(self, client: Client, frames: list[bytes], error: HeadwayError) -> None:
        self.counters["bad_messages"] += error.code != "slow_reader"
        if frames[0] == b"" and len(frames) > 1:  # a REQ socket: it would not see an answer without its delimiter
            self._send(client, wire.encode(wire.error_message(None, error)), delimiter=True)
        else:
            self._reply(client, wire.error_message(wire.id_of(frames[0]), error))

    def gone(self) -> Iterator[int]:
        """Clients whose connection has ended, or whose name went to another connection, since last asked."""
        self.peers.watch()
        for identity in self.peers.taken_over:
            self.counters["identity_taken_over"] += 1
            log.warning("identity_taken_over: a new connection calls itself %r; the earlier one's work ends", identity)
        self.peers.taken_over.clear()
        numbers, self.peers.gone = self.peers.gone, []
        for number in numbers:
            client = self._clients.pop(number, None)
            if client is not None:
                self._full.pop(number, None)
                self.counters["undelivered"] += len(client.outbox)
                yield number

    def slow(self) -> Iterator[int]:
        """Clients that went over their outbox since last asked."""
        numbers, self._slow = self._slow, []
        yield from numbers

    # ------------------------------------------------------------ out

    def _reply(self, client: Client, message: wire.ServerMessage) -> None:
        self._unsent.append((client, wire.encode(message), type(message) is wire.Delta))

    def _send(self, client: Client, body: bytes, *, delta: bool = False, delimiter: bool = False) -> None:
        if client.identity[0]:  # a name that may be another connection's by now
            self.peers.watch()
        if self.peers.identity(client.number) is None or (delta and client.slow):  # a slow one's stream is to end
            self.counters["undelivered"] += 1
            return
        if not client.outbox and self._try(client, body, delimiter=delimiter):
            return
        if self.peers.identity(client.number) is None:
            return
        if client.bytes + len(body) > self._outbox_bytes_max:
            self._too_slow(client)
            if delta or client.bytes + len(body) > OVER_FACTOR * self._outbox_bytes_max:
                self.counters["undelivered"] += 1
                return
        client.outbox.append(body)
        client.bytes += len(body)
        if client.number not in self._full:
            self._full[client.number] = client
            self.counters["full_clients"] += 1

    def _too_slow(self, client: Client) -> None:
        if not client.slow:
            client.slow = True
            self.counters["slow_readers"] += 1
            log.warning("slow_reader: client %r does not read; its running requests end", client.identity)
            self._slow.append(client.number)

    def _try(self, client: Client, body: bytes, *, delimiter: bool = False) -> bool:
        """Whether libzmq took it. A peer that is not there any more is forgotten."""
        try:
            self.socket.send(client.identity, MORE_NOBLOCK)
            if delimiter:
                self.socket.send(b"", MORE_NOBLOCK)
            self.socket.send(body, NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["undelivered"] += 1
            self.peers.drop(client.number)
            return True
        return True

    def flush(self, now_ns: int) -> None:
        """Send what this turn has answered, and try the full clients again if it is time.

        All at once at the end of a turn: libzmq's own thread is then woken once for many answers, not once for each.
        """
        unsent, self._unsent = self._unsent, []
        for client, body, delta in unsent:
            self._send(client, body, delta=delta)
        if not self._full or now_ns < self._retry_ns:
            return
        self._retry_ns = now_ns + RETRY_NS
        for client in list(self._full.values()):
            while client.outbox and self._try(client, client.outbox[0]):
                client.bytes -= len(client.outbox.popleft())
            if not client.outbox:
                client.slow = False
                self._full.pop(client.number, None)

    @property
    def waiting(self) -> int:
        """Answers in outboxes."""
        return sum(len(client.outbox) for client in self._full.values())

    def close(self) -> None:
        """Release the address; what is in outboxes is counted as undelivered."""
        self.flush(0)
        self.counters["undelivered"] += self.waiting
        self.peers.close()
        self.socket.close()
        self.binding.close()


def _frames(frames: list[bytes]) -> str:
    hint = " (a REQ socket sends an empty frame first: use DEALER)" if frames[0] == b"" else ""
    return f"a message is exactly one frame; this one has {len(frames)}{hint}"
