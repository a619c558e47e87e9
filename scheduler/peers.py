"""Which connection a ROUTER's identity stands for, and when that connection is gone.

ZeroMQ tells a ROUTER only a peer's identity. Two facts are added here. The socket's monitor says when a connection is
accepted and when it ends; a received frame says which file descriptor it came through. Together they tell a peer that
went away from one that is quiet, at once and without heartbeats, and a newcomer from the dead holder of the same name.

An identity that libzmq made up (it begins with a zero byte) belongs to one connection for ever, so only its first
message is looked at. A name that the peer chose is looked at each time: the newest connection owns it (handover).
One doubt remains: if a connection came and went between two looks and the next one has its descriptor, a message may be
of either. Such a peer is `unsure`; its owner settles the doubt with `renew` when two requests contradict each other.
"""

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
NOBLOCK = int(zmq.NOBLOCK)  # plain integers: combining or passing the enum costs more than the call itself
MORE_NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK)
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
DRAIN_MAX = 512  # messages taken in one turn; the others keep their place in the socket


class Peers:
    """Numbers for the connections of a bound ROUTER. A number is given once and never used again.

    `receive` yields (number, identity, frames); `gone` collects numbers whose connection has ended or been taken over
    since last asked, `taken_over` those of them whose name went to another connection.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self.monitor = socket.get_monitor_socket(WATCHED)
        self.gone: list[int] = []
        self.taken_over: list[bytes] = []
        self._number_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._fd_of: dict[int, tuple[int, int]] = {}
        self._at_fd: dict[int, int] = {}
        self._generation: dict[int, int] = {}
        self._missed: set[int] = set()  # descriptors of connections that ended before any message was seen
        self._unsure: set[int] = set()
        self._given = 0

    def __len__(self) -> int:
        return len(self._number_of)

    @property
    def pending(self) -> bool:
        """Whether a message waits. To be asked after sending: a send takes the edge of a waiting message away."""
        return bool(int(self.socket.getsockopt(EVENTS)) & POLLIN)

    def close(self) -> None:
        """Stop watching; the socket itself is its owner's."""
        self.socket.disable_monitor()
        self.monitor.close(0)

    def identity(self, number: int) -> bytes | None:
        """Where to send for this number; None once its connection is gone."""
        return self._identity_of.get(number)

    def receive(self, most: int = DRAIN_MAX) -> Iterator[tuple[int, bytes, list[bytes]]]:
        """The messages that are here, without blocking."""
        socket = self.socket
        for _ in range(most):
            try:
                identity = socket.recv(NOBLOCK)
            except zmq.Again:
                return
            frame = socket.recv(NOBLOCK, copy=False)  # it knows whether more follow: asking the socket costs more
            number = self._number_of.get(identity)
            if number is None or identity[0]:
                number = self._look(identity, frame)
            frames = [frame.bytes]
            while frame.more:
                frame = socket.recv(NOBLOCK, copy=False)
                frames.append(frame.bytes)
            yield number, identity, frames

    def _look(self, identity: bytes, frame: zmq.Frame) -> int:
        """Find the connection that a frame came through."""
        fd = int(frame.get(zmq.SRCFD))
        self.watch()
        here = (fd, self._generation.get(fd, 0))
        number = self._number_of.get(identity)
        if number is not None and self._fd_of[number] != here:
            self.taken_over.append(identity)
            self._forget(number)
            number = None
        if number is None:
            number = self._meet(identity, here)
        return number

    def _meet(self, identity: bytes, here: tuple[int, int]) -> int:
        before = self._at_fd.get(here[0])
        if before is not None:  # its end has not been seen, but its descriptor is somebody else's now
            self._forget(before)
        self._given += 1
        self._number_of[identity] = self._given
        self._identity_of[self._given] = identity
        self._fd_of[self._given] = here
        self._at_fd[here[0]] = self._given
        if here[0] in self._missed:
            self._missed.discard(here[0])
            if identity[0]:
                self._unsure.add(self._given)
        return self._given

    def renew(self, number: int) -> int:
        """A new number for an unsure peer, whose old one is gone with this; the same number for any other."""
        if number not in self._unsure:
            return number
        identity, here = self._identity_of[number], self._fd_of[number]
        self.taken_over.append(identity)
        self._forget(number)
        return self._meet(identity, here)

    def _forget(self, number: int) -> None:
        identity = self._identity_of.pop(number)
        if self._number_of.get(identity) == number:
            del self._number_of[identity]
        fd, _ = self._fd_of.pop(number)
        if self._at_fd.get(fd) == number:
            del self._at_fd[fd]
        self._unsure.discard(number)
        self.gone.append(number)

    def drop(self, number: int) -> None:
        """The owner found that this peer cannot be reached."""
        if number in self._identity_of:
            self._forget(number)

    def watch(self) -> None:
        """Take in what the monitor has to say."""
        while True:
            try:
                event = recv_monitor_message(self.monitor, NOBLOCK)
            except zmq.Again:
                return
            fd = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._generation[fd] = self._generation.get(fd, 0) + 1
            elif fd in self._at_fd:
                self._forget(self._at_fd[fd])
            else:
                self._missed.add(fd)
