"""Sleep until something happens, or until a time: the one place where a shell's loop waits.

ZeroMQ sockets are watched through their file descriptor. That descriptor only says "look": after a wake-up the owner
must drain its socket until it would block, or the next edge is lost. `set` may be called from the loop's own thread;
`set_from_thread` from any.
"""

import asyncio
from collections.abc import Callable

import zmq

from headway.scheduler import clock

SLEEP_NS_MAX = 1_000_000_000  # look around once a second whatever happens


class Waker:
    """Made inside a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._set = False

    def set(self) -> None:
        """Something happened."""
        self._set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def set_from_thread(self) -> None:
        """The same, from another thread; a closed loop is ignored."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.set)

    def watch(self, socket: "zmq.Socket[bytes]") -> Callable[[], None]:
        """Wake when `socket` may be readable. Returns what ends the watching."""
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._loop.add_reader(fd, self.set)

        def unwatch() -> None:
            self._loop.remove_reader(fd)

        return unwatch

    async def wait(self, until_ns: int) -> None:
        """Until `set` or the time `until_ns`. Always gives other tasks a turn."""
        if not self._set:
            wait_ns = min(until_ns - clock.now_ns(), SLEEP_NS_MAX)
            if wait_ns > 0:
                self._future = self._loop.create_future()
                timer = self._loop.call_later(wait_ns / clock.NS_PER_S, self.set)
                try:
                    await self._future
                finally:
                    timer.cancel()
                    self._future = None
                self._set = False
                return
        self._set = False
        await asyncio.sleep(0)
