"""The picture at the end of a measurement: drawn where matplotlib is there, and otherwise said why not."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from headway.scheduler.config import ConfigError


def drawn(console: Console, path: Path, draw: Callable[[], object]) -> None:
    """Call `draw`, which writes `path`, and say so. A picture that cannot be drawn ends nothing."""
    try:
        draw()
    except ConfigError as error:
        console.print(f"no plot: {error}", markup=False)
    else:
        console.print(f"written: {path}")
