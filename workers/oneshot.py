"""A one-shot engine over one plain function: a batch goes in, one outcome for each request comes out.

Lives here: the queue of batches, cancelling before a start, and the translation of what a function may do wrong (too
few results, an exception for one, an exception for all, no memory left) into reports. Never here: what the function
computes, a thread, a socket. Results are matched by position and checked by request id, so that a missing one is an
error and never a shift.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway.scheduler.clock import now_ns
from headway.scheduler.errors import CODES, HeadwayError
from headway.scheduler.link import Card, Done, Failed, Item, Outcome, Routed
from headway.workers.ceiling import STRIKES, Ceiling, free_caches
from headway.workers.engine import Report

log = logging.getLogger("headway.worker")

MESSAGE_CHARS_MAX = 2000  # an error goes to a client: some frameworks put whole tensors into theirs

# Out of memory as frameworks say it without a type of its own: the CPU allocator, CUDA libraries.
_MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class Routing(NamedTuple):
    """What the last run says of experts: see link.Step."""

    reports: list[Routed]
    critical: int = 0
    active: int = 0


RunItems = Callable[[Sequence[Item]], Sequence[Outcome | BaseException]]


def code_of(error: BaseException) -> str:
    """The error code that `error` stands for: its own, out_of_memory or engine_error."""
    if isinstance(error, HeadwayError) and error.code in CODES:
        return error.code
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS):
        return "out_of_memory"
    return "engine_error"


def device_lost(error: BaseException) -> bool:
    """Whether the device can compute nothing more for this process (a CUDA assertion, an ECC fault): only a new process
    helps, and whoever is asked next would fail for nothing."""
    said = type(error).__name__ == "AcceleratorError" or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )
    return said and code_of(error) == "engine_error"


def text_of(error: BaseException) -> str:
    """`error` in one line for a client: its type and what it says."""
    said = error.message if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
    return said if len(said) <= MESSAGE_CHARS_MAX else said[:MESSAGE_CHARS_MAX] + " ..."


def input_tokens(items: Sequence[Item]) -> int:
    """Input tokens without padding; a request without ids counts a quarter of its payload's bytes, as everywhere."""
    total = 0
    for item in items:
        size = len(item.ids) + len(item.ids_pair) or memoryview(item.payload).nbytes
        total += (size + 3) >> 2
    return total


class OneShot:
    """An engine that runs one queued batch in each step.

    `run(items)` returns one Outcome (or an exception, for that request only) for each item, in order. If it raises, the
    whole batch has failed and the scheduler finds the culprit; one that means that the device is lost goes through, and
    ends the worker; out of memory, it runs again here, in halves. `tokens(items)`, asked after `run(items)`, is what it
    computed, padding included, for the cost model; by default the input tokens. `routing(batch)`, asked likewise: which
    experts it took; only of a model that has some.
    """

    def __init__(
        self,
        card: Card,
        run: RunItems,
        *,
        tokens: Callable[[Sequence[Item]], int] = input_tokens,
        close: Callable[[], None] | None = None,
        routing: Callable[[int], Routing] | None = None,
    ) -> None:
        self._card = card
        self._run = run
        self._tokens = tokens
        self._close = close
        self._routing = routing
        self._ceiling = Ceiling(max(1, card.max_batch))  # requests run together
        self._queue: dict[int, Sequence[Item]] = {}  # insertion order is running order
        self._dropped: dict[int, set[int]] = {}

    def __repr__(self) -> str:
        return f"<OneShot {self._card.name} {self._card.kind}, {len(self._queue)} batches waiting>"

    @property
    def card(self) -> Card:
        return self._card

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def add(self, batch: int, items: Sequence[Item]) -> None:
        if batch in self._queue:
            raise ValueError(f"batch {batch} is waiting already")
        self._queue[batch] = items

    def cancel(self, batch: int, rids: Sequence[int]) -> None:
        if batch in self._queue:
            self._dropped.setdefault(batch, set()).update(rids)

    def step(self) -> list[Report]:
        if not self._queue:
            return []
        batch = next(iter(self._queue))
        items = self._queue.pop(batch)
        dropped = self._dropped.pop(batch, None)
        if not dropped:
            return [self._attempt(batch, items, [])]
        gone = [_cancelled(item) for item in items if item.rid in dropped]
        return [self._attempt(batch, [item for item in items if item.rid not in dropped], gone)]

    def close(self) -> None:
        self._queue.clear()
        self._dropped.clear()
        if self._close is not None:
            self._close()

    def _attempt(self, batch: int, items: Sequence[Item], gone: list[Outcome]) -> Report:
        """Run `items`, all at once if memory suffices, and report it."""
        began_ns, shortages = now_ns(), self._ceiling.shortages
        outcomes: list[Outcome] = []
        spent_ns = tokens = strikes = 0
        told: list[Routing] = []
        try:
            while len(outcomes) < len(items):
                part = items[len(outcomes) : len(outcomes) + self._ceiling.limit]
                done, took_ns, computed, said = self._part(part)
                spent_ns, tokens = spent_ns + took_ns, tokens + computed
                if done and self._routing is not None:
                    told.append(self._routing(batch))
                strikes = strikes + 1 if said and len(part) == 1 else 0
                if strikes == STRIKES:  # it does not fit even alone
                    done, strikes = [Outcome(part[0].rid, code="out_of_memory", message=said)], 0
                outcomes += done
        except Exception as error:
            if device_lost(error):
                raise
            return Failed(batch, code_of(error), text_of(error), compute_ns=now_ns() - began_ns)
        return Done(
            batch,
            spent_ns,
            tokens,
            outcomes + gone,
            routed=[report for one in told for report in one.reports],
            critical=sum(one.critical for one in told),
            active=sum(one.active for one in told),
            shortages=self._ceiling.shortages - shortages,
        )

    def _part(self, items: Sequence[Item]) -> tuple[list[Outcome], int, int, str]:
        """Outcomes of these items, time and tokens computed; or none, and why: memory did not suffice."""
        began_ns = now_ns()
        try:
            results = self._run(items)
            spent_ns = now_ns() - began_ns
            outcomes, tokens = _matched(items, results), self._tokens(items)
        except Exception as error:
            if code_of(error) != "out_of_memory":
                raise
            said = text_of(error)
        else:
            self._ceiling.held(len(items))
            return outcomes, spent_ns, tokens, ""
        free_caches()
        limit = self._ceiling.short(len(items))
        log.warning("out of memory with a batch of %d; at most %d from now on (%s)", len(items), limit, said)
        return [], 0, 0, said


def _cancelled(item: Item) -> Outcome:
    return Outcome(item.rid, code="cancelled", message="dropped before its batch started")


def check_count(results: Sequence[object], items: Sequence[Item]) -> None:
    """Raise if there is not one result for each item: which belongs to which can then not be known."""
    if len(results) != len(items):
        raise HeadwayError("engine_error", f"the engine returned {len(results)} results for {len(items)} inputs")


def _matched(items: Sequence[Item], results: Sequence[Outcome | BaseException]) -> list[Outcome]:
    """The outcomes, each certain to belong to its item."""
    check_count(results, items)
    outcomes = []
    for item, result in zip(items, results, strict=True):
        if isinstance(result, BaseException):
            result = Outcome(item.rid, code=code_of(result), message=text_of(result))
        elif result.rid != item.rid:
            raise HeadwayError("engine_error", f"the engine answered request {result.rid} in place of {item.rid}")
        outcomes.append(result)
    return outcomes
