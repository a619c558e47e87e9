"""An iteration-level worker in virtual time: requests join and leave between steps, prompts are read in chunks.

A step gives every decoding row one token, and to prompts what the pace (`workers/generate/pace.py`) leaves of
`step_tokens`, divided as workers divide it (`workers/generate/shares.py`). A worker begins its next step without
waiting for what the core makes of the last one: who is sent because somebody left joins a step later. A step costs what
joins and leaves in it, not what runs: rows that will end at the same step lie in one bucket, so a run of a million
tokens is a matter of seconds.

The core is told of a row twice, at its first token and at its end; between these it decides nothing by it.
"""

from array import array
from collections.abc import Mapping

from headway.bench.sim.engines import NS_PER_MS, Engine, Noise
from headway.bench.sim.steps import Shape
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.workers.generate.pace import Pace, parts_of
from headway.workers.generate.shares import divided

Key = tuple[int, int]  # (batch, rid)


class IterationMachine:
    """One worker. `tokens`, `max_new`: of each rid; `first_ns` is written at its first token."""

    def __init__(
        self, number: int, engine: Engine, noise: Noise, tokens: list[int], max_new: list[int], first_ns: "array[int]"
    ) -> None:
        self.number = number
        self.busy_ns = 0
        self.gaps: list[tuple[int, int]] = []  # (time between two tokens of a row, rows): for the inter-token times
        self._engine = engine
        self._noise = noise
        self._tokens = tokens
        self._max_new = max_new
        self._first_ns = first_ns
        self._pace = Pace((engine.a_ms * NS_PER_MS, engine.b_ms * NS_PER_MS, engine.m_ms * NS_PER_MS))
        steps = engine.steps
        self._gap_ns, self._wake_ns = (
            (round(steps.gap_ms * NS_PER_MS), round(steps.wake_ms * NS_PER_MS)) if steps is not None else (0, 0)
        )
        self._reading: dict[Key, int] = {}  # what is left to read, oldest first
        self._late: dict[Key, int] = {}  # these have missed the step that begins
        self._between = False  # a step has ended, and the next has not begun
        self._decoding: dict[Key, int] = {}  # the step at whose end the row ends
        self._ending: dict[int, list[Key]] = {}
        self._dropped: list[Key] = []
        self._shares: list[tuple[Key, int]] = []
        self._stepping = False
        self._step = 0
        self._took_ns = 0
        self._last_ns = 0
        self._shape = Shape(0)
        self._slots = 0  # of all decoding rows

    def __repr__(self) -> str:
        return f"<IterationMachine {self.number}: {len(self._reading)} reading, {len(self._decoding)} decoding>"

    def take(self, action: act.Dispatch) -> None:
        """These join at the next step; the one after it, if a worker would have begun it already."""
        busy = self._between and bool(self._reading or self._decoding)
        joining = self._late if busy else self._reading
        for rid in action.rids:
            joining[(action.batch, rid)] = max(1, self._tokens[rid])

    def drop(self, action: act.Drop) -> None:
        """These leave at the next step."""
        self._dropped += [(action.batch, rid) for rid in action.rids]

    def begin(self, now_ns: int) -> int | None:
        """Start a step if there is work and none runs; returns when it ends."""
        goes_on, self._between = self._between, False
        if self._stepping or not (self._reading or self._decoding):
            return None
        decoding, reading = len(self._decoding), len(self._reading)
        read = max([self._written(key) for key in self._reading], default=0)
        room = self._pace.room(decoding, self._engine.step_tokens, reading, read) if reading else 0
        self._shares = shared_out(self._reading, room)
        self._shape = self._shaped()
        self._reading |= self._late
        self._late.clear()
        self._stepping = True
        self._took_ns = self._noise(self._engine.step_ns(self._shape))
        return now_ns + (self._gap_ns if goes_on else self._wake_ns) + self._took_ns

    def _written(self, key: Key) -> int:
        """How much of its prompt has been read."""
        return max(1, self._tokens[key[1]]) - self._reading[key]

    def _shaped(self) -> Shape:
        pieces = [(self._written(key), share) for key, share in self._shares]
        return Shape.of(len(self._decoding), sum([share for _, share in pieces]), self._slots, pieces)

    def _observed(self, spent_ns: int) -> None:
        """What the pace is told: a piece of one token is a row to it."""
        rows, tokens, looked_back = parts_of((self._written(key), share) for key, share in self._shares)
        self._pace.observe(len(self._decoding) + rows, tokens, spent_ns, looked_back)

    def end(self, now_ns: int) -> ev.Event:
        """The step ends: what the worker reports."""
        self._stepping, self._between = False, True
        self._step += 1
        self.busy_ns += self._took_ns
        shape = self._shape
        self._observed(self._took_ns)
        if self._decoding:
            self.gaps.append((now_ns - self._last_ns, len(self._decoding)))
        self._last_ns = now_ns
        self._slots += len(self._decoding)
        rows = self._ended()
        for key, share in self._shares:
            left = self._reading[key] - share
            if left:
                self._reading[key] = left
                continue
            del self._reading[key]
            batch, rid = key
            self._first_ns[rid] = now_ns
            more = self._max_new[rid] - 1
            rows.append(ev.RowDone(batch, rid, 1, "" if more > 0 else "length"))
            if more > 0:
                self._decoding[key] = self._step + more
                self._ending.setdefault(self._step + more, []).append(key)
                self._slots += self._length(key)
        rows += self._leave()
        return ev.StepDone(self.number, self._took_ns, shape.rows + shape.read, shape.rows + shape.chunks, tuple(rows))

    def _length(self, key: Key) -> int:
        """What a decoding row reads of the cache in its next step: its text so far."""
        rid = key[1]
        return self._tokens[rid] + self._max_new[rid] - (self._decoding[key] - self._step)

    def _ended(self) -> list[ev.RowDone]:
        rows = []
        for key in self._ending.pop(self._step, ()):
            if key in self._decoding:
                self._slots -= self._length(key)
                del self._decoding[key]
                rows.append(ev.RowDone(*key, self._max_new[key[1]] - 1, "length"))
        return rows

    def _leave(self) -> list[ev.RowDone]:
        gone = []
        for key in self._dropped:
            if key in self._decoding:
                self._slots -= self._length(key)
                del self._decoding[key]
                gone.append(key)
            elif self._reading.pop(key, 0) or self._late.pop(key, 0):
                gone.append(key)
        self._dropped.clear()
        return [ev.RowDone(*key, 0, "dropped") for key in gone]


def shared_out(reading: Mapping[Key, int], room: int) -> list[tuple[Key, int]]:
    """Who reads how many of its `reading` tokens that are left, oldest first, in a step with `room` for so many."""
    if not reading:
        return []
    shares = divided([*reading.values()], room)
    return [(key, share) for key, share in zip(reading, shares, strict=True) if share]
