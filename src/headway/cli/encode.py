"""`headway embed`, `classify` and `score`: texts to one-shot engines. Each text is a request of its own, and those that
are given together share batches."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headway.cli.connection import (
    ADDRESS,
    TIMEOUT_MS,
    Connect,
    Deadline,
    Json,
    Model,
    Priority,
    ServerKey,
    Tenant,
    Timeout,
    Who,
    ask,
    is_piped,
    print_json,
    slices,
    together,
)
from headway.cli.exits import teach
from headway.scheduler.config import ConfigError

if TYPE_CHECKING:
    from headway.scheduler.client import Client
    from headway.scheduler.client_types import Classification, Embedding, Relevance

    Answer = Embedding | Classification | Relevance

EMBED = teach(
    "Embed texts. Each TEXT is a request of its own; without any, each line of standard input is one.",
    "Prints a line for each text: how many numbers, the first of them, the text; --json prints all of them.",
    examples=['headway embed "a red apple" "a green pear"', "headway embed --json < lines.txt > vectors.jsonl"],
)
CLASSIFY = teach(
    "Classify texts. Each TEXT is a request of its own; without any, each line of standard input is one.",
    "Prints a line for each text: its best label, that label's score, the text; --json prints all scores.",
    examples=['headway classify "What a fine day." "It broke at once."', "headway classify --json < lines.txt"],
)
SCORE = teach(
    "Score how well each TEXT answers QUERY, as a reranker sees it; without any, each line of standard input is one.",
    "Prints a line for each text, in their order: its score, the text; --sort puts the best first.",
    examples=[
        'headway score "how tall is it?" "It is 9 m high." "It is green."',
        'headway score --sort "how tall is it?" < lines.txt',
    ],
)

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", show_default=False)]
Truncate = Annotated[
    bool | None,
    typer.Option(
        "--truncate/--no-truncate",
        help="cut a text that is too long, or refuse it [dim]\\[default: as the server's operator chose][/]",
        show_default=False,
    ),
]

A = TypeVar("A")


def embed(
    texts: Texts = None,
    truncate: Truncate = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="which of the model's prompts goes before each text; empty: none")
    ] = None,
    model: Model = None,
    tenant: Tenant = None,
    priority: Priority = 0,
    deadline_ms: Deadline = None,
    as_json: Json = False,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = TIMEOUT_MS,
) -> None:
    lines = _lines(texts)
    who = Who(model=model, tenant=tenant, priority=priority, deadline_ms=deadline_ms)

    async def work(client: "Client") -> None:
        one = partial(client.embed, truncate=truncate, prompt_name=prompt_name, **who)
        async for text, answer in _answers(lines, one):
            if as_json:
                _print_json(text, answer, embedding=answer.vector)
            else:
                first = ", ".join(f"{number:.4f}" for number in answer.vector[:4])
                typer.echo(f"{len(answer.vector)} numbers: {first}, …  {text}{_cut(answer)}")

    ask(connect, server_key, timeout_ms, work)


def classify(
    texts: Texts = None,
    truncate: Truncate = None,
    model: Model = None,
    tenant: Tenant = None,
    priority: Priority = 0,
    deadline_ms: Deadline = None,
    as_json: Json = False,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = TIMEOUT_MS,
) -> None:
    lines = _lines(texts)
    who = Who(model=model, tenant=tenant, priority=priority, deadline_ms=deadline_ms)

    async def work(client: "Client") -> None:
        async for text, answer in _answers(lines, partial(client.classify, truncate=truncate, **who)):
            if as_json:
                _print_json(text, answer, label=answer.label, scores=answer.scores)
            else:
                typer.echo(f"{answer.label} {answer.scores[answer.label]:.4f}  {text}{_cut(answer)}")

    ask(connect, server_key, timeout_ms, work)


def score(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="what the texts should answer")],
    texts: Texts = None,
    sort: Annotated[bool, typer.Option("--sort", help="the best first")] = False,
    truncate: Truncate = None,
    model: Model = None,
    tenant: Tenant = None,
    priority: Priority = 0,
    deadline_ms: Deadline = None,
    as_json: Json = False,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = TIMEOUT_MS,
) -> None:
    lines = _lines(texts)
    who = Who(model=model, tenant=tenant, priority=priority, deadline_ms=deadline_ms)

    async def work(client: "Client") -> None:
        one = partial(client.score, query, truncate=truncate, **who)
        scored = [pair async for pair in _answers(lines, one)]
        for text, answer in sorted(scored, key=lambda pair: -pair[1].score) if sort else scored:
            if as_json:
                _print_json(text, answer, score=answer.score)
            else:
                typer.echo(f"{answer.score:.4f}  {text}{_cut(answer)}")

    ask(connect, server_key, timeout_ms, work)


def _lines(texts: list[str] | None) -> Iterator[str]:
    """The texts given, or the lines of standard input that are not empty."""
    if not texts and not is_piped():
        raise ConfigError("give a TEXT, or texts on standard input, one a line")
    lines = iter(texts) if texts else (line.rstrip("\r\n") for line in sys.stdin)
    return (line for line in lines if line)


async def _answers(lines: Iterator[str], one: Callable[[str], Awaitable[A]]) -> AsyncIterator[tuple[str, A]]:
    """Each text with its answer, in order."""
    for part in slices(lines):
        for text, answer in zip(part, await together([partial(one, text) for text in part]), strict=True):
            yield text, answer


def _cut(answer: "Answer") -> str:
    return "  (cut)" if answer.usage is not None and answer.usage.truncated else ""


def _print_json(text: str, answer: "Answer", **said: Any) -> None:
    print_json({"text": text, **said, "usage": answer.usage, "timing": answer.timing})
