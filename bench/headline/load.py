"""The load: the same raw client for every server, open loop (times are kept, whatever the answers do) or closed.

In an open loop latency counts from when a request was due, not from when it was sent: a client that falls behind would
otherwise forgive the server.
"""

import random
from collections.abc import Sequence

import msgspec
import zmq

from headway.bench.generate.work import Answer, Work
from headway.scheduler import clock

SILENCE_MS = 300_000  # without any message: the server is broken

Plan = (
    Sequence[int] | int
)  # when each request is due, nanoseconds from the start; or how many clients run a closed loop


class Player:
    """Sends `work` to a server as planned."""

    def __init__(self, address: str, work: Sequence[Work], plan: Plan) -> None:
        self._work, self._plan = work, plan
        self._next = 0
        self._open: dict[str, int] = {}
        self._sent: dict[int, int] = {}
        self._stamps: list[list[int]] = [[] for _ in work]
        self._tokens: list[list[int]] = [[] for _ in work]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def run(self) -> list[Answer]:
        """All answers, in the order of the work. Raises RuntimeError for an error or a server that says nothing."""
        try:
            self._began_ns = clock.now_ns()
            heard_ns = self._began_ns
            while self._next < len(self._work) or self._open:
                now_ns = clock.now_ns()
                self._send_due(now_ns)
                if self._socket.poll(self._wait_ms(now_ns)):
                    heard_ns = clock.now_ns()
                    self._hear(heard_ns)
                elif self._open and clock.now_ns() - heard_ns > SILENCE_MS * clock.NS_PER_MS:
                    raise RuntimeError(f"no message in {SILENCE_MS // 1000} s; {len(self._open)} requests are open")
        finally:
            self._context.destroy(0)
        whole = zip(self._stamps, self._tokens, strict=True)
        return [Answer(self._sent[at], stamps, tokens) for at, (stamps, tokens) in enumerate(whole)]

    def _send_due(self, now_ns: int) -> None:
        while self._next < len(self._work):
            if isinstance(self._plan, int):
                if len(self._open) >= self._plan:
                    return
                due_ns = now_ns
            else:
                due_ns = self._began_ns + self._plan[self._next]
                if due_ns > now_ns:
                    return
            at, one = self._next, self._work[self._next]
            self._next += 1
            self._sent[at], self._open[str(at)] = due_ns, at
            message = {"type": "generate", "id": str(at), "input_ids": one.ids, "stream": True}
            params = {"max_new_tokens": one.new, "temperature": 0.0, "ignore_eos": True}
            self._socket.send(msgspec.msgpack.encode(message | {"params": params}))

    def _wait_ms(self, now_ns: int) -> int:
        if isinstance(self._plan, int) or self._next >= len(self._work):
            return 1000
        left_ns = self._began_ns + self._plan[self._next] - now_ns
        return max(0, min(1000, left_ns // clock.NS_PER_MS))

    def _hear(self, now_ns: int) -> None:
        answer = msgspec.msgpack.decode(self._socket.recv())
        at = self._open.get(str(answer.get("id")))
        if at is None:
            return
        if answer["type"] == "delta":
            self._stamps[at] += [now_ns] * len(answer["token_ids"])
            self._tokens[at] += answer["token_ids"]
        elif answer["type"] == "result":
            del self._open[str(at)]
        elif answer["type"] == "error":
            raise RuntimeError(f"request {at} of {len(self._work)}: {answer['code']}: {answer['message']}")


def poisson(count: int, rate: float, seed: int) -> list[int]:
    """When `count` requests are due, at `rate` a second."""
    rng, at_s, due = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        due.append(int(at_s * clock.NS_PER_S))
    return due


def from_trace(path: str, count: int, rate: float) -> list[int]:
    """The first arrivals of a trace, set to `rate` requests a second. Raises ConfigError."""
    from headway.bench.sim.arrivals import Arrivals
    from headway.bench.sim.sources import open_source
    from headway.scheduler.config import ConfigError

    traffic = open_source(path, seed=0, start_s=None, span_s=0, limit=count, lengths=None)
    if not isinstance(traffic, Arrivals):
        raise ConfigError(f"{path} is a closed loop; a trace says when requests come")
    due: list[int] = traffic.at_rate(rate).at_ns.tolist()
    if len(due) < count:
        raise ConfigError(f"{path} has {len(due)} requests, {count} are needed")
    return due
