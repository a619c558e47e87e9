"""The server's own record of its traffic: who came when with how much, and how it ended.

Two maps for each request, so that those that were there when a process died are in it, too:

    {"v": 1, "at_ns": 1764524..., "tokens": 310, "max_new": 64, "rid": 7, "tenant": "9f2c...", "priority": 0,
     "deadline_ms": 2000, "kind": "generate", "model": "chat"}
    {"v": 1, "end": 7, "at_ns": 1764524..., "outcome": "ok", "output": 61, "queue_ms": 3.1, "ttft_ms": 40.2,
     "total_ms": 1310.9, "batch_size": 5}

`at_ns`: nanoseconds since the epoch, on the steady clock within one process. `rid` is new with each process: an ending
belongs to the last request before it that has its number. Prompts (`ids`, token ids as little-endian int32; `payload`
of a `call`) are there only if the operator asks; tenants are hashed with a salt that is never written down, unless the
operator asks for their names. `bench/sim/recording.py` reads it.
"""

import hashlib
import os

from msgspec import Struct

from headway.scheduler import clock, wire
from headway.scheduler.flight import Flight
from headway.scheduler.tape import Tape

VERSION = 1
HASH_CHARS = 12  # of a tenant's hash: enough to tell tenants apart


class Came(Struct, frozen=True, omit_defaults=True):
    """One arrival. `max_new`: most tokens that it wanted. `rid` 0: nothing is known of its ending."""

    v: int
    at_ns: int
    tokens: int
    max_new: int = 0
    tenant: str = ""
    priority: int = 0
    deadline_ms: int | None = None
    kind: str = ""
    model: str = ""
    rid: int = 0
    ids: bytes | None = None
    payload: bytes | None = None


class Went(Struct, frozen=True, omit_defaults=True):
    """One ending, of the request `end`. `outcome`: ok, or an error's code; times in milliseconds as its client was
    told them."""

    v: int
    end: int
    at_ns: int
    outcome: str
    output: int = 0
    queue_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    batch_size: int = 0


class Recorder:
    """Writes the traffic down. `prompts`: with their contents; `names`: with the tenants' own names."""

    def __init__(self, path: str, *, prompts: bool = False, names: bool = False) -> None:
        self.tape = Tape(path)
        self._prompts = prompts
        self._names = names
        self._salt = os.urandom(16)
        self._known: dict[str, str] = {"": ""}
        self._epoch_ns = int(clock.wall_s() * clock.NS_PER_S) - clock.now_ns()

    def __repr__(self) -> str:
        return f"<Recorder {self.tape!r}>"

    def came(self, flight: Flight) -> None:
        """A request that the core will hear of, or that was refused before."""
        message = flight.message
        flight.written = True
        self.tape.put(
            Came(
                v=VERSION,
                at_ns=self._epoch_ns + flight.arrived_ns,
                tokens=flight.tokens,
                max_new=flight.params.max_new_tokens if flight.params else 0,
                tenant=self._tenant(message.tenant or ""),
                priority=message.priority,
                deadline_ms=message.deadline_ms,
                kind=flight.kind or str(message.__struct_config__.tag),
                model=flight.model or message.model or "",
                rid=flight.rid,
                ids=flight.ids if self._prompts and flight.ids else None,
                payload=bytes(message.payload) if self._prompts and isinstance(message, wire.Call) else None,
            )
        )

    def went(self, flight: Flight, outcome: str) -> None:
        """Its one ending."""
        if not flight.written:
            self.came(flight)
        now_ns = clock.now_ns()
        timing = flight.timing(now_ns)
        self.tape.put(
            Went(
                v=VERSION,
                end=flight.rid,
                at_ns=self._epoch_ns + now_ns,
                outcome=outcome,
                output=len(flight.out),
                queue_ms=timing.queue_ms,
                ttft_ms=timing.ttft_ms,
                total_ms=timing.total_ms,
                batch_size=flight.batch_size,
            )
        )

    def _tenant(self, name: str) -> str:
        if self._names:
            return name
        if name not in self._known:
            if len(self._known) > TENANTS_KNOWN_MAX:
                self._known = {"": ""}
            self._known[name] = hashlib.blake2b(name.encode(), key=self._salt).hexdigest()[:HASH_CHARS]
        return self._known[name]


TENANTS_KNOWN_MAX = 10_000  # hashes that are remembered; others are computed again
