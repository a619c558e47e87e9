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

    def changed() -> None:
        if runtime.crew.failed:
            runtime.stop()

    async def listen() -> None:
        nonlocal signals
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for number in received:
                signals += 1
                if signals > 1:
                    log.warning("%s again: ending at once", signal.Signals(number).name)
                    runtime.stop()
                    return
                log.info(
                    "%s: draining for up to %d ms; again to end at once", signal.Signals(number).name, spec.drain_ms
                )
                runtime.drain(spec.drain_ms)

    # Millions of short-lived objects and a few long-lived ones: look for cycles seldom, and never among the latter.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        runtime.on_change(changed)
        assert runtime.front is not None
        log.info("clients connect to %s, workers to %s", runtime.front.address, runtime.crew.hub.address)
        if started is not None:
            started(runtime)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await runtime.run()
            tasks.cancel_scope.cancel()
    finally:
        await runtime.close(at_once=signals > 1)
    if signals > 1:
        return EXIT_INTERRUPTED
    return EXIT_NO_WORKER if runtime.crew.failed and not signals else EXIT_OK
