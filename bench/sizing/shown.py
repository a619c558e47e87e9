"""A plan as a person reads it, and as JSON."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.bench.sizing.plan import Option, Plan, Row
from headway.workers.memory import LENGTHS, size

OPTIONS_MAX = 12  # rows of the table of splits


def shown(plan: Plan) -> Group:
    """Tables for the terminal."""
    parts: list[RenderableType] = [_model(plan)]
    if plan.best is not None and plan.best.memory is not None:
        parts += [_division(plan.best), _batches(plan)]
    if len(plan.options) > 1:
        parts.append(_options(plan))
    parts.append(Text("\n".join(f"- {reason}" for reason in plan.reasons)))
    return Group(*parts)


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it; sizes in bytes."""
    return {
        "model_type": plan.model,
        "kind": plan.kind,
        "parameters": plan.parameters,
        "active_parameters": plan.counted.active,
        "parts": dict(plan.counted.parts),
        "weights": {"format": plan.form.name, "bytes": plan.form.weight_bytes(plan.counted.parts)},
        "layers": plan.shape.layers,
        "heads": plan.shape.heads,
        "kv_heads": plan.shape.kv_heads,
        "experts": plan.shape.experts,
        "context_tokens": plan.context_tokens,
        "kv_token_bytes": plan.token_bytes,
        "windowed_bytes": {str(length): held for length, held in plan.windowed_bytes.items()},
        "device_memory_bytes": plan.wish.memory_bytes,
        "best": None if plan.best is None else plan.best.as_dict(),
        "batches": [asdict(row) for row in plan.batches],
        "options": [option.as_dict() for option in plan.options],
        "reasons": plan.reasons,
    }


def _table(title: str, *columns: str) -> Table:
    head = any(columns)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", show_header=head)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def count_words(number: int) -> str:
    """671.0B, 134.5M."""
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.1f}{letter}"
    return str(number)


def _model(plan: Plan) -> Table:
    shape, counted = plan.shape, plan.counted
    table = _table(f"{plan.model}: what the config says", "", "")
    table.add_row("parameters", count_words(counted.total))
    if counted.active < counted.total:
        table.add_row("active for a token", count_words(counted.active))
    table.add_row(f"weights as {plan.form.name}", size(plan.form.weight_bytes(counted.parts)))
    heads = f"{shape.heads}, latent KV" if shape.latent else f"{shape.heads}, {shape.kv_heads} KV"
    heads = heads if plan.token_bytes else str(shape.heads)
    table.add_row("layers; heads", f"{shape.layers}; {heads}")
    if shape.experts:
        table.add_row("routed experts a layer", str(shape.experts))
    table.add_row("context", f"{plan.context_tokens} tokens")
    if plan.token_bytes:
        table.add_row("KV cache a token", f"{size(plan.token_bytes)} ({plan.token_bytes} bytes)")
    for length, held in plan.windowed_bytes.items():
        table.add_row(f"of {length} tokens, windows alone kept", size(held))
    return table


def _division(best: Option) -> Table:
    held = best.memory
    assert held is not None
    table = _table(f"each device: {best.split}", "", "")
    table.add_row("weights", size(held.weight_bytes))
    table.add_row("a step's working memory", size(held.work_bytes))
    if held.token_bytes:
        table.add_row("KV cache", f"{size(held.kv_bytes)} = {held.kv_tokens} tokens of {size(held.token_bytes)}")
    table.add_row("of", f"{size(held.free_bytes)} free")
    return table


def _batches(plan: Plan) -> Table:
    speed = any(row.step_ms is not None for row in plan.batches)
    columns = ["tokens of a request", "fit at once", "run at once"]
    table = _table("how many requests", *columns, *(("step at best, ms", "tokens/s at most") if speed else ()))
    for row in plan.batches:
        table.add_row(*_row(row, speed))
    return table


def _row(row: Row, speed: bool) -> list[str]:
    cells = [f"{row.tokens:,}"]
    if row.fit is None:
        cells += ["past the context", ""]
    else:
        cells += [f"{row.fit:,}", "" if row.batch is None else f"{row.batch:,}"]
    if speed:
        cells.append("" if row.step_ms is None else f"{row.step_ms:.1f}")
        cells.append("" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}")
    return cells


def _options(plan: Plan) -> Table:
    """The best, and the others by the number of devices; of what does not fit, why."""
    most = plan.best.split.devices * 2 if plan.best else 8
    near = [one for one in plan.options if one.split.devices <= most]
    near.sort(key=lambda one: (one is not plan.best, one.memory is None, one.split.devices, one.split.pipeline))
    lengths = [f"{length // 1024}k" for length in LENGTHS]
    table = _table("ways to divide it", "", "devices", "weights each", *lengths, "")
    for one in near[:OPTIONS_MAX]:
        counts = ["" if (n := one.requests_at(length)) is None else f"{n:,}" for length in LENGTHS]
        weights = size(one.memory.weight_bytes) if one.memory else "-"
        why = "; ".join(one.faults) or ("recommended" if one is plan.best else "")
        table.add_row(str(one.split), str(one.split.devices), weights, *(counts if one.memory else [""] * 4), why)
    table.columns[-1].no_wrap, table.columns[-1].justify = False, "left"
    return table
