"""`headway simulate`: what the scheduler would make of a load, without a model and without waiting for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headway.cli.exits import USAGE, exits, teach
from headway.cli.flags import settings, with_flags
from headway.cli.servers import Config
from headway.cli.show import console
from headway.scheduler.config import ConfigError

if TYPE_CHECKING:
    from headway.bench.sim.compare import Setting
    from headway.bench.sim.sources import Load

LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the curve over load
CURVE_REQUESTS = 4000  # of each point of it

SIMULATE = teach(
    "Run the real scheduler on a trace under a virtual clock, with a made-up engine. An hour takes seconds.",
    "SOURCE is a trace file (Azure, BurstGPT, Mooncake, ServeGen, a recording of headway's own), or made-up traffic: "
    "poisson, pulses, onoff, steps or closed, with settings as in poisson:rps=50,n=20000,tokens=128.",
    "--load runs it at a share of what the workers can do, --rate at so many requests a second; without either, it "
    "runs as it was recorded. --compare tries several windows on the same load, and shows how far each is from the "
    "fixed window that would have been best, which nobody knows beforehand. docs/simulate.md says more.",
    examples=[
        "headway simulate AzureLLMInferenceTrace_conv.csv --load 0.6",
        "headway simulate poisson:n=100000 --engine e2 --load 0.8 --workers 2 --slo-ms 50",
        "headway simulate closed:clients=16,think_ms=2 --window p95",
        "headway simulate trace.jsonl --engine gen --rate 2 --json report.json --plot report.png",
        "headway simulate pulses:burst=3 --compare greedy,adaptive,fixed:5,p95",
    ],
)


@with_flags("Policy")
def simulate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a trace file, or made-up traffic")],
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="e1, e2, e3, static, gen, fast, or a,b,m in ms: 8,0.01,0.1,padded")
    ] = "e1",
    workers: Annotated[int, typer.Option(min=1, max=256, help="made-up workers")] = 1,
    load: Annotated[
        float | None, typer.Option(min=0.001, max=10, help="share of what the workers can do with full batches")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="requests a second")] = None,
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="most requests in one batch")] = 32,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=65536, help="most requests in one worker at once")] = 32,
    noise: Annotated[float, typer.Option(min=0, max=2, help="sigma of a lognormal on the engine's times")] = 0.0,
    stragglers: Annotated[float, typer.Option(min=0, max=1, help="share of batches that take three times as long")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="of everything that is drawn")] = 0,
    start_s: Annotated[float | None, typer.Option(min=0, help="begin so many seconds into the trace")] = None,
    span_s: Annotated[float, typer.Option(min=0, help="take so many seconds of it; 0: all")] = 0.0,
    limit: Annotated[int, typer.Option(min=0, help="take so many requests; 0: all")] = 0,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ServeGen's lengths; default: the file beside the arrivals")
    ] = None,
    deadline_ms: Annotated[float | None, typer.Option(min=1, help="a deadline for every request")] = None,
    slo_ms: Annotated[float | None, typer.Option(min=0.001, help="count as good what is done within this")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="WINDOWS", help="several windows, with commas: greedy,adaptive,fixed:5")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="write the report as JSON")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw it: .png, .svg or .pdf")] = None,
    config: Config = None,
    **flags: Any,
) -> None:
    if load is not None and rate is not None:
        raise ConfigError("--load and --rate both set the speed; give one of them")
    needs_numpy("the simulator")
    from dataclasses import replace

    from headway.bench.sim import plots, sources
    from headway.bench.sim.arrivals import Arrivals
    from headway.bench.sim.compare import Setting, with_window
    from headway.bench.sim.engines import engine_of

    if plot is not None:
        plots.check(plot)
    for file in (json, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent} to write it to")
    window = flags.pop("window", None)
    policy = settings(config, flags).policy
    if window:
        policy = with_window(policy, window)
    setting = Setting(
        engine=replace(engine_of(engine), noise=noise, stragglers=stragglers),
        policy=policy,
        workers=workers,
        max_batch=max_batch,
        max_num_seqs=max_num_seqs,
        seed=seed,
        slo_ms=slo_ms,
        load=load,
    )
    traffic = sources.open_source(source, seed=seed, start_s=start_s, span_s=span_s, limit=limit, lengths=lengths)
    if isinstance(traffic, Arrivals):
        if rate is not None:
            traffic = traffic.at_rate(rate)
        if load is not None:
            traffic = setting.at_load(traffic, load)
        if deadline_ms is not None:
            traffic = traffic.with_deadline(deadline_ms)
    elif load is not None or rate is not None or deadline_ms is not None:
        raise ConfigError("a closed loop sets its own speed: --load, --rate and --deadline-ms have no meaning there")
    if compare:
        _compare(traffic, setting, [name.strip() for name in compare.split(",") if name.strip()], json, plot)
    else:
        _run(traffic, setting, json, plot)


def needs_numpy(what: str) -> None:
    """Raises ConfigError if the extra is not installed."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise ConfigError(f"{what} needs numpy: pip install 'headway[bench]'") from None


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str, int], None]]:
    """A bar on standard error, where a person is watching; told what runs now and how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def told(name: str, done: int) -> None:
            bar.update(task, description=name, completed=done)

        yield told


def _run(traffic: "Load", setting: "Setting", json: Path | None, plot: Path | None) -> None:
    from headway.bench.sim import plots, tables
    from headway.bench.sim.compare import simulate as run
    from headway.bench.sim.compare import window_name
    from headway.bench.sim.report import write_json

    name = window_name(setting.policy)
    with progress(len(traffic), name) as told:
        report, outcome = run(traffic, setting, lambda done: told(name, done))
    console().print(tables.shown(report))
    if json is not None:
        write_json(json, report)
    if plot is not None:
        plots.draw_run(plot, report, outcome, _curve(traffic, setting, name))


def _curve(traffic: "Load", setting: "Setting", name: str) -> dict[str, list[tuple[float, float]]]:
    """Mean latency over load, from the beginning of the trace. Empty for a closed loop."""
    from headway.bench.sim.arrivals import Arrivals
    from headway.bench.sim.compare import simulate as run

    if not isinstance(traffic, Arrivals) or traffic.rate_rps is None:
        return {}
    part = traffic.cut(limit=CURVE_REQUESTS)
    if part.rate_rps is None:
        return {}
    points = []
    with progress(len(LOADS), "over load") as told:
        for index, share in enumerate(LOADS):
            report, _ = run(setting.at_load(part, share), setting)
            if report.latency.mean_ms is not None:
                points.append((share, report.latency.mean_ms))
            told("over load", index + 1)
    return {name: points}


def _compare(traffic: "Load", setting: "Setting", windows: list[str], json: Path | None, plot: Path | None) -> None:
    from headway.bench.sim import compare, plots, tables
    from headway.bench.sim.report import write_json

    count = len(dict.fromkeys([*windows, *compare.grid(setting.engine, traffic)]))
    base: dict[str, int] = {}
    with progress(count * len(traffic), "") as told:

        def watch(window: str, done: int) -> None:
            before = base.setdefault(window, len(base) * len(traffic))
            told(window, before + done)

        found = compare.compare(traffic, setting, windows, watch)
    console().print(tables.compared(found))
    if json is not None:
        write_json(json, found)
    if plot is not None:
        plots.draw_windows(plot, found)


def register(app: typer.Typer) -> None:
    app.command(help=SIMULATE, epilog=exits(USAGE))(simulate)
