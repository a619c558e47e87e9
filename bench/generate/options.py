"""Options that the generation benches share, from text."""

import os
from pathlib import Path
from typing import Annotated

import typer

CORES = os.cpu_count() or 1

Threads = Annotated[int, typer.Option(min=1, help="CPU threads each way may compute with")]
Model = Annotated[str, typer.Option(help="a folder; empty: the packaged SmolLM2-135M")]
Vllm = Annotated[Path, typer.Option(envvar="HEADWAY_VLLM_VENV", help="a venv with vLLM's CPU build")]
Hfserve = Annotated[Path, typer.Option(envvar="HEADWAY_HFSERVE_VENV", help="a venv with transformers[serving]")]
Seed = Annotated[int, typer.Option(help="of the requests")]


def range_of(text: str) -> tuple[int, int]:
    """`20:200`, or one number for both ends. Raises typer.BadParameter."""
    low, _, high = text.partition(":")
    try:
        found = (int(low), int(high or low))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not two numbers, as in 20:200") from None
    if not 1 <= found[0] <= found[1]:
        raise typer.BadParameter(f"{text!r}: the first number is at least 1 and not above the second")
    return found


def folder_of(model: str) -> Path:
    """The model's folder; empty: the packaged SmolLM2."""
    if model:
        return Path(model).expanduser()
    from headway.workers.packaged import smollm2

    return smollm2()


def levels_of(text: str) -> list[int]:
    """`1,16`: how many run at once. Raises typer.BadParameter."""
    try:
        levels = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers, as in 1,16") from None
    if not all(1 <= level <= 64 for level in levels):
        raise typer.BadParameter("each concurrency is from 1 to 64")
    return levels
