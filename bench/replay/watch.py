"""What the server itself says while a replay runs: its batches, why they were launched, its windows and counters.

Asked for twice a second over a connection of its own, and only as many batches as were launched since; a server that
launches more than an answer can carry is seen in part, and the report says of how many. An old server, or none of
headway's, is simply not watched.
"""

from typing import Any

import anyio
import msgspec

from headway.scheduler import clock, wire
from headway.scheduler.client import Client
from headway.scheduler.errors import HeadwayError

PERIOD_S = 0.5
SPARE = 16  # batches asked for beyond what was launched in the last period
SAMPLES_MAX = 20_000  # of a lane's window: at two a second nearly three hours; then every other is let go


class Watched(msgspec.Struct):
    """`batches`: by number, as `status` shows them, `at_s` from the start of the replay. `windows`: (second, rule_ms,
    window_ms, waiting) of the short lanes. `counters`: what was counted meanwhile."""

    batches: dict[int, dict[str, Any]] = msgspec.field(default_factory=dict)
    windows: list[tuple[float, float | None, float, int]] = msgspec.field(default_factory=list)
    counters: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def launched(self) -> int:
        """All batches of this time, seen or not."""
        return self.counters.get("batches", 0)


class Watch:
    """`async with Watch(client, start_ns) as watch: ...`; then `watch.found`, or None if the server says nothing."""

    def __init__(self, client: Client, start_ns: int) -> None:
        self.found: Watched | None = None
        self._client = client
        self._start_ns = start_ns
        self._before: dict[str, int] = {}
        self._launched = 0
        self._own = 0

    async def begin(self) -> None:
        """Take the counters as they are before anything is sent."""
        try:
            status = await self._client.status()
        except HeadwayError:
            return
        self._before = status.counters
        self._launched = status.counters.get("batches", 0)
        self.found = Watched()

    async def run(self) -> None:
        """Until cancelled."""
        while self.found is not None:
            await anyio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Once."""
        if self.found is None:
            return
        try:
            status = await self._client.status(self._own)
            launched = status.counters.get("batches", 0)
            missed = launched - self._launched - self._own
            if missed > 0:
                self._own = min(wire.BATCHES_SHOWN_MAX, launched - self._launched + SPARE)
                status = await self._client.status(self._own)
                launched = status.counters.get("batches", 0)
        except HeadwayError:
            return
        self._own = min(wire.BATCHES_SHOWN_MAX, launched - self._launched + SPARE)
        self._launched = launched
        self._take(status)

    def _take(self, status: wire.StatusReply) -> None:
        assert self.found is not None
        now_s = (clock.now_ns() - self._start_ns) / clock.NS_PER_S
        first = self._before.get("batches", 0)
        for batch in status.batches:
            if batch["batch"] > first:  # the server's uptime is its own zero
                self.found.batches[batch["batch"]] = batch | {
                    "at_s": round(now_s - status.uptime_s + batch["at_ms"] / 1000, 4)
                }
        windows = self.found.windows
        for lane in status.lanes:
            if lane["lane"] == "short":
                windows.append((round(now_s, 3), lane.get("rule_ms"), lane["window_ms"], lane["waiting"]))
        if len(windows) > SAMPLES_MAX:
            del windows[::2]
        self.found.counters = {
            name: count - self._before.get(name, 0)
            for name, count in status.counters.items()
            if count > self._before.get(name, 0)
        }
