"""`headway tune`: what batches cost on this machine, and a profile that the server loads."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.cli.connection import Json, print_json
from headway.cli.exits import INTERRUPTED, USAGE, exits, teach
from headway.cli.flags import settings, with_flags
from headway.cli.servers import Config
from headway.cli.show import console
from headway.scheduler.config import ConfigError

TUNABLE = ("generate", "embed", "classify", "score")
LENGTHS_MAX = 16
BROKEN_OFF = "it was interrupted"

TUNE = teach(
    "Measure a model on this machine: what batches of 1, 2, 4, 8, ... cost at several lengths, until more at once "
    "bring little, memory runs out or time is up. Writes a profile for the server, and says why it recommends what it "
    "does.",
    "The engine runs in a process of its own, as a worker would run it; if it is killed, the measurement goes on "
    "without that size. Every run is written beside the profile, a JSON object a line. Start the server with "
    "--profile, or name the file in a model's `profile`. docs/tuning.md says more.",
    examples=[
        "headway tune smollm2 --threads 2",
        "headway tune minilm --lengths 16,64,256 --budget-s 60",
        "headway tune /models/Qwen3-0.6B --step-ms-max 50 --out qwen.yaml",
        "headway serve --model smollm2 --threads 2 --profile headway-profile.yaml",
    ],
)


def _lengths(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--lengths {text!r} is not a list of numbers, as in 32,256,1024") from None
    if not found or found[0] < 1 or len(found) > LENGTHS_MAX:
        raise ConfigError(f"--lengths {text!r}: 1 to {LENGTHS_MAX} lengths of at least 1 token")
    return found


@with_flags("Model")
def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder, hub id or packaged model")] = "smollm2",
    lengths: Annotated[str, typer.Option("--lengths", metavar="N,N", help="tokens of an input")] = "32,256,1024",
    batch_max: Annotated[
        int, typer.Option("--batch-max", min=1, max=4096, help="no more requests at once than these")
    ] = 64,
    budget_s: Annotated[float, typer.Option("--budget-s", min=0.1, help="stop measuring after so long")] = 120.0,
    step_ms_max: Annotated[
        float | None,
        typer.Option("--step-ms-max", min=0.001, help="recommend nothing slower: a step of generation, or a batch"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="the profile")] = Path("headway-profile.yaml"),
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="every run; default: beside the profile, as .jsonl")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of everything that is drawn")] = 0,
    json: Json = False,
    config: Config = None,
    **flags: Any,
) -> None:
    from headway.bench.tune import fit, measure, shown

    spec = settings(config, flags | {"model": model}).models[0]
    if spec.engine not in TUNABLE:
        raise ConfigError(f"engine {spec.engine!r} cannot be tuned; there are {', '.join(TUNABLE)}")
    asked, path = _lengths(lengths), record or out.with_suffix(".jsonl")
    for file in (out, path):
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent} to write it to")
    limit = {"max_num_seqs": batch_max} if spec.engine == "generate" else {"max_batch": batch_max}
    with Console(stderr=True).status(f"the engine loads {spec.name}"):
        probe = measure.Probe(spec.model_copy(update=limit | {"profile": ""}))
    try:
        wrote, usable = measure.recorder(path, probe.about, spec), measure.lengths_for(probe.about, asked)
        walk = _walked(probe, usable, budget_s, batch_max, seed, wrote)
    finally:
        probe.close()
    if walk.ended_by == BROKEN_OFF and not fit.reports_of(walk.tried):
        raise KeyboardInterrupt  # nothing to be written
    try:
        profile = fit.profile_from(
            spec, probe.about, walk.tried, ended_by=walk.ended_by, took_ms_max=step_ms_max, seed=seed
        )
    except ValueError as error:
        raise ConfigError(f"{error}: {walk.tried[-1].message if walk.tried else 'no time'}; see {path}") from None
    shown.write_profile(out, profile)
    if json:
        print_json(profile.model_dump(mode="json"))
    else:
        console().print(shown.shown(walk.tried, profile))
        console().print(f"{out}: the profile; {path}: every run")
    if walk.ended_by == BROKEN_OFF:
        raise typer.Exit(INTERRUPTED)


def _walked(probe: Any, usable: list[int], budget_s: float, batch_max: int, seed: int, wrote: Any) -> Any:
    """The measurement, with a bar on standard error that is full when time is up."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from headway.bench.tune.measure import Tried, Walk

    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        sizes = len(usable) * batch_max.bit_length()
        task = bar.add_task("measuring", total=sizes)

        def told(one: Tried) -> None:
            wrote(one)
            bar.update(task, advance=1, description=f"{one.requests} x {one.tokens} tokens: {one.ended}")

        walk = Walk(probe, budget_s=budget_s, batch_max=batch_max, seed=seed, wrote=told)
        try:
            walk.run(usable)
        except KeyboardInterrupt:  # what was measured until now is worth a profile
            walk.ended_by = BROKEN_OFF
    return walk


def register(app: typer.Typer) -> None:
    app.command(help=TUNE, epilog=exits(USAGE))(tune)
