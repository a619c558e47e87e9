"""What the client commands share: where the server is, who asks, and running one piece of async work against it."""

import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

import msgspec
import typer

from headway.scheduler.config import ConfigError
from headway.scheduler.errors import HeadwayError

if TYPE_CHECKING:
    from headway.scheduler.client import Client

ADDRESS = "tcp://127.0.0.1:5555"  # the default of the key `bind`
TIMEOUT_MS = 5_000
KEY_CHARS = 40
RETRIES_MAX = 60  # with the server's hint of a second, this waits for a model that is still loading
TOGETHER_MAX = 1024  # requests handed to the client at once; it sends as many as the server advertises

Connect = Annotated[
    str, typer.Option("--connect", envvar="HEADWAY_CONNECT", metavar="ADDRESS", help="the server's address")
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        "--server-key", envvar="HEADWAY_SERVER_KEY", metavar="Z85", help="its public CURVE key, if it has one"
    ),
]
Timeout = Annotated[
    int,
    typer.Option("--timeout-ms", min=1, help="how long to try to connect; longer, to wait for a server that starts"),
]
Model = Annotated[str | None, typer.Option("--model", help="which of the server's models; needed if it serves several")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="on whose account: tenants share each model by tokens")]
Priority = Annotated[int, typer.Option("--priority", help="lower is sooner")]
Deadline = Annotated[
    int | None,
    typer.Option(
        "--deadline-ms", min=1, help="give up after so long; the server refuses at once what cannot be done in time"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, one value a line")]

T = TypeVar("T")


class Who(TypedDict):
    """What every request carries beside its own content."""

    model: str | None
    tenant: str | None
    priority: int
    deadline_ms: int | None


def ask(connect: str, key: str | None, timeout_ms: int, work: Callable[["Client"], Coroutine[Any, Any, T]]) -> T:
    """The result of `work` with a client of the server."""
    check(connect, key)
    import anyio

    from headway.scheduler.client import Client

    async def main() -> T:
        async with Client(connect, curve_server_key=key, timeout_ms=timeout_ms, max_retries=RETRIES_MAX) as client:
            return await work(client)

    return anyio.run(main)


def check(connect: str, key: str | None) -> None:
    """Raises ConfigError for an address or a key that cannot be one."""
    if not connect.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"the server's address is {connect!r}; it must be tcp://host:port or ipc://path")
    if key is not None and len(key) != KEY_CHARS:
        raise ConfigError(f"a CURVE key has {KEY_CHARS} characters (Z85); --server-key has {len(key)}")


async def together(jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of jobs that run at the same time, in their order; the first failure ends all of them."""
    import anyio

    results: dict[int, T] = {}
    failures: list[HeadwayError] = []

    async def run(index: int, job: Callable[[], Awaitable[T]], scope: anyio.CancelScope) -> None:
        try:
            results[index] = await job()
        except HeadwayError as error:
            failures.append(error)
            scope.cancel()

    async with anyio.create_task_group() as group:
        for index, job in enumerate(jobs):
            group.start_soon(run, index, job, group.cancel_scope)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(jobs))]


def slices(items: Iterator[str]) -> Iterator[list[str]]:
    """The items, at most TOGETHER_MAX at a time."""
    while part := list(islice(items, TOGETHER_MAX)):
        yield part


def is_piped() -> bool:
    return not sys.stdin.isatty()


def print_json(value: object) -> None:
    typer.echo(msgspec.json.encode(value).decode())
