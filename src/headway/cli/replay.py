"""`headway replay` and `headway compare`: a load sent to a running server at its own times, and two such runs."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.connection import ADDRESS, Connect, ServerKey, Timeout, ask
from headway.cli.exits import INTERRUPTED, REFUSED, UNREACHABLE, USAGE, exits, teach
from headway.cli.flags import settings
from headway.cli.servers import Config
from headway.cli.show import console
from headway.cli.simulate import needs_numpy, progress
from headway.scheduler import clock
from headway.scheduler.config import ConfigError

if TYPE_CHECKING:
    from headway.bench.replay.job import Job
    from headway.bench.replay.plan import Shot
    from headway.bench.replay.report import Report
    from headway.bench.replay.seen import Seen
    from headway.bench.replay.watch import Watched
    from headway.scheduler.spec import ServerSpec

KINDS = ("generate", "embed", "classify", "score", "call")
PATTERNS = ("trace", "fixed", "poisson")
TRACE, TARGET, SHAPE, PROMPT, RUN, OUTPUT = "Source", "Target", "Load", "Requests", "Run", "Report"

REPLAY = teach(
    "Send a load to a running server at its own times, and report what came of it.",
    "SOURCE is a trace file (Azure, BurstGPT, Mooncake, ServeGen), a recording of headway's own (key record), or "
    "made-up traffic, as in headway simulate. Sending never waits for an answer, and latency counts from the time a "
    "request should have gone; with --closed, or a closed source, so many clients wait for their answers instead.",
    "The target is a headway server (--connect), the scheduler inside this process (--config FILE), or any server with "
    "the OpenAI HTTP interface (--openai URL). docs/replay.md says more.",
    examples=[
        "headway replay AzureLLMInferenceTrace_conv.csv --rate 2 --span-s 60 --clip-input 1024",
        "headway replay traffic.msgpack --speed 2 --slo ttft:200,itl:50,e2e:2000 --html report.html",
        "headway replay poisson:rps=500,n=30000,tokens=16 --kind embed --processes 2",
        "headway replay poisson:rps=5,n=500 --openai http://127.0.0.1:8000 --model my-model --json b.json",
        "headway compare a.json b.json",
    ],
)
COMPARE = teach(
    "Compare two reports of headway replay: each figure's ratio, with the interval that holds it 95 times in 100.",
    examples=["headway replay trace.csv --json a.json", "headway compare a.json b.json"],
)


def _option(panel: str, text: str, **keys: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **keys)


def replay(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a trace file, a recording, or made-up traffic")],
    connect: Connect = ADDRESS,
    server_key: ServerKey = None,
    timeout_ms: Timeout = 5_000,
    config: Config = None,
    openai: Annotated[str | None, _option(TARGET, "an OpenAI-compatible server", metavar="URL")] = None,
    openai_key: Annotated[
        str, _option(TARGET, "its bearer token", envvar="OPENAI_API_KEY", metavar="KEY", show_envvar=True)
    ] = "",
    model: Annotated[str, _option(TARGET, "which of the target's models")] = "",
    start_s: Annotated[float | None, _option(TRACE, "begin so many seconds into the load", min=0)] = None,
    span_s: Annotated[float, _option(TRACE, "take so many seconds of it; 0: all", min=0)] = 0.0,
    limit: Annotated[int, _option(TRACE, "take so many requests; 0: all", min=0)] = 0,
    sample: Annotated[float, _option(TRACE, "keep this share, each at its own time", min=1e-6, max=1)] = 1.0,
    lengths: Annotated[Path | None, _option(TRACE, "ServeGen's lengths", metavar="FILE")] = None,
    seed: Annotated[int, _option(TRACE, "of everything that is drawn", min=0)] = 0,
    speed: Annotated[float, _option(SHAPE, "so many times as fast", min=1e-6)] = 1.0,
    rate: Annotated[float | None, _option(SHAPE, "requests a second on average", min=1e-6)] = None,
    pattern: Annotated[str, _option(SHAPE, f"when they come: {', '.join(PATTERNS)}", metavar="NAME")] = "trace",
    closed: Annotated[int, _option(SHAPE, "so many clients, each waits for its answer", min=0, max=65_536)] = 0,
    think_ms: Annotated[float, _option(SHAPE, "and then thinks, on average", min=0)] = 0.0,
    cancel_share: Annotated[float, _option(SHAPE, "share that is cancelled", min=0, max=1)] = 0.0,
    cancel_after_ms: Annotated[float, _option(SHAPE, "so long after it was sent", min=0.001)] = 500.0,
    slow_share: Annotated[float, _option(SHAPE, "share that reads its answer slowly", min=0, max=1)] = 0.0,
    slow_ms: Annotated[float, _option(SHAPE, "waiting so long before each message", min=0)] = 100.0,
    deadline_ms: Annotated[int, _option(SHAPE, "a deadline for every request; 0: its own", min=0)] = 0,
    priority: Annotated[int | None, _option(SHAPE, "of every request", min=-10, max=10)] = None,
    tenants: Annotated[int, _option(SHAPE, "so many tenants, where the load names none", min=0, max=4096)] = 0,
    kind: Annotated[str, _option(PROMPT, f"{', '.join(KINDS)}; auto: what the model does", metavar="NAME")] = "auto",
    prompts: Annotated[str, _option(PROMPT, "ids, or text (then --tokenizer)", metavar="ids|text")] = "ids",
    tokenizer: Annotated[str, _option(PROMPT, "tokenizer.json of the model, or bytes", metavar="FILE")] = "",
    input_scale: Annotated[float, _option(PROMPT, "inputs so many times as long", min=1e-6)] = 1.0,
    output_scale: Annotated[float, _option(PROMPT, "answers so many times as long", min=1e-6)] = 1.0,
    clip_input: Annotated[int, _option(PROMPT, "no input longer than this; 0: as they are", min=0)] = 0,
    clip_output: Annotated[int, _option(PROMPT, "no answer longer than this; 0: as they are", min=0)] = 0,
    stream: Annotated[bool, _option(PROMPT, "ask for answers piece by piece")] = True,
    ignore_eos: Annotated[bool, _option(PROMPT, "answers as long as in the load, whatever the model says")] = True,
    temperature: Annotated[float | None, _option(PROMPT, "of the sampling", min=0, max=10)] = None,
    concurrency: Annotated[int, _option(RUN, "most under way at once; 0: no limit", min=0)] = 0,
    processes: Annotated[int, _option(RUN, "processes that send", min=1, max=64)] = 1,
    warmup_s: Annotated[float, _option(RUN, "do not count the first seconds", min=0)] = 0.0,
    cooldown_s: Annotated[float, _option(RUN, "do not count the last seconds", min=0)] = 0.0,
    slo: Annotated[str | None, _option(OUTPUT, "goodput: ttft:200,itl:50,e2e:2000 in ms", metavar="BOUNDS")] = None,
    cost_per_hour: Annotated[float | None, _option(OUTPUT, "of the devices, for the cost of a request", min=0)] = None,
    json: Annotated[Path | None, _option(OUTPUT, "write the report as JSON", metavar="FILE")] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write a page with pictures", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    needs_numpy("replaying")
    from headway.bench.replay import slo as objectives
    from headway.bench.replay.job import Job
    from headway.bench.replay.plan import Shaping, opened
    from headway.bench.replay.report import Facts, report_of
    from headway.bench.replay.targets import How

    _check(pattern=pattern, kind=kind, prompts=prompts, tokenizer=tokenizer, openai=openai, config=config)
    _check_run(processes=processes, config=config, json=json, page=page)
    bounds = objectives.parse(slo) if slo else None
    load = opened(
        source,
        Shaping(
            speed=speed,
            rate_rps=rate,
            pattern=pattern,  # type: ignore[arg-type]
            sample=sample,
            input_scale=input_scale,
            output_scale=output_scale,
            input_max=clip_input,
            output_max=clip_output,
            deadline_ms=deadline_ms,
            priority=priority,
            tenants=tenants,
            cancel_share=cancel_share,
            cancel_ms=cancel_after_ms,
            slow_share=slow_share,
            seed=seed,
        ),
        start_s=start_s,
        span_s=span_s,
        limit=limit,
        lengths=lengths,
        clients=closed,
        think_ms=think_ms,
    )
    how = How(
        model=model,
        stream=stream,
        tokenizer=tokenizer if prompts == "text" else "",
        ignore_eos=ignore_eos,
        temperature=temperature,
        slow_ms=slow_ms,
        seed=seed,
    )
    job = Job(
        connect="" if openai or config else connect,
        server_key=server_key or "",
        timeout_ms=timeout_ms,
        openai=openai or "",
        openai_key=openai_key,
        how=how,
        concurrency=concurrency,
        clients=load.clients,
        think_ns=load.think_ns,
        seed=seed,
    )
    spec = settings(config, {}) if config else None
    shots = load.shots(kind if kind != "auto" else _kind_of(job, spec))
    began = datetime.fromtimestamp(clock.wall_s(), UTC)
    seen, watched = _play(job, shots, spec, processes)
    cut = len(shots) - len(seen)
    facts = Facts(
        source=load.name,
        target=openai or (f"embedded {config}" if config else connect),
        model=model,
        date=began.isoformat(timespec="seconds"),
        mode=load.mode + (f", {concurrency} at once" if concurrency else ""),
        seed=seed,
        offered_rps=load.rate_rps,
        concurrency=concurrency,
        processes=processes,
        warmup_s=warmup_s,
        cooldown_s=cooldown_s,
        cost_per_hour=cost_per_hour,
        cut=cut,
        notes=load.notes,
    )
    report = report_of(facts, seen, watched, bounds)
    _write(report, json, page)
    if cut or not report.all_well:
        raise typer.Exit(INTERRUPTED if cut else REFUSED)


def _check(*, pattern: str, kind: str, prompts: str, tokenizer: str, openai: str | None, config: str | None) -> None:
    """What the types of the options cannot say. Raises ConfigError."""
    for name, value, known in (
        ("pattern", pattern, PATTERNS),
        ("kind", kind, (*KINDS, "auto")),
        ("prompts", prompts, ("ids", "text")),
    ):
        if value not in known:
            raise ConfigError(f"--{name} is {value!r}; it must be one of {', '.join(known)}")
    if prompts == "text" and not tokenizer:
        raise ConfigError("--prompts text needs --tokenizer: the model's tokenizer.json, to make texts of exact length")
    if openai and config:
        raise ConfigError("--openai and --config both name a target; give one of them")


def _check_run(*, processes: int, config: str | None, json: Path | None, page: Path | None) -> None:
    """What would be found out too late. Raises ConfigError."""
    if processes > 1 and config:
        raise ConfigError(f"--processes {processes}: an embedded scheduler (--config) has one process that sends to it")
    for file in (json, page):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent} to write it to")
    if page is not None:
        from headway.bench.sim import plots

        plots.figure(1)


def _kind_of(job: "Job", spec: "ServerSpec | None") -> str:
    """What the target's model does. Raises HeadwayError if it cannot be asked."""
    wanted = job.how.model
    if job.openai:
        return "generate"
    if spec is not None:
        return next((model.kind for model in spec.models if wanted in ("", model.name)), "generate")
    from headway.bench.replay.job import kind_of

    return ask(job.connect, job.server_key or None, job.timeout_ms, lambda client: kind_of(client, job))


def _play(
    job: "Job", shots: "list[Shot]", spec: "ServerSpec | None", processes: int
) -> "tuple[list[Seen], Watched | None]":
    from headway.bench.replay import job as jobs
    from headway.bench.replay.player import run

    if processes > 1:
        with progress(len(shots), "sent, and ended"):
            return run(jobs.play_in(processes, job, shots))
    with progress(len(shots), "ended") as told:
        return run(jobs.play(job, shots, spec=spec, told=lambda _fired, ended: told("ended", ended)))


def _write(report: "Report", json: Path | None, page: Path | None) -> None:
    """Shown and written."""
    from headway.bench.replay import output, tables
    from headway.bench.replay import page as pages

    console().print(tables.shown(report))
    if json is not None:
        output.write_json(json, report)
    if page is not None:
        pages.write_page(page, report)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="a report of headway replay --json")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="another")],
    seed: Annotated[int, typer.Option(min=0, help="of the drawing")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="write the comparison as JSON")] = None,
) -> None:
    needs_numpy("comparing")
    from headway.bench.replay import output, tables
    from headway.bench.replay.compare import compare as compared
    from headway.bench.sim.report import write_json

    runs = output.read_run(a), output.read_run(b)
    found = compared(*runs, seed=seed)
    console().print(tables.compared(str(a), str(b), *runs, found))
    if json is not None:
        write_json(json, found)


def register(app: typer.Typer) -> None:
    app.command(help=REPLAY, epilog=exits(USAGE, UNREACHABLE, REFUSED))(replay)
    app.command(help=COMPARE, epilog=exits(USAGE))(compare)
