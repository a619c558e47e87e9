"""The shell of a trial: stands before two servers, hands each request to one of them, and passes answers back.

Each client has a socket of its own towards each server, so that both see every client apart: limits, ids and fairness
stay theirs. Messages pass unchanged; of each only its type and id are read. A request that B does not answer within
`limit_ms` gets its ending here, and what may still come of it is dropped; what A does is A's affair. Clients that are
gone take their sockets along, and the servers cancel what they had running. Loopback and ipc only: there is no
encryption here.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from headway.bench.ab.trial import Arm, Trial
from headway.scheduler import clock, wire
from headway.scheduler.binding import check_private
from headway.scheduler.errors import CODES, known

CLIENTS_MAX = 256  # with two sockets each; past it the one that has been silent longest is forgotten
LATE_MAX = 10_000  # requests that were given up here, whose late answers are dropped
TICK_MS = 25  # how late an answer that does not come may be noticed
CLIENTS_FAULT = (400, 404, 409, 413)
REQUESTS = tuple(str(kind.__struct_config__.tag) for kind in wire.Request.__args__)


class Peek(msgspec.Struct):
    """What is read of a message."""

    type: str = ""
    id: str | None = None
    code: str = ""


@dataclass(eq=False)
class Caller:
    """One client: its sockets, and its requests that run, id -> (arm, since)."""

    name: bytes
    sockets: dict[Arm, "zmq.Socket[bytes]"]
    open: dict[str, tuple[Arm, int]] = field(default_factory=dict)


class Split:
    """Binds to `address` at once; `run` serves until `stop` says so."""

    def __init__(self, address: str, a: str, b: str, trial: Trial, told: Callable[[str], None]) -> None:
        check_private(address, curve=False, allow_public=False)
        self.trial, self._told = trial, told
        self._addresses: dict[Arm, str] = {"a": a, "b": b}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind(address)
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()
        self._of: dict[zmq.Socket[bytes], tuple[Caller, Arm]] = {}
        self._late: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self._peek = msgspec.msgpack.Decoder(Peek).decode

    def __repr__(self) -> str:
        return f"<Split {self.address}: {len(self._callers)} clients, {self.trial!r}>"

    def run(self, stop: Callable[[], bool]) -> None:
        """Pass messages on, both ways."""
        try:
            while not stop():
                for socket, _ in self._poller.poll(TICK_MS):
                    self._ask() if socket is self._front else self._answer(socket)
                self._give_up(clock.now_ns())
        finally:
            self._context.destroy(0)

    # ------------------------------------------------------------ towards the servers

    def _ask(self) -> None:
        name, *frames = self._front.recv_multipart()
        caller = self._callers.get(name) or self._join(name)
        self._callers.move_to_end(name)
        peek = self._read(frames[-1]) if frames else Peek()
        arm: Arm = "a"
        if peek.id is not None and peek.type in REQUESTS and peek.id not in caller.open:
            arm = self.trial.arm()
            caller.open[peek.id] = (arm, clock.now_ns())
            self._late.pop((name, peek.id), None)
        elif peek.id in caller.open:
            arm = caller.open[peek.id][0]  # a cancel, or the same id again, which its server refuses
        caller.sockets[arm].send_multipart(frames)

    def _join(self, name: bytes) -> Caller:
        if len(self._callers) >= CLIENTS_MAX:
            self._leave(next(iter(self._callers)))
        sockets: dict[Arm, zmq.Socket[bytes]] = {}
        for arm, address in self._addresses.items():
            sockets[arm] = self._context.socket(zmq.DEALER)
            sockets[arm].setsockopt(zmq.LINGER, 0)
            sockets[arm].connect(address)
            self._poller.register(sockets[arm], zmq.POLLIN)
        caller = self._callers[name] = Caller(name, sockets)
        self._of |= {socket: (caller, arm) for arm, socket in sockets.items()}
        return caller

    def _leave(self, name: bytes) -> None:
        for socket in self._callers.pop(name).sockets.values():
            self._poller.unregister(socket)
            del self._of[socket]
            socket.close()

    # ------------------------------------------------------------ back to the clients

    def _answer(self, socket: "zmq.Socket[bytes]") -> None:
        if socket not in self._of:  # its client left in this turn
            return
        caller, arm = self._of[socket]
        frames = socket.recv_multipart()
        peek = self._read(frames[-1])
        if peek.id is not None:
            if (caller.name, peek.id) in self._late and peek.id not in caller.open:
                return
            if peek.type in ("result", "error") and peek.id in caller.open:
                where, since_ns = caller.open[peek.id]
                if where == arm and peek.code != "duplicate_id":
                    del caller.open[peek.id]
                    self._observe(arm, clock.now_ns() - since_ns, peek)
        self._send(caller, frames)

    def _observe(self, arm: Arm, took_ns: int, peek: Peek) -> None:
        """A client's own fault, or its own wish, says nothing of a server."""
        if peek.type == "error" and (peek.code == "cancelled" or CODES[known(peek.code)].http in CLIENTS_FAULT):
            return
        was_over = self.trial.over
        self.trial.observe(arm, took_ns / clock.NS_PER_MS, peek.type == "result")
        if self.trial.over and not was_over:
            self._told(f"{self.trial.verdict}: {self.trial.words()}")

    def _give_up(self, now_ns: int) -> None:
        """End what B has not answered in time."""
        limit_ns = int(self.trial.limit_ms * clock.NS_PER_MS)
        for caller in list(self._callers.values()):
            for id_, (arm, since_ns) in list(caller.open.items()):
                if arm == "a" or now_ns - since_ns < limit_ns:
                    continue
                del caller.open[id_]
                self._late[caller.name, id_] = None
                if len(self._late) > LATE_MAX:
                    self._late.popitem(last=False)
                caller.sockets[arm].send(wire.encode(wire.Cancel(id=id_)))
                lost = CODES["worker_lost"]
                words = f"the server under trial did not answer within {self.trial.limit_ms:g} ms"
                error = wire.Error(id=id_, code="worker_lost", message=words, retryable=lost.retryable, http=lost.http)
                self._observe(arm, now_ns - since_ns, Peek("error", id_, "worker_lost"))
                self._send(caller, [wire.encode(error)])

    def _send(self, caller: Caller, frames: list[bytes]) -> None:
        try:
            self._front.send_multipart([caller.name, *frames], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if caller.name in self._callers:  # gone, or not reading: its servers will see the same of us
                self._leave(caller.name)

    def _read(self, body: bytes) -> Peek:
        try:
            return self._peek(body)
        except msgspec.MsgspecError:
            return Peek()
