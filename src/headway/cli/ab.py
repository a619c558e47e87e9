"""`headway ab` and `headway split`: two configurations beside each other, simulated and live."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.connection import Json, print_json
from headway.cli.exits import REFUSED, USAGE, exits, teach
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


SPLIT = teach(
    "Try a second server on a share of live traffic, and take it back by itself if it is worse.",
    "Stands before two running servers: clients connect here instead, a share of their requests goes to B, the rest to "
    "A. After each answer a sequential test asks whether B is slower, or fails more; it may be looked at after every "
    "request and is still wrong at most one time in twenty. B that is worse is rolled back: all go to A from then on. "
    "Requests that B does not answer within --limit-ms are ended with an error that says to try again. B known to be "
    "faster is said, and moves nothing. Loopback and ipc only. docs/tuning.md says more.",
    examples=[
        "headway split tcp://127.0.0.1:5555 tcp://127.0.0.1:5565 --share 0.1",
        "headway split ipc:///run/now ipc:///run/then --bind ipc:///run/split --slower-max 1.02 --until-decided",
    ],
)


def split(
    a: Annotated[str, typer.Argument(metavar="A", help="address of the server that runs now")],
    b: Annotated[str, typer.Argument(metavar="B", help="address of the one that might")],
    bind: Annotated[str, typer.Option("--bind", metavar="ADDRESS", help="where clients connect")] = (
        "tcp://127.0.0.1:5554"
    ),
    share: Annotated[float, typer.Option("--share", min=0.001, max=0.999, help="of the requests, to B")] = 0.1,
    slower_max: Annotated[
        float, typer.Option("--slower-max", min=0.1, max=10, help="B may be slower by this factor")
    ] = 1.0,
    limit_ms: Annotated[
        float, typer.Option("--limit-ms", min=1, help="an answer of B that takes longer failed")
    ] = 60_000,
    requests_max: Annotated[
        int, typer.Option("--requests-max", min=100, help="undecided after so many: all go to A")
    ] = 100_000,
    alpha: Annotated[float, typer.Option("--alpha", min=1e-6, max=0.5, help="how often it may be wrong")] = 0.05,
    until_decided: Annotated[bool, typer.Option("--until-decided", help="leave when it is over")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of who goes where")] = 0,
) -> None:
    from headway.bench.ab.split import Split
    from headway.bench.ab.trial import ROLLED_BACK, Trial
    from headway.scheduler.binding import BindError

    trial = Trial(
        share=share, slower_max=slower_max, limit_ms=limit_ms, requests_max=requests_max, alpha=alpha, seed=seed
    )
    for address in (a, b):
        if not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"a server's address is {address!r}; it must be tcp://host:port or ipc://path")
    try:
        made = Split(bind, a, b, trial, lambda words: console().print(words))
    except BindError as error:
        raise ConfigError(str(error)) from None
    console().print(f"ready: {made.address}; {share:.1%} of requests go to {b}, the rest to {a}")
    try:
        made.run(lambda: until_decided and trial.over)
    finally:
        console().print(trial.words())
    if trial.verdict == ROLLED_BACK:
        raise typer.Exit(REFUSED)


def register(app: typer.Typer) -> None:
    app.command(help=AB, epilog=exits(USAGE))(ab)
    app.command(help=SPLIT, epilog=exits(USAGE, REFUSED))(split)
