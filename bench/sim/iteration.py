"""An iteration-level worker in virtual time: requests join and leave between steps, prompts are read in chunks.

A step gives every decoding row one token and what is left of `step_tokens` to prompts: the one with least left to read
first, while the oldest keeps a quarter (as `workers/generate` does it). A step costs what joins and leaves in it, not
what runs: rows that will end at the same step lie in one bucket, so a run of a million tokens is a matter of seconds.

The core is told of a row twice, at its first token and at its end; between these it decides nothing by it.
"""

from array import array

from headway.bench.sim.engines import Engine, Noise
from headway.scheduler import actions as act
from headway.scheduler import events as ev

OLDEST_SHARE = 4

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
        self._reading: dict[Key, int] = {}  # what is left to read, oldest first
        self._decoding: dict[Key, int] = {}  # the step at whose end the row ends
        self._ending: dict[int, list[Key]] = {}
        self._dropped: list[Key] = []
        self._shares: list[tuple[Key, int]] = []
        self._stepping = False
        self._step = 0
        self._took_ns = 0
        self._last_ns = 0
        self._in_step = (0, 0)

    def __repr__(self) -> str:
        return f"<IterationMachine {self.number}: {len(self._reading)} reading, {len(self._decoding)} decoding>"

    def take(self, action: act.Dispatch) -> None:
        """These join at the next step."""
        for rid in action.rids:
            self._reading[(action.batch, rid)] = max(1, self._tokens[rid])

    def drop(self, action: act.Drop) -> None:
        """These leave at the next step."""
        self._dropped += [(action.batch, rid) for rid in action.rids]

    def begin(self, now_ns: int) -> int | None:
        """Start a step if there is work and none runs; returns when it ends."""
        if self._stepping or not (self._reading or self._decoding):
            return None
        decoding = len(self._decoding)
        self._shares = self._plan(max(1, self._engine.step_tokens - decoding))
        read = sum([share for _, share in self._shares])
        rows = decoding + len(self._shares)
        self._in_step = (read + decoding, rows)
        self._stepping = True
        self._took_ns = self._noise(self._engine.step_ns(read + decoding, rows))
        return now_ns + self._took_ns

    def _plan(self, budget: int) -> list[tuple[Key, int]]:
        reading = self._reading
        if not reading:
            return []
        oldest = next(iter(reading))
        kept = min(reading[oldest], max(1, budget // OLDEST_SHARE))
        shares = {oldest: kept}
        budget -= kept
        for key in sorted(reading, key=reading.__getitem__):
            if budget <= 0:
                break
            more = min(budget, reading[key] - shares.get(key, 0))
            if more:
                shares[key] = shares.get(key, 0) + more
                budget -= more
        return list(shares.items())

    def end(self, now_ns: int) -> ev.Event:
        """The step ends: what the worker reports."""
        self._stepping = False
        self._step += 1
        self.busy_ns += self._took_ns
        if self._decoding:
            self.gaps.append((now_ns - self._last_ns, len(self._decoding)))
        self._last_ns = now_ns
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
        rows += self._leave()
        tokens, running = self._in_step
        return ev.StepDone(self.number, self._took_ns, tokens, running, tuple(rows))

    def _ended(self) -> list[ev.RowDone]:
        due = [key for key in self._ending.pop(self._step, ()) if self._decoding.pop(key, 0)]
        return [ev.RowDone(batch, rid, self._max_new[rid] - 1, "length") for batch, rid in due]

    def _leave(self) -> list[ev.RowDone]:
        gone = [key for key in self._dropped if self._reading.pop(key, 0) or self._decoding.pop(key, 0)]
        self._dropped.clear()
        return [ev.RowDone(*key, 0, "dropped") for key in gone]
