"""The server: a runtime with a ZeroMQ front, and the signals that end it.

The first SIGTERM or SIGINT drains: nothing new is taken, what is here finishes within `drain_ms`. The second ends at
once. Exit codes are the command line's: 0 after a drain, 5 if no worker could be started, 130 after the second signal.
"""

import gc
import logging
import signal
from collections.abc import Callable

import anyio

from headway.scheduler.runtime import Runtime
from headway.scheduler.spec import ServerSpec

log = logging.getLogger("headway.scheduler")

EXIT_OK, EXIT_NO_WORKER, EXIT_INTERRUPTED = 0, 5, 130

Started = Callable[[Runtime], None]


async def serve(spec: ServerSpec, *, started: Started | None = None) -> int:
    """Serve until a signal or until no model can be served; returns the exit code.

    `started` is called once clients can connect (models may still be loading). Raises BindError if an address is not
    to be had. Signal handlers are installed here and nowhere else, so this must run in the main thread.
    """
    runtime = Runtime(spec, front=True)
    signals = 0
    ready = False

    def changed() -> None:
        nonlocal ready
        served = {name for (name, _), route in runtime.crew.routes.routes.items() if route.workers}
        if not ready and all(model.name in served for model in spec.models):
            ready = True
            log.info("ready: every model has a worker")
        if runtime.crew.failed:
            runtime.stop()

    async def listen() -> None:
        nonlocal signals
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            heard.set()
            async for number in received:
                signals += 1
                name = signal.Signals(number).name
                if signals > 1:
                    log.warning("%s again: ending at once", name)
                    runtime.crew.supervisor.hurry = True
                    runtime.stop()
                    continue
                log.info("%s: draining for up to %d ms; again to end at once", name, spec.drain_ms)
                runtime.drain(spec.drain_ms)

    # Millions of short-lived objects and a few long-lived ones: look for cycles seldom, and never among the latter.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    heard = anyio.Event()
    runtime.on_change(changed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        try:
            await heard.wait()
            assert runtime.front is not None
            log.info("clients connect to %s, workers to %s", runtime.front.address, runtime.crew.hub.address)
            if started is not None:
                started(runtime)
            await runtime.run()
        finally:  # signals are still heard while the workers leave
            await runtime.close(at_once=signals > 1)
        tasks.cancel_scope.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):  # all is done: one more must not spoil the exit code
        signal.signal(number, signal.SIG_IGN)
    if signals > 1:
        return EXIT_INTERRUPTED
    log.info("%s", runtime.crew.failed if runtime.crew.failed and not signals else "drained: all is done")
    return EXIT_NO_WORKER if runtime.crew.failed and not signals else EXIT_OK
