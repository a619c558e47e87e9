"""The `headway` command: parses, calls, prints; decides nothing about scheduling.

One file for each noun. Whatever is slow to import (sockets, asyncio, torch) is imported inside the command that needs
it, so that `headway --help` answers at once.
"""


def run() -> None:
    """The entry point of the `headway` script. Ends the process with one of `exits.EXITS`."""
    from headway.cli.app import app

    app()
