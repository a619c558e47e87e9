"""The workers' side of a scheduler: one ROUTER, typed link messages in and out, and who is who.

A worker is numbered when it registers; the number is never used again, so a worker that was given up and comes back is
a new one. Its heartbeats come through a socket of their own, whose name is "beat:" plus the worker's.
"""

import logging
from collections.abc import Callable, Iterator

import msgspec
import zmq

from headway.scheduler import link
from headway.scheduler.binding import Binding
from headway.scheduler.keepalive import keep_alive
from headway.scheduler.peers import MORE_NOBLOCK, NOBLOCK, Peers
from headway.scheduler.spec import Curve
from headway.scheduler.waker import Waker

log = logging.getLogger("headway.scheduler")

BEAT = b"beat:"


class Hub:
    """`receive` yields (worker number, message); `lost` yields the numbers of workers whose connection ended."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, *, curve: Curve | None, allow_public: bool
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        keep_alive(self.socket)
        self.socket.setsockopt(zmq.MAXMSGSIZE, link.LINK_BYTES_MAX)
        self.socket.set_hwm(0)  # what is sent to a worker is bounded by what it may run at once
        self.peers = Peers(self.socket)
        try:
            self.binding = Binding(self.socket, address, curve=curve, allow_public=allow_public)
        except BaseException:
            self.peers.close()
            self.socket.close(0)
            raise
        self.bad_messages = 0
        self._given = 0
        self._worker_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._identity_at: dict[int, bytes] = {}

    @property
    def address(self) -> str:
        """Where workers connect."""
        return str(self.binding.address)

    def watch(self, waker: Waker) -> list[Callable[[], None]]:
        """Wake the loop when there is something to receive."""
        return [waker.watch(self.socket), waker.watch(self.peers.monitor)]

    def receive(self) -> Iterator[tuple[int, link.FromWorker]]:
        """What workers have sent, without blocking. A message that makes no sense is counted and logged."""
        for number, identity, frames in self.peers.receive():
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames instead of 1")
                message = link.checked(link.decode_from_worker(frames[0]))
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                self.bad_messages += 1
                log.warning("a message from worker %r made no sense: %s", identity, error)
                continue
            worker = self._who(number, identity, message)
            if worker:
                yield worker, message

    def _who(self, number: int, identity: bytes, message: link.FromWorker) -> int:
        """The worker's number, registering it if that is what it asks for; 0 for a stranger."""
        if type(message) is link.Ready:
            return self._register(number, identity, message)
        name = identity.removeprefix(BEAT)
        worker = self._worker_of.get(name)
        if worker is None:
            self._send(name, link.Again())
            return 0
        return worker

    def _register(self, number: int, identity: bytes, ready: link.Ready) -> int:
        if ready.link != link.LINK:
            log.error(
                "worker %s speaks link %d, this scheduler %d: install one release", ready.name, ready.link, link.LINK
            )
            self._send(identity, link.Stop(drain=False))
            return 0
        known = self._worker_of.get(identity)
        self._send(identity, link.Welcome())
        if known is not None:
            return 0  # it only had not heard our welcome yet
        self._given += 1
        self._worker_of[identity] = self._given
        self._identity_of[self._given] = identity
        self._identity_at[number] = identity
        return self._given

    def lost(self) -> Iterator[int]:
        """Workers whose connection has ended since last asked."""
        self.peers.watch()
        gone, self.peers.gone = self.peers.gone, []
        self.peers.taken_over.clear()
        for number in gone:
            worker = self._worker_of.get(self._identity_at.pop(number, b""))
            if worker is not None:
                yield worker

    def forget(self, worker: int) -> None:
        """This number is not used any more; whoever holds the name must register again."""
        identity = self._identity_of.pop(worker, None)
        if identity is not None:
            del self._worker_of[identity]

    def send(self, worker: int, message: link.ToWorker) -> bool:
        """Whether the message could be handed over; a worker that cannot be reached is about to be found lost."""
        identity = self._identity_of.get(worker)
        return identity is not None and self._send(identity, message)

    @property
    def pending(self) -> bool:
        """Whether something waits to be received."""
        return self.peers.pending

    def broadcast(self, message: link.ToWorker) -> None:
        """To all registered workers."""
        for worker in list(self._identity_of):
            self.send(worker, message)

    def _send(self, identity: bytes, message: link.ToWorker) -> bool:
        body = link.encode(message)
        try:
            self.socket.send(identity, MORE_NOBLOCK)
            self.socket.send(body, NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Release the address and the socket."""
        self.peers.close()
        self.socket.close()
        self.binding.close()
