"""A replay's report as a person reads it. What is absent in the report is an empty cell, with a word on why."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.bench.replay import output
from headway.bench.replay.compare import Difference
from headway.bench.replay.output import Run
from headway.bench.replay.report import METRICS, Report
from headway.bench.sim.report import BEYOND_MIN
from headway.bench.sim.tables import HEADS, TENANTS_MAX, counts, number, row, share, sizes

HELD_SHOWN_MS = 0.5  # of being held back: below it there is no limit, or nobody met it


def shown(report: Report) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [Text(_head(report), style="bold"), _times(report), _facts(report)]
    found = output.sizes(report)
    if found:
        parts.append(sizes(found))
    for title, values in (
        ("launched because", output.reasons(report)),
        ("held back because", output.reasons(report, "held")),
        ("refused", report.refused),
        ("refused because", output.reasons(report, "refusal")),
        ("failed", report.failed),
    ):
        if values:
            parts.append(counts(title, values))
    parts += [Text(f"{code}: {said}", style="dim") for code, said in report.messages.items() if code in report.failed]
    if report.tenants:
        parts.append(_tenants(report))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    parts += [Text(f"note: {note}", style="dim") for note in report.facts.notes]
    return Group(*parts)


def _head(report: Report) -> str:
    facts = report.facts
    rate = f", {facts.offered_rps:,.2f} requests/s offered" if facts.offered_rps is not None else ""
    left = f" ({report.left_out:,} more in warm-up and cool-down)" if report.left_out else ""
    return f"{facts.source} -> {facts.target}: {report.requests:,} requests{left}{rate}; {facts.mode}"


def _times(report: Report) -> Table:
    table = Table(title=f"milliseconds (empty: fewer than {BEYOND_MIN} samples beyond)", title_justify="left")
    table.add_column("")
    for head in ("n", *HEADS):
        table.add_column(head, justify="right")
    for name, words in METRICS.items():
        times = report.times[name]
        if not times.n or (name == "held" and (times.max_ms or 0) < HELD_SHOWN_MS):
            continue
        table.add_row(*row(words, times))
    return table


def _facts(report: Report) -> Table:
    table = Table(show_header=False)
    ends = ", ".join(f"{count:,} {name}" for name, count in report.endings.items() if count)
    table.add_row("endings", f"{ends or 'none'}; {report.first_tokens:,} had a first token")
    rates = [f"{number(output.rate(report, report.completed))} requests/s"]
    if report.output_tokens:
        rates.append(f"{number(output.rate(report, report.output_tokens))} output tokens/s")
    rates.append(f"{number(output.rate(report, report.input_tokens))} input tokens/s")
    table.add_row("throughput", ", ".join(rates) if report.completed else "nothing was completed")
    if report.good is not None and report.requests:
        text = (
            f"{share(report.good / report.requests)} within {report.slo}, {number(output.rate(report, report.good))}/s"
        )
        table.add_row("goodput", text)
    device = output.per_request(report)
    if device is not None and report.device_ms is not None:
        workers = report.device_ms / 1000 / report.duration_s if report.duration_s else 0.0
        table.add_row("device", f"{number(device)} ms a request, {workers:.2f} devices busy on average")
    price = output.cost(report)
    if price is not None:
        table.add_row("cost", f"{price:.3g} a request")
    watched = report.watched
    if watched is not None and watched.launched:
        requests = sum(size * count for size, count in output.sizes(report).items())
        table.add_row(
            "batches", f"{watched.launched:,}, {number(requests / max(1, len(watched.batches)))} requests each"
        )
    if report.slow_readers:
        table.add_row("slow readers", f"{report.slow_readers:,}, counted by their endings, not in any time")
    return table


def _tenants(report: Report) -> Table:
    table = Table(title="tenants, end to end", title_justify="left")
    for head in ("", "requests", "completed", *HEADS, "goodput"):
        table.add_column(head, justify="right" if head else "left")
    largest = sorted(report.tenants.items(), key=lambda item: (-item[1].requests, item[0]))
    for name, tenant in largest[:TENANTS_MAX]:
        table.add_row(name, f"{tenant.requests:,}", *row(name, tenant.e2el)[1:], share(tenant.goodput))
    if len(largest) > TENANTS_MAX:
        table.caption = f"and {len(largest) - TENANTS_MAX} smaller ones"
    return table


def compared(name_a: str, name_b: str, a: Run, b: Run, found: Sequence[Difference]) -> RenderableType:
    """A row for each figure."""
    table = Table(title=f"A: {name_a}\nB: {name_b}", title_justify="left")
    table.add_column("")
    for head in ("A", "B", "B / A", "95 % interval"):
        table.add_column(head, justify="right")
    table.add_column("B is")
    for one in found:
        interval = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        table.add_row(one.figure, number(one.a), number(one.b), ratio, interval, one.verdict)
    for name in ("request_throughput", "output_throughput", "goodput_share", "device_ms_per_request"):
        values = getattr(a, name), getattr(b, name)
        if None not in values and values[0]:
            table.add_row(name, number(values[0]), number(values[1]), f"{values[1] / values[0]:.3f}", "", "")
    parts: list[RenderableType] = [table]
    if (a.source, a.mode, a.num_prompts) != (b.source, b.mode, b.num_prompts):
        loads = [f"{run.source}, {run.mode}, {run.num_prompts:,} requests" for run in (a, b)]
        parts.append(Text(f"warning: the loads are not the same: {loads[0]} / {loads[1]}", style="yellow"))
    return Group(*parts)
