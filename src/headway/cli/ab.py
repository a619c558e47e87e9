"""`headway ab`: two configurations beside each other, on the same traffic."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.connection import Json, print_json
from headway.cli.exits import USAGE, exits, teach
from headway.cli.show import console
from headway.cli.simulate import needs_numpy
from headway.scheduler.config import ConfigError, load
from headway.scheduler.profile import ProfileError

AB = teach(
    "Compare two configurations on one recorded trace, simulated: would B be better than A?",
    "A and B are settings files as for headway serve. TRACE is a recording of headway's own, any trace that headway "
    "simulate reads, or made-up traffic. What the engine costs comes from a profile (headway tune) or from --engine. "
    "If TRACE is a recording, A is the configuration under which it was made: the engine is then calibrated to its "
    "first half, and how far simulated times are from live ones on the second half is said. docs/tuning.md says more.",
    examples=[
        "headway ab now.yaml then.yaml --trace monday.rec --profile headway-profile.yaml",
        "headway ab now.yaml then.yaml --trace AzureLLMInferenceTrace_conv.csv --engine e1 --rate 40",
        "headway ab now.yaml then.yaml --trace poisson:n=20000 --engine 8,0.01,0.1,padded --json",
    ],
)


def ab(
    a: Annotated[Path, typer.Argument(metavar="A.yaml", help="the configuration that runs now")],
    b: Annotated[Path, typer.Argument(metavar="B.yaml", help="the one that might")],
    trace: Annotated[str, typer.Option("--trace", metavar="TRACE", help="a recording, a trace, or made-up traffic")],
    model: Annotated[str, typer.Option("--model", help="which model, if there are several")] = "",
    profile: Annotated[
        str, typer.Option("--profile", metavar="FILE", help="what the engine costs; default: the models' own profiles")
    ] = "",
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="what it costs, as headway simulate takes it; no profile")
    ] = "",
    rate: Annotated[float | None, typer.Option("--rate", min=1e-6, help="requests a second; no recording")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of everything that is drawn")] = 0,
    json: Json = False,
) -> None:
    if profile and engine:
        raise ConfigError("--profile and --engine both say what the engine costs; give one of them")
    needs_numpy("comparing")
    from dataclasses import replace

    from headway.bench.ab import shown
    from headway.bench.ab.calibrate import traffic_of
    from headway.bench.ab.simulated import compare, setting_of

    try:
        first, second = (setting_of(load(path), model, profile, engine, seed) for path in (a, b))
    except ProfileError as error:
        raise ConfigError(str(error)) from None
    traffic = traffic_of(trace, model, seed=seed)
    if rate is not None:
        if traffic.live:
            raise ConfigError("--rate changes the traffic, and what is known live of it no longer holds; leave it out")
        traffic = replace(traffic, load=traffic.load.at_rate(rate))
    found = compare((str(a), str(b)), first, second, traffic)
    if json:
        print_json(shown.as_json(found))
    else:
        console().print(shown.shown(found))


def register(app: typer.Typer) -> None:
    app.command(help=AB, epilog=exits(USAGE))(ab)
