"""What each batch was, for people: size, why it was launched, how long it waited, what it took.

Kept for the last RECORDS_MAX batches and shown by `status`. Times are nanoseconds since the scheduler started.
"""

from collections import deque
from typing import Any

from msgspec import Struct

from headway.scheduler import actions as act
from headway.scheduler import clock
from headway.scheduler.flight import Flight

RECORDS_MAX = 1024


class BatchRecord(Struct, eq=False):
    """One batch. `running`: requests on the worker when it joined, with its own; `left`: those without an ending;
    `computed_tokens`: what a one-shot engine says it computed, padding included; `composed`: why these requests, where
    the load of experts counts."""

    batch: int
    worker: int
    worker_name: str
    model: str
    kind: str
    lane: str
    reason: str
    size: int
    running: int
    left: int
    input_tokens: int
    waited_ns: int
    at_ns: int
    compute_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    composed: str = ""

    def shown(self) -> dict[str, Any]:
        """As the status message carries it: milliseconds, rounded; what is not known yet is absent."""
        shown: dict[str, Any] = {
            "batch": self.batch,
            "worker": self.worker_name,
            "model": self.model,
            "kind": self.kind,
            "lane": self.lane,
            "reason": self.reason,
            "size": self.size,
            "running": self.running,
            "input_tokens": self.input_tokens,
            "waited_ms": _ms(self.waited_ns),
            "at_ms": _ms(self.at_ns),
            "output_tokens": self.output_tokens,
        }
        if self.composed:
            shown["composed"] = self.composed
        if self.computed_tokens:
            shown["computed_tokens"] = self.computed_tokens
        if self.compute_ns:
            shown["compute_ms"] = _ms(self.compute_ns)
        if self.first_token_ns:
            shown["ttft_ms"] = _ms(self.first_token_ns - self.at_ns + self.waited_ns)
        if self.ended_ns:
            shown["took_ms"] = _ms(self.ended_ns - self.at_ns)
            if self.output_tokens and self.ended_ns > self.at_ns:
                shown["tokens_per_s"] = round(self.output_tokens * clock.NS_PER_S / (self.ended_ns - self.at_ns), 2)
        return shown


class Records:
    """The last batches, and which of them are still running."""

    def __init__(self) -> None:
        self._kept: deque[BatchRecord] = deque(maxlen=RECORDS_MAX)
        self._open: dict[int, BatchRecord] = {}

    def last(self, most: int) -> list[dict[str, Any]]:
        """The last `most`, oldest first."""
        kept = list(self._kept)
        return [record.shown() for record in kept[len(kept) - min(most, len(kept)) :]]

    def start(self, action: act.Dispatch, worker_name: str, flights: list[Flight], at_ns: int) -> None:
        """A batch was sent to its worker."""
        record = BatchRecord(
            batch=action.batch,
            worker=action.worker,
            worker_name=worker_name,
            model=action.model,
            kind=action.kind,
            lane=action.lane,
            reason=action.reason,
            size=len(flights),
            running=action.running,
            left=len(flights),
            input_tokens=sum([flight.tokens for flight in flights]),
            waited_ns=action.waited_ns,
            at_ns=at_ns,
            composed=action.composed,
        )
        self._kept.append(record)
        self._open[action.batch] = record

    def tokens(self, batch: int, count: int, at_ns: int) -> None:
        """New tokens of one of its requests."""
        record = self._open.get(batch)
        if record is not None:
            record.output_tokens += count
            record.first_token_ns = record.first_token_ns or at_ns

    def done(self, batch: int, compute_ns: int, at_ns: int, computed_tokens: int = 0) -> None:
        """The whole batch came back, well or not."""
        record = self._open.pop(batch, None)
        if record is not None:
            record.compute_ns = compute_ns
            record.ended_ns = at_ns
            if record.kind != "call":  # a call's size is in its caller's measure
                record.computed_tokens = computed_tokens

    def ended(self, batch: int, at_ns: int) -> None:
        """One of its requests has its ending."""
        record = self._open.get(batch)
        if record is not None:
            record.left -= 1
            if not record.left:
                self.done(batch, record.compute_ns, at_ns)

    def lost(self, worker: int, at_ns: int) -> None:
        """Its worker is gone."""
        for record in [record for record in self._open.values() if record.worker == worker]:
            self.done(record.batch, record.compute_ns, at_ns)


def _ms(ns: int) -> float:
    return round(ns / clock.NS_PER_MS, 3)
