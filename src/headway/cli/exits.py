"""How a command ends: one table of exit codes, and the one place where an error becomes a sentence and a code."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from headway.scheduler.config import ConfigError
from headway.scheduler.errors import HeadwayError

OK, FAULT, USAGE, UNREACHABLE, REFUSED, NO_WORKER, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXITS: dict[int, str] = {
    OK: "it went well",
    FAULT: "a fault of headway itself; please report it",
    USAGE: "the command line or a setting cannot be used",
    UNREACHABLE: "the server cannot be reached",
    REFUSED: "the request was refused or failed; the server's error code is printed",
    NO_WORKER: "no worker could be started",
    INTERRUPTED: "interrupted",
}


def teach(*paragraphs: str, examples: Sequence[str]) -> str:
    """A command's help: what it does, and how it looks when it is used."""
    return "\n\n".join([*paragraphs, "\n".join(["[bold]Examples[/]", *(f"  $ {example}" for example in examples)])])


def exits(*codes: int) -> str:
    """The last lines of a command's help."""
    return "\n".join(
        ["[bold]Exit codes[/]", *(f"  {code:<3} {EXITS[code]}" for code in sorted({OK, FAULT, INTERRUPTED, *codes}))]
    )


class Exits(TyperGroup):
    """A group of commands in which every exception ends as an exit code of the table."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise _end(USAGE, str(error)) from None
        except HeadwayError as error:
            raise _end(UNREACHABLE if error.code == "unreachable" else REFUSED, _words(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # whoever read our output has seen enough, as in `headway generate … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort):
                raise  # typer's own: usage errors and Exit carry their code
            traceback.print_exc()
            raise _end(FAULT, f"{type(error).__name__}: {error} ({EXITS[FAULT]})") from None


def _words(error: HeadwayError) -> str:
    field = f" (field {error.field})" if error.field else ""
    if error.retry_after_ms is not None:
        return f"{error.code}: {error.message}{field}; try again in {error.retry_after_ms} ms"
    return f"{error.code}: {error.message}{field}{'; trying again may help' if error.retryable else ''}"


def _end(code: int, text: str) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(f"headway: {text}", style="red", markup=False, highlight=False)
    return typer.Exit(code)
