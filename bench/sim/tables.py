"""A report as a person reads it. What is absent in the report is an empty cell here, with a word on why below."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.bench.sim.compare import Comparison
from headway.bench.sim.report import BEYOND_MIN, Report, Spread

BARS_MAX = 12  # batch sizes shown; more are put together
BAR = 40
TENANTS_MAX = 12
HEADS = ("mean", "P50", "P90", "P95", "P99", "P99.9", "max")


def shown(report: Report) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [Text(_head(report), style="bold"), _times(report), _facts(report)]
    if report.batch_sizes:
        parts.append(sizes({int(size): count for size, count in report.batch_sizes.items()}))
    counted = (("launched because", report.launches), ("refused", report.refused), ("failed", report.failed))
    parts += [counts(title, values) for title, values in counted if values]
    if report.tenants:
        parts.append(_tenants(report))
    parts += [Text(f"note: {note}", style="dim") for note in report.notes]
    return Group(*parts)


def _head(report: Report) -> str:
    load = f", load {report.load:g}" if report.load is not None else ""
    rate = f", {report.offered_rps:,.2f} requests/s" if report.offered_rps is not None else ""
    workers = f"{report.workers} worker{'s' * (report.workers != 1)}"
    return f"{report.source}: {report.requests:,} requests{rate}{load}; {report.engine}, {workers}, {report.window}"


def number(value: float | None, unit: str = "") -> str:
    """Three digits that matter; empty if there is none."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return text + unit


def row(name: str, spread: Spread) -> list[str]:
    """A name, of how many, and the columns of HEADS."""
    values = (spread.mean_ms, spread.p50_ms, spread.p90_ms, spread.p95_ms, spread.p99_ms, spread.p999_ms, spread.max_ms)
    return [name, f"{spread.n:,}", *(number(value) for value in values)]


def _times(report: Report) -> Table:
    table = Table(title=f"milliseconds (empty: fewer than {BEYOND_MIN} samples beyond)", title_justify="left")
    table.add_column("")
    for head in ("n", *HEADS):
        table.add_column(head, justify="right")
    rows = {
        "latency": report.latency,
        "first token": report.first_token,
        "between tokens": report.inter_token,
        "waited": report.waited,
    }
    for name, spread in rows.items():
        if spread.n:
            table.add_row(*row(name, spread))
    return table


def _facts(report: Report) -> Table:
    table = Table(show_header=False)
    facts: dict[str, str] = {
        "completed": f"{report.completed:,} of {report.requests:,}, {number(report.completed_rps)} a second",
        "device": f"{number(report.device_ms_per_request)} ms a request, {share(report.utilisation)} busy",
        "batches": f"{report.batches:,}, {number(report.batch_size_mean)} requests each",
        "padding": f"{share(report.padding_waste)} of a padded batch would be padding",
    }
    if report.slo_ms is not None:
        within = f"{share(report.goodput)} within {report.slo_ms:g} ms"
        facts["goodput"] = f"{within}, {number(report.goodput_rps)} a second"
    for name, text in facts.items():
        table.add_row(name, text)
    return table


def share(value: float | None) -> str:
    """As per cent; empty if there is none."""
    return "" if value is None else f"{100 * value:.1f} %"


def sizes(found: Mapping[int, int]) -> Table:
    """A bar for each batch size, by how many batches had it; neighbours put together where there are many."""
    width = -(-max(found) // BARS_MAX)
    bins: dict[int, int] = {}
    for size, count in found.items():
        bins[(size - 1) // width] = bins.get((size - 1) // width, 0) + count
    most = max(bins.values())
    table = Table(title="batch size", title_justify="left", show_header=False, box=None)
    for index in range(max(bins) + 1):
        low, high = index * width + 1, (index + 1) * width
        count = bins.get(index, 0)
        table.add_row(f"{low}" if low == high else f"{low}-{high}", f"{count:,}", "█" * -(-count * BAR // most))
    return table


def counts(title: str, values: Mapping[str, int]) -> Table:
    """How often, and which share of all."""
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    total = sum(values.values())
    for name, count in values.items():
        table.add_row(name, f"{count:,}", f"{100 * count / total:.1f} %")
    return table


def _tenants(report: Report) -> Table:
    table = Table(title="tenants", title_justify="left")
    for head in ("", "requests", "completed", *HEADS, "goodput"):
        table.add_column(head, justify="right" if head else "left")
    largest = sorted(report.tenants.items(), key=lambda item: (-item[1].requests, item[0]))
    for name, tenant in largest[:TENANTS_MAX]:
        times = row(name, tenant.latency)
        table.add_row(name, f"{tenant.requests:,}", times[1], *times[2:], share(tenant.goodput))
    if len(largest) > TENANTS_MAX:
        table.caption = f"and {len(largest) - TENANTS_MAX} smaller ones"
    return table


def compared(comparison: Comparison) -> RenderableType:
    """A row for each window: the asked ones, and below them the grid of hindsight."""
    table = Table(title="against the best fixed window in hindsight", title_justify="left")
    table.add_column("window")
    for head in ("mean ms", "P50", "P95", "P99", "mean ratio", "P95 ratio", "device ms", "batch", "goodput"):
        table.add_column(head, justify="right")
    for one in comparison.windows:
        star = " *" * (one.window == comparison.best_mean) + " +" * (one.window == comparison.best_p95)
        times = (one.latency.mean_ms, one.latency.p50_ms, one.latency.p95_ms, one.latency.p99_ms)
        ratios = ("" if ratio is None else f"{ratio:.3f}" for ratio in (one.mean_ratio, one.p95_ratio))
        rest = number(one.device_ms_per_request), number(one.batch_size_mean), share(one.goodput)
        table.add_row(one.window + star, *(number(value) for value in times), *ratios, *rest)
    notes = comparison.reports[0].notes if comparison.reports else ()
    legend = "* best fixed window by mean, + by P95"
    return Group(table, Text(legend, style="dim"), *(Text(f"note: {note}", style="dim") for note in notes))
