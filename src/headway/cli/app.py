"""The commands together. What each does is in the file of its noun."""

from typing import Annotated

import typer

from headway import __version__
from headway.cli import ab, ask, metrics, plan, replay, rerun, servers, show, simulate, tune
from headway.cli.exits import EXITS, Exits, exits, teach

HELP = teach(
    "Adaptive dynamic batching for Hugging Face Transformers models.",
    "Start a server, then ask it from anywhere; or see all of it at once, on this machine, with headway demo.",
    examples=["headway serve", 'headway generate "Why do batches help?"', "headway status --watch", "headway demo"],
)

app = typer.Typer(
    name="headway",
    help=HELP,
    epilog=exits(*EXITS),
    cls=Exits,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None:
    del version


for noun in (servers, ask, show, metrics, simulate, plan, replay, rerun, tune, ab):
    noun.register(app)
