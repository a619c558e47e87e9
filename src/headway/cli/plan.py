"""`headway plan`: what a model will take, before it is there."""

from typing import Annotated, Literal

import typer

from headway.cli.connection import Json, print_json
from headway.cli.exits import USAGE, exits, teach
from headway.cli.show import console
from headway.scheduler.config import ConfigError

PLAN = teach(
    "Plan a model's memory from its config alone: no weights are read, and no accelerator is needed.",
    "MODEL is a config.json, a folder with one, a hub id, or a packaged model. Its parameters are counted exactly, by "
    "building its class without storage; then weights, a step's working memory and the KV cache are laid out on "
    "devices of --memory each: on one, and by tensor, pipeline and expert parallelism as far as heads, experts and "
    "layers can be divided. docs/tuning.md says more.",
    examples=[
        "headway plan config.json --memory 80GiB",
        "headway plan deepseek-v3/config.json --device h200 --dtype fp8",
        "headway plan config.json --memory 24GiB --kv-dtype int8 --tensor-parallel 2",
        "headway plan smollm2 --memory 4GiB --json",
    ],
)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="config.json, folder, hub id or packaged model")],
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="of one device, all of it free: 80GiB, 24GB")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="cpu, h100, a100-80, l4, ...: its memory and its speed"),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="of the weights: auto, float32, bfloat16, float16, fp8, int8, int4")
    ] = "auto",
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"], typer.Option("--kv-dtype", help="of the KV cache")
    ] = "auto",
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", min=1, max=512, help="this degree and no other")
    ] = None,
    pipeline_parallel: Annotated[
        int | None, typer.Option("--pipeline-parallel", min=1, max=512, help="this degree and no other")
    ] = None,
    expert_parallel: Annotated[
        int | None, typer.Option("--expert-parallel", min=1, max=512, help="this degree and no other")
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=0, max=512, help="at most; 0: as many as it takes")] = 0,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, max=65536, help="most requests at once, for working memory")
    ] = 256,
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", min=1, max=1 << 20, help="token budget of one step")
    ] = 2048,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, max=4096, help="tokens in one KV page")] = 16,
    json: Json = False,
) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError("headway plan needs Transformers: pip install 'headway[worker]'") from None
    from headway.bench.sizing import shown
    from headway.bench.sizing.devices import device_of
    from headway.bench.sizing.plan import Wish, make_plan, memory_of
    from headway.bench.sizing.split import Split
    from headway.bench.sizing.weights import read_config

    known = None if device in (None, "cpu") else device_of(str(device))
    if memory is None and known is None:
        raise ConfigError("say how much memory a device has: --memory 80GiB, or --device h100")
    given = (tensor_parallel, pipeline_parallel, expert_parallel)
    wish = Wish(
        memory_bytes=memory_of(memory) if memory is not None else known.memory_bytes if known else 0,
        dtype=dtype,
        kv_dtype=kv_dtype,
        devices=devices,
        split=Split(*(degree or 1 for degree in given)) if any(given) else None,
        step_tokens=step_tokens,
        page_tokens=page_tokens,
        max_num_seqs=max_num_seqs,
        device=known,
        cpu=device == "cpu",
    )
    found = make_plan(read_config(model), wish)
    if json:
        print_json(shown.as_json(found))
    else:
        console().print(shown.shown(found))
    if found.best is None:
        raise ConfigError(f"it does not fit: {found.reasons[0]}")


def register(app: typer.Typer) -> None:
    app.command(help=PLAN, epilog=exits(USAGE))(plan)
