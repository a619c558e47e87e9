"""`headway serve` and `headway worker`: the two long-running processes."""

import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from headway.cli.exits import FAULT, INTERRUPTED, NO_WORKER, OK, USAGE, exits, teach
from headway.cli.flags import settings, with_flags
from headway.scheduler.config import ConfigError
from headway.scheduler.spec import ServerSpec

if TYPE_CHECKING:
    from headway.scheduler.runtime import Runtime

Config = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="settings, YAML or TOML; a flag and a HEADWAY_ variable win over it"
    ),
]

# How a worker process ends -> this command's exit code: told to leave, could not load, stopped by a second signal.
WORKER_EXITS = {0: OK, 2: NO_WORKER, 5: INTERRUPTED}

SERVE = teach(
    "Serve one or more models: the scheduler, and the workers it starts.",
    "Every key can be a flag, a HEADWAY_ variable or in a file, in this order of precedence; docs/configuration.md "
    "lists them. Flags of a model set the first model; more models need a file.",
    "SIGTERM and Ctrl-C drain: what runs may end, new work is refused.",
    examples=[
        "headway serve",
        "headway serve --model minilm --workers 2",
        "headway serve --engine mypackage.mymodule:make_engine --option size=3",
        "HEADWAY_POLICY__WINDOW=efficiency headway serve --config headway.yaml",
    ],
)
WORKER = teach(
    "Run one worker by hand, on this or another machine, for a server that is already there.",
    "It registers at the server's workers address (key workers_bind), takes work, and registers again when the server "
    "comes back. A server started with --workers 0 starts none itself.",
    examples=[
        "headway serve --workers 0 --workers-bind tcp://127.0.0.1:5556",
        "headway worker --connect tcp://127.0.0.1:5556 --model minilm",
    ],
)


@with_flags("Model", "Policy", "Server")
def serve(config: Config = None, **flags: Any) -> None:
    spec = settings(config, flags)
    _log_to_stderr(spec)
    import anyio

    from headway.scheduler.binding import BindError
    from headway.scheduler.serve import serve as run

    console = Console(stderr=True)

    async def main() -> int:
        return await run(spec, started=lambda runtime: console.print(_panel(spec, runtime)))

    try:
        code = anyio.run(main)
    except BindError as error:
        raise ConfigError(str(error)) from None
    raise typer.Exit(code)


def _log_to_stderr(spec: ServerSpec) -> None:
    logging.basicConfig(
        level=spec.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )


def _panel(spec: ServerSpec, runtime: "Runtime") -> Panel:
    """What was started: where to connect, what is served, how."""
    table = Table.grid(padding=(0, 2))
    table.add_row("clients", runtime.front.address if runtime.front else "")
    table.add_row("workers", runtime.crew.hub.address)
    for model in spec.models:
        started = (
            f"{model.workers} worker{'s' * (model.workers != 1)} x {model.threads} thread{'s' * (model.threads != 1)}"
        )
        engine = f"{model.engine} {model.model}".rstrip()
        window = f", window {model.window}" if model.window else ""
        table.add_row("model", f"{model.name}: {engine} on {model.device}, {started}{window}")
    table.add_row("window", f"{spec.policy.window}, at most {spec.policy.max_wait_cap_ms:g} ms")
    return Panel(table, title="headway", title_align="left", expand=False)


@with_flags("Model")
def worker(
    connect: Annotated[str, typer.Option(metavar="ADDRESS", help="the server's workers address")],
    worker_name: Annotated[
        str | None, typer.Option(help="how the server's status calls it [dim]\\[default: host-pid][/]")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(envvar="HEADWAY_SERVER_KEY", metavar="Z85", help="its public CURVE key, if it has one")
    ] = None,
    config: Config = None,
    **flags: Any,
) -> None:
    spec = settings(config, flags)
    if len(spec.models) != 1:
        names = ", ".join(model.name for model in spec.models)
        raise ConfigError(
            f"a worker serves one model, but {len(spec.models)} are configured ({names}); use a file with one"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.models[0].threads))  # read once, when torch is imported
    from headway.workers.process import run_worker

    _log_to_stderr(spec)
    code = run_worker(
        connect=connect,
        spec=spec.models[0],
        name=worker_name or f"{socket.gethostname()}-{os.getpid()}",
        parent_pid=None,
        heartbeat_ms=spec.heartbeat_ms,
        curve=server_key,
    )
    raise typer.Exit(WORKER_EXITS.get(code, FAULT))


def register(app: typer.Typer) -> None:
    app.command(help=SERVE, epilog=exits(USAGE, NO_WORKER))(serve)
    app.command(help=WORKER, epilog=exits(USAGE, NO_WORKER))(worker)
