"""The commands together. What each does is in the file of its noun."""

import typer

from headway.cli import ask, servers, show
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
for noun in (servers, ask, show):
    noun.register(app)
