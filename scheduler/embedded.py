"""The scheduler inside your own program: `async with Scheduler("smollm2") as s: await s.generate("Once upon")`.

The same core, runtime and worker processes as the server, and the same methods as the client; between caller and
scheduler there is no socket, only method calls in one event loop. Cancelling the caller cancels the request. Nothing
of the host program is touched: no signal handlers, no logging set-up, no global state, and after the block no thread,
file or process is left.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from headway.scheduler import wire
from headway.scheduler.client import Client
from headway.scheduler.client_socket import QUESTIONS, Mailbox
from headway.scheduler.client_types import Counters
from headway.scheduler.errors import HeadwayError
from headway.scheduler.runtime import Runtime
from headway.scheduler.spec import ModelSpec, PolicySpec, ServerSpec

CALLER = 1  # the host program is the only client


class LocalLine:
    """A `Line` that ends in a runtime of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.endpoint = "the embedded scheduler"
        self.connected = anyio.Event()
        self.connected.set()
        self.gone = anyio.Event()
        self.info: wire.InfoReply | None = None
        self.info_ns = 0
        self._runtime = runtime
        self._live: dict[str, Mailbox] = {}
        self._books = dict.fromkeys(("sent", "answered", "timed_out", "cancelled", "lost", "late"), 0)

    @property
    def counters(self) -> Counters:
        return Counters(live=sum(mailbox.booked for mailbox in self._live.values()), **self._books)

    def check_open(self) -> None:
        if self.gone.is_set():
            raise HeadwayError("cancelled", "the scheduler is closed")
        if self._runtime.over:
            raise HeadwayError("shutting_down", "the scheduler has drained or stopped; make a new one")

    def close(self) -> None:
        self.gone.set()
        self.fail("cancelled", "the scheduler was closed while this request was running")

    def fail(self, code: str, message: str) -> None:
        """End all that is live."""
        for mailbox in self._live.values():
            mailbox.put(HeadwayError(code, message), "cancelled")

    async def until_connected(self, timeout_ms: int) -> None:
        """There is nothing to wait for."""

    def unreachable(self, what: str) -> HeadwayError:
        return HeadwayError("unreachable", f"{self.endpoint}: {what}")

    def start(self, id_: str, message: wire.ClientMessage, expires_ns: int | None = None) -> Mailbox:
        self.check_open()
        mailbox = self._live[id_] = Mailbox(id_, message, expires_ns)
        mailbox.on_wire = True
        self._books["sent"] += mailbox.booked
        self._runtime.door.answer(CALLER, mailbox.stamped(), partial(_put, mailbox))
        return mailbox

    def finish(self, mailbox: Mailbox, timed_out: bool = False) -> None:
        if self._live.get(mailbox.id) is not mailbox:
            return
        del self._live[mailbox.id]
        if not isinstance(mailbox.message, QUESTIONS):
            self._books[mailbox.ending or ("timed_out" if timed_out else "cancelled")] += 1
            if not mailbox.ending and not self.gone.is_set():
                self._runtime.cancel(CALLER, mailbox.id)

    def ask_info(self) -> None:
        """What is served is not needed here: there is no limiter to keep current."""


def _put(mailbox: Mailbox, message: wire.ServerMessage) -> None:
    """A message of the runtime, as a socket would have decoded it."""
    if isinstance(message, (wire.Accepted, wire.CancelAck)):
        return
    if isinstance(message, wire.Result) and isinstance(message.value, msgspec.Raw):
        message = msgspec.structs.replace(message, value=msgspec.msgpack.decode(message.value))
    mailbox.put(message)


class Scheduler(Client):
    """A scheduler and its worker processes, for one event loop.

    `model`: a packaged model's name, a folder or hub id; or give `models`, full specifications. Other keywords are keys
    of ServerSpec (such as `policy=PolicySpec(window="greedy")` or `log_level`), or of ModelSpec for `model` (such as
    `engine`, `threads`, `max_num_seqs`). Entering waits until every model has a worker; HeadwayError `no_worker` if one
    cannot be loaded. Methods are those of Client. Refusals are raised at once (`max_retries=0`) unless asked otherwise.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        models: Sequence[ModelSpec] | None = None,
        policy: PolicySpec | None = None,
        tenant: str | None = None,
        max_retries: int = 0,
        **keys: Any,
    ) -> None:
        super().__init__(tenant=tenant, max_retries=max_retries)
        keys = {"log_level": "warning", **keys}  # a library is quiet unless told otherwise
        server = {name: keys.pop(name) for name in list(keys) if name in ServerSpec.model_fields}
        if models is not None and (model is not None or keys):
            raise ValueError(f"give either models or model; found models and {model or ', '.join(keys)}")
        if models is None:
            models = (ModelSpec.model_validate({**keys, **({"model": model} if model is not None else {})}),)
        self._spec = ServerSpec(models=tuple(models), policy=policy or PolicySpec(), **server)
        self._runtime: Runtime | None = None
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._runtime is not None:
            raise RuntimeError("this scheduler was opened before; make a new one")
        self._runtime = runtime = Runtime(self._spec)
        line = self._socket = LocalLine(runtime)
        self._running = asyncio.create_task(runtime.run(), name="headway")
        self._running.add_done_callback(lambda task: line.fail("internal", _why(task)))
        try:
            await self._until_ready(runtime)
        except BaseException:
            await self._leave()
            raise
        return self

    async def _until_ready(self, runtime: Runtime) -> None:
        changed = asyncio.Event()
        runtime.on_change(changed.set)
        while True:
            changed.clear()
            for model in self._spec.models:
                why = runtime.crew.supervisor.hopeless(model)
                if why:
                    raise HeadwayError("no_worker", f"model {model.name!r} has no worker: {why}")
            served = {name for (name, _), route in runtime.crew.routes.routes.items() if route.workers}
            if all(model.name in served or not model.workers for model in self._spec.models):
                return
            await _first(changed.wait(), self._running)
            if self._running is not None and self._running.done():
                raise RuntimeError("the embedded scheduler failed while its models loaded")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        self.close()
        assert self._runtime is not None
        assert self._running is not None
        with anyio.CancelScope(shield=True):
            self._runtime.stop()
            await asyncio.wait([self._running])
            await self._runtime.close()
        if not self._running.cancelled() and self._running.exception() is not None:
            raise RuntimeError("the embedded scheduler failed") from self._running.exception()

    def __repr__(self) -> str:
        return f"<Scheduler {self._runtime.core!r}>" if self._runtime else "<Scheduler new>"

    async def ready(self, request: wire.Request) -> anyio.CapacityLimiter | None:
        """No limit on the caller's side: the queue is in this process, and bounded."""
        del request
        return None

    async def drain(self, limit_ms: int | None = None) -> None:
        """Take no new requests and return when those that are here have ended, at the latest after `limit_ms`."""
        assert self._runtime is not None
        runtime, done = self._runtime, asyncio.Event()
        runtime.on_change(lambda: done.set() if runtime.drained else None)
        if not runtime.over:
            runtime.drain(self._spec.drain_ms if limit_ms is None else limit_ms)
            await _first(done.wait(), self._running)


async def _first(one: Coroutine[Any, Any, object], other: "asyncio.Task[None] | None") -> None:
    """Wait until either has ended; `other` is left running."""
    task = asyncio.ensure_future(one)
    try:
        await asyncio.wait([task] if other is None else [task, other], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()


def _why(task: "asyncio.Task[None]") -> str:
    if task.cancelled() or task.exception() is None:
        return "the scheduler has stopped"
    return f"the scheduler failed: {task.exception()!r}"
