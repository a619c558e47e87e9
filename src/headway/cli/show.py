"""`headway info`, `status`, `version` and `demo`: what is there, and how it is going, for a person to read."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway import __version__
from headway.cli.connection import ADDRESS, TIMEOUT_MS, Connect, Json, ServerKey, Timeout, ask, print_json
from headway.cli.exits import NO_WORKER, REFUSED, UNREACHABLE, USAGE, exits, teach

if TYPE_CHECKING:
    from headway.scheduler.client import Client
    from headway.scheduler.wire import InfoReply, StatusReply

SHOWN = {  # what fits a terminal of 80 columns; --json has the rest
    "lanes": (
        "model",
        "lane",
        "waiting",
        "rule_ms",
        "window_ms",
        "censored",
        "waits_ms",
        "cost_fixed_ms",
        "cost_per_token_ms",
        "window_fault",
    ),
    "workers": ("worker", "pid", "kind", "running", "cap", "failures"),
    "batches": ("batch", "lane", "size", "running", "reason", "waited_ms", "ttft_ms", "took_ms", "output_tokens"),
}
HEADINGS = {"cost_fixed_ms": "fixed ms", "cost_per_token_ms": "token ms", "output_tokens": "tokens", "censored": "gaps"}
WIDTH_PIPED = 200  # columns where there is no terminal to ask
PACKAGES = ("torch", "transformers", "tokenizers", "pyzmq", "msgspec", "pydantic", "flash-attn")

INFO = teach("What a server serves, and the limits it keeps.", examples=["headway info --connect tcp://10.0.0.7:5555"])
STATUS = teach(
    "How a server is doing: its queues, workers and counters, and why each batch was launched.",
    examples=["headway status --batches 10", "headway status --watch"],
)
VERSION = teach("The versions of headway, Python and what it uses. Loads none of it.", examples=["headway version"])
DEMO = teach(
    "See it work on this machine: a server, a burst of prompts, streamed answers, and why each batch was launched.",
    examples=["headway demo", "headway demo --requests 32 --seed 7"],
)


def info(
    as_json: Json = False, connect: Connect = ADDRESS, server_key: ServerKey = None, timeout_ms: Timeout = TIMEOUT_MS
) -> None:
    reply = ask(connect, server_key, timeout_ms, lambda client: client.info())
    print_json(reply) if as_json else console().print(_info(reply))


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="show it again and again, until Ctrl-C")] = False,
    every_ms: Annotated[int, typer.Option(min=50, help="how often --watch asks")] = 1000,
    batches: Annotated[
        int, typer.Option("--batches", "-b", min=0, max=256, help="show so many of the last batches")
    ] = 10,
    as_json: Json = False,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = TIMEOUT_MS,
) -> None:
    async def work(client: "Client") -> None:
        if not watch:
            reply = await client.status(batches=batches)
            print_json(reply) if as_json else console().print(_status(reply))
            return
        await _watch(client, batches, every_ms, as_json)

    ask(connect, server_key, timeout_ms, work)


async def _watch(client: "Client", batches: int, every_ms: int, as_json: bool) -> None:
    import anyio
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            reply = await client.status(batches=batches)
            print_json(reply) if as_json else live.update(_status(reply), refresh=True)
            await anyio.sleep(every_ms / 1000)


def version() -> None:
    typer.echo(f"headway {__version__}, Python {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            typer.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{name} is not installed")


def demo(
    requests: Annotated[int, typer.Option(min=2, max=10_000, help="how many prompts")] = 16,
    model: Annotated[str, typer.Option(help="a model that generates: packaged, a folder or a hub id")] = "smollm2",
    seed: Annotated[int, typer.Option(min=0, help="which prompts, and in which order")] = 0,
) -> None:
    from headway.bench.demo import run

    raise typer.Exit(run(requests=requests, model=model, seed=seed))


# ---------------------------------------------------------------- tables


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH_PIPED)


def _info(reply: "InfoReply") -> RenderableType:
    head = f"headway {reply.server}, protocol {reply.protocol}, {reply.state}"
    models = Table(title="models", title_justify="left")
    for name in (
        "name",
        "kind",
        "workers",
        "concurrency",
        "max batch",
        "max input",
        "context",
        "lane of its own",
        "window",
        "facts",
    ):
        models.add_column(name)
    for model in reply.models:
        facts = ", ".join(f"{key} {value}" for key, value in model.facts.items())
        sizes = (model.workers, model.concurrency, model.max_batch, model.max_input_tokens, model.context_tokens)
        models.add_row(
            model.name, model.kind, *map(str, sizes), f"> {model.bypass_tokens}", _window(model.window), facts
        )
    return Group(Text(head), models, pairs_of("limits", reply.limits))


def _window(known: Mapping[str, Any]) -> str:
    """The window now, and what the raw rule would make of it."""
    if not known:
        return ""
    rule = f", rule {cell('', known['rule_ms'])} ms" if "rule_ms" in known else ""
    gaps = f", {known['censored']} of {known.get('intervals', 0)} idle gaps" if known.get("censored") else ""
    return f"{known.get('name', '')} {cell('', known.get('window_ms', 0.0))} ms{rule}{gaps}"


def _status(reply: "StatusReply") -> RenderableType:
    counters = {name: count for name, count in reply.counters.items() if count}
    parts: list[RenderableType] = [Text(f"{reply.state}, up for {reply.uptime_s:,.0f} s")]
    for title, rows in (("lanes", reply.lanes), ("workers", reply.workers), ("batches", reply.batches)):
        if rows:
            parts.append(table_of(title, [{key: row[key] for key in SHOWN[title] if key in row} for row in rows]))
    parts.append(pairs_of("counters", counters))
    return Group(*parts)


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each map, one column for each key that any of them has, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(_heading(column), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(cell(column, row.get(column))) for column in columns))
    return table


def pairs_of(title: str, values: Mapping[str, Any]) -> Table:
    """One row for each key."""
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for key, value in values.items():
        table.add_row(Text(key), Text(cell(key, value)))
    return table


def _heading(key: str) -> str:
    if key in HEADINGS:
        return HEADINGS[key]
    for unit, shown in (("_ns", "_ms"), ("_bytes", "_mib")):
        key = key.removesuffix(unit) + shown if key.endswith(unit) else key
    return key.replace("_", " ")


def cell(key: str, value: object) -> str:
    """A value as a person reads it: nanoseconds as milliseconds, bytes as MiB, as its key says."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and key.endswith("_ns"):
        return f"{value / 1e6:,.1f}"
    if isinstance(value, (int, float)) and key.endswith("_bytes"):
        return f"{value / 2**20:,.1f}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(str(name), inner)}" for name, inner in value.items())
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return ", ".join(cell("", inner) for inner in value)
    return str(value)


def register(app: typer.Typer) -> None:
    app.command(help=INFO, epilog=exits(USAGE, UNREACHABLE, REFUSED))(info)
    app.command(help=STATUS, epilog=exits(USAGE, UNREACHABLE, REFUSED))(status)
    app.command(help=VERSION, epilog=exits())(version)
    app.command(help=DEMO, epilog=exits(USAGE, REFUSED, NO_WORKER))(demo)
