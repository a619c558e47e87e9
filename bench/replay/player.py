"""Fires shots at their times, and never waits for an answer before the next: an open loop.

A request's latency counts from the time it should have gone. Where the replayer itself is late, or holds a request back
for want of a place (`concurrency`), that is part of what a user would have waited, and is shown apart; a replayer that
left it out would praise a server for being slow (coordinated omission). Each time is counted from the start, so that
no lateness adds up. A closed loop is the other way: so many clients, each of which waits for its answer, thinks, and
sends again; there the time it should have gone is the time it went.
"""

import asyncio
import random
import selectors
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

import anyio

from headway.bench.replay.plan import Shot
from headway.bench.replay.seen import OK, Note, Seen
from headway.bench.replay.targets import Target
from headway.scheduler import clock
from headway.scheduler.errors import HeadwayError

AHEAD_MAX = 64  # shots that are made ready before their time
TOLD_EVERY = 64  # endings between two words to whoever watches: a bar on a screen costs more than a request
AHEAD_NS = 2 * clock.NS_PER_MS  # as long as there is so much time until the next

EARLY_NS_MAX = clock.NS_PER_MS  # by so much at most a timer is set before its time
EARLIER, LATER = 0.5, 1 / 32  # how fast that follows a timer that was sooner than expected, or later

Told = Callable[[int, int], None]  # fired, ended
T = TypeVar("T")


class Timers:
    """How late timers surely are: the system wakes a sleeper some tens of microseconds late, on some machines half a
    millisecond. They are set earlier by nearly the least of that, and what is left is waited for turn by turn, which
    costs little."""

    def __init__(self) -> None:
        self.early_ns = 0

    def __repr__(self) -> str:
        return f"<Timers {self.early_ns / 1000:.0f} us early>"

    def woke(self, late_ns: int) -> None:
        """A timer was so late."""
        gap = late_ns - self.early_ns
        self.early_ns += int(gap * (EARLIER if gap < 0 else LATER))
        self.early_ns = max(0, min(EARLY_NS_MAX, self.early_ns))


class Player:
    """One replay. `start_ns`: when its time 0 is. `concurrency`: requests under way at most, 0 for no limit."""

    def __init__(
        self, target: Target, start_ns: int, *, concurrency: int = 0, told: Told | None = None, seed: int = 0
    ) -> None:
        self.seen: list[Seen] = []
        self._target = target
        self._start_ns = start_ns
        self._places = asyncio.Semaphore(concurrency) if concurrency else None
        self._told = told
        self._ended = 0
        self._timers = Timers()
        self._rng = random.Random(seed)

    def __repr__(self) -> str:
        return f"<Player {len(self.seen)} fired, {self._ended} ended>"

    # ------------------------------------------------------------ open loop

    async def play(self, shots: Sequence[Shot]) -> list[Seen]:
        """All of them, in order of their times. Returns when each has its ending."""
        ahead: deque[tuple[Shot, object]] = deque()
        coming = iter(shots)
        async with _tasks() as start:
            while self._make_ready(ahead, coming):
                shot, ready = ahead.popleft()
                await self._until(shot.at_ns)
                start(self._one(shot, ready, self._begin(shot, shot.at_ns)))
        return self.seen

    def _make_ready(self, ahead: "deque[tuple[Shot, object]]", coming: Any) -> bool:
        """Prepare the next ones while there is time; whether there is one."""
        while len(ahead) < AHEAD_MAX and (not ahead or self._now_ns() + AHEAD_NS < ahead[0][0].at_ns):
            shot = next(coming, None)
            if shot is None:
                break
            ahead.append((shot, self._target.load(shot)))
        return bool(ahead)

    async def _until(self, at_ns: int) -> None:
        left_ns = at_ns - self._now_ns()
        if left_ns > 0:
            early_ns = self._timers.early_ns
            if left_ns > early_ns:
                await asyncio.sleep((left_ns - early_ns) / clock.NS_PER_S)
                self._timers.woke(self._now_ns() - at_ns + early_ns)
            while self._now_ns() < at_ns:  # noqa: ASYNC110 - what is waited for is the clock
                await asyncio.sleep(0)
        elif not len(self.seen) % AHEAD_MAX:  # a long burst must not keep answers from being read
            await asyncio.sleep(0)

    # ------------------------------------------------------------ closed loop

    async def play_closed(self, shots: Sequence[Shot], clients: int, think_ns: int) -> list[Seen]:
        """`clients` at once; thinking is exponential around `think_ns`. Times of shots are not used."""
        coming = iter(shots)

        async def client() -> None:
            for shot in coming:  # shared by all
                if think_ns:
                    await asyncio.sleep(self._rng.expovariate(1.0) * think_ns / clock.NS_PER_S)
                ready = self._target.load(shot)
                await self._one(shot, ready, self._begin(shot, max(0, self._now_ns())))

        await self._until(0)
        async with _tasks() as start:
            for _ in range(clients):
                start(client())
        return self.seen

    # ------------------------------------------------------------ one request

    def _now_ns(self) -> int:
        return clock.now_ns() - self._start_ns

    def _begin(self, shot: Shot, due_ns: int) -> Seen:
        seen = Seen(shot.index, due_ns, input=shot.tokens, slow=shot.slow, tenant=shot.tenant)
        self.seen.append(seen)
        return seen

    async def _one(self, shot: Shot, ready: object, seen: Seen) -> None:
        note = Note(seen, self._start_ns)
        seen.woke_ns = note.now_ns()
        async with self._places or nullcontext():
            seen.sent_ns = note.now_ns()
            with anyio.move_on_after(shot.cancel_ms / 1000 if shot.cancel_ms else None) as scope:
                await self._fire(shot, ready, note)
            if scope.cancelled_caught:
                note.over("cancelled", "given up by the replay")
        self._ended += 1
        if self._told is not None and (not self._ended % TOLD_EVERY or self._ended == len(self.seen)):
            self._told(len(self.seen), self._ended)

    async def _fire(self, shot: Shot, ready: object, note: Note) -> None:
        """Until its ending. What a deadline leaves counts from when the request should have gone."""
        seen = note.seen
        left_ms = None
        if shot.deadline_ms:
            left_ms = shot.deadline_ms - (seen.sent_ns - seen.due_ns) // clock.NS_PER_MS
            if left_ms <= 0:
                note.over("deadline_exceeded", "its time was over before the replayer could send it")
                return
        try:
            await self._target.fire(shot, ready, left_ms, note)
            note.over(OK)
        except HeadwayError as error:
            note.over(error.code, error.message)


@asynccontextmanager
async def _tasks() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Starts tasks, and waits for all at the end. The first fault ends them, and is raised as it is."""
    live: set[asyncio.Task[None]] = set()
    faults: list[BaseException] = []
    changed = asyncio.Event()

    def ended(task: asyncio.Task[None]) -> None:
        live.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            faults.append(error)
        if error is not None or not live:
            changed.set()

    def start(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        live.add(task)
        task.add_done_callback(ended)

    try:
        yield start
        while live and not faults:
            changed.clear()
            await changed.wait()
        if faults:
            raise faults[0]
    finally:
        for task in list(live):
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)


# ---------------------------------------------------------------- a loop whose timers are exact


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, on a loop that wakes when it should: epoll alone counts in whole milliseconds, rounded up."""
    with asyncio.Runner(loop_factory=_exact_loop) as runner:
        return runner.run(main)


def _exact_loop() -> asyncio.AbstractEventLoop:
    if sys.platform != "linux":
        return asyncio.new_event_loop()
    import select

    class Exact(selectors.EpollSelector):
        """Waits in select(2), which counts microseconds, for its epoll descriptor to become readable."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    return asyncio.SelectorEventLoop(Exact())
