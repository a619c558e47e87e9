"""`headway generate` and `call`: requests from the command line. Those for one-shot engines are in `encode.py`."""

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

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
    together,
)
from headway.cli.encode import CLASSIFY, EMBED, SCORE, classify, embed, score
from headway.cli.exits import REFUSED, UNREACHABLE, USAGE, exits, teach
from headway.scheduler.config import ConfigError

if TYPE_CHECKING:
    from headway.scheduler.client import Client

SERVERS = "the server's"  # changes nothing, or the model's own value if its operator wants that
GENERATE = teach(
    "Generate text. Each PROMPT is a request of its own; without any, standard input is one prompt.",
    "A prompt is sent as a user's message through the model's chat template, or with --raw as it is. Several are sent "
    "at once, and so share batches.",
    examples=[
        'headway generate "Name three rivers."',
        'headway generate --temperature 0.8 --seed 7 "Once upon a time"',
        "headway generate --raw --json < prompt.txt",
    ],
)
CALL = teach(
    "Call a custom engine with a JSON value and print its answer as JSON. - reads the value from standard input.",
    examples=["headway serve --engine echo", "headway call '{\"question\": 42}'"],
)


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="print text as it comes [dim]\\[default: if there is one prompt, and no --json][/]",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 256,
    min_tokens: Annotated[int, typer.Option(min=0, help="shortest answer, in tokens")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: always the likeliest token", show_default=SERVERS)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="sample from the likeliest tokens with this share", show_default=SERVERS)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="sample from so many tokens; 0: all", show_default=SERVERS)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="sample from tokens that have this share of the likeliest's", show_default=SERVERS),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="over 1: what was said already is less likely", show_default=SERVERS)
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="for a token that the answer has already")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="for each time that the answer has it already")] = 0.0,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="with --json: how likely each token was, and so many alternatives"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="the same seed gives the same answer")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    model: Model = None,
    tenant: Tenant = None,
    priority: Priority = 0,
    deadline_ms: Deadline = None,
    as_json: Json = False,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = TIMEOUT_MS,
) -> None:
    texts = prompts or [_stdin("a PROMPT") if raw else _stdin("a PROMPT").rstrip("\n")]
    if stream and len(texts) > 1:
        raise ConfigError(
            f"--stream prints one answer as it comes, but there are {len(texts)} prompts; leave out --stream"
        )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs is printed as JSON; add --json")
    shared: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
        "seed": seed,
        "stop": stop or [],
        **Who(model=model, tenant=tenant, priority=priority, deadline_ms=deadline_ms),
    }
    requests = [shared | _content(text, raw) for text in texts]
    if stream or (stream is None and len(texts) == 1 and not as_json):
        ask(connect, server_key, timeout_ms, lambda client: _stream(client, requests[0], as_json))
        return
    answers = ask(
        connect,
        server_key,
        timeout_ms,
        lambda client: together([partial(client.generate, **request) for request in requests]),
    )
    for answer in answers:
        print_json(answer) if as_json else typer.echo(answer.text)


def _content(text: str, raw: bool) -> dict[str, Any]:
    return {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}


async def _stream(client: "Client", request: dict[str, Any], as_json: bool) -> None:
    async with client.stream(**request) as stream:
        async for delta in stream:
            if as_json:
                print_json(delta)
            else:
                typer.echo(delta.text, nl=False)
                sys.stdout.flush()
        if as_json:
            print_json(stream.result)
        else:
            typer.echo()


def call(
    value: Annotated[str, typer.Argument(metavar="JSON", help="any JSON value, or - for standard input")],
    tokens: Annotated[int | None, typer.Option(min=0, help="its size, for scheduling; default: its bytes / 4")] = None,
    model: Model = None,
    tenant: Tenant = None,
    priority: Priority = 0,
    deadline_ms: Deadline = None,
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = TIMEOUT_MS,
) -> None:
    try:
        payload = json.loads(_stdin("JSON") if value == "-" else value)
    except ValueError as error:
        raise ConfigError(f"the value is not JSON: {error}; text needs its own quotes, as in '\"text\"'") from None
    who = Who(model=model, tenant=tenant, priority=priority, deadline_ms=deadline_ms)
    print_json(ask(connect, server_key, timeout_ms, lambda client: client.call(payload, tokens=tokens, **who)))


def _stdin(wanted: str) -> str:
    text = sys.stdin.read() if is_piped() else ""
    if not text:
        raise ConfigError(f"give {wanted}, on the command line or on standard input")
    return text


def register(app: typer.Typer) -> None:
    epilog = exits(USAGE, UNREACHABLE, REFUSED)
    app.command(help=GENERATE, epilog=epilog)(generate)
    for text, command in ((EMBED, embed), (CLASSIFY, classify), (SCORE, score)):
        app.command(help=text, epilog=epilog)(command)
    app.command(help=CALL, epilog=epilog)(call)
