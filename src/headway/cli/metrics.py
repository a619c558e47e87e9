"""`headway metrics`: a server's numbers for Prometheus, from a process of its own that asks the server when scraped."""

import signal
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.connection import ADDRESS, Connect, ServerKey, ask, check
from headway.cli.exits import USAGE, exits, teach
from headway.scheduler.config import ConfigError
from headway.scheduler.errors import HeadwayError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from headway.scheduler.wire import StatusReply

BIND = "127.0.0.1:9464"  # the port that OpenTelemetry's exporter for Prometheus has
ANSWER_MS = 2_000  # a scrape may take 10 s by Prometheus' default
PORT_MAX = 65_535

METRICS = teach(
    "Serve a server's numbers to Prometheus, at http://127.0.0.1:9464/metrics. Each scrape asks the server for its "
    "status: nothing is added to it, and where it does not answer in time, headway_up is 0.",
    "The page names tenants and models: other addresses than this machine's own are for networks that you trust. Needs "
    "prometheus_client: pip install 'headway\\[metrics]'.",
    examples=[
        "headway metrics --connect tcp://10.0.0.7:5555",
        "headway metrics --once | grep headway_moe",
    ],
)


class Asked:
    """A collector that asks the server anew each time that it is collected from, from any thread."""

    def __init__(self, connect: str, key: str | None, timeout_ms: int) -> None:
        self._connect, self._key, self._timeout_ms = connect, key, timeout_ms

    def __repr__(self) -> str:
        return f"<Asked {self._connect}>"

    def collect(self) -> "Iterable[Metric]":
        """The metric families of now."""
        from headway.scheduler.metrics import families

        return families(self._reply())

    def _reply(self) -> "StatusReply | None":
        try:
            return ask(self._connect, self._key, self._timeout_ms, lambda client: client.status())
        except HeadwayError:
            return None


def metrics(
    bind: Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="where to listen; port 0: any free")] = BIND,
    once: Annotated[bool, typer.Option("--once", help="print the page and leave")] = False,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Annotated[int, typer.Option("--timeout-ms", min=1, help="how long the server may take")] = ANSWER_MS,
) -> None:
    try:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server
    except ImportError:
        raise ConfigError("metrics needs prometheus_client: pip install 'headway[metrics]'") from None

    host, port = _listen_at(bind)
    check(connect, server_key)
    asked = Asked(connect, server_key, timeout_ms)
    registry = CollectorRegistry()
    registry.register(asked)
    if once:
        typer.echo(generate_latest(registry).decode(), nl=False)
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--bind {bind}: cannot listen there: {error}") from None
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"headway: metrics of {connect} at http://{shown}:{server.server_port}/metrics", err=True)
    over.wait()
    server.shutdown()
    server.server_close()
    thread.join()


def _listen_at(bind: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigError(f"--bind {bind!r}: it must be host:port, with a port up to {PORT_MAX}, as in {BIND}")
    return host, int(port)


def register(app: typer.Typer) -> None:
    app.command(help=METRICS, epilog=exits(USAGE))(metrics)
