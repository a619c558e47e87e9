"""A comparison as a person reads it, and as JSON."""

from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.bench.ab.simulated import Compared, worst_error
from headway.bench.sim.report import Report

AIM = 0.15  # by which a simulated mean or P95 may be off, before its comparison is called doubtful


def shown(found: Compared) -> Group:
    """Tables for the terminal."""
    parts: list[RenderableType] = [_figures(found), _devices(found)]
    parts += [Text(note) for note in found.reports[0].notes]
    if found.same:
        parts.append(Text("every request went exactly as in A: what differs has no effect on this traffic"))
    parts.append(_calibration(found))
    return Group(*parts)


def as_json(found: Compared) -> dict[str, Any]:
    """All of it."""
    told: dict[str, Any] = msgspec.to_builtins(found)
    if found.calibration is not None and found.calibration.errors:
        told["calibration"]["worst_error"] = worst_error(found.calibration)
    return told


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 or not name else "right", no_wrap=True)
    return table


def _figures(found: Compared) -> Table:
    """B / A of each figure, with its interval."""
    a, b = found.names
    table = _table(f"A: {a}   B: {b}   the same traffic, simulated", "", "A", "B", "B / A", "95% interval", "")
    for one in found.differences:
        sure = one.low is not None and one.high is not None
        table.add_row(
            one.figure,
            *(f"{value:,.4g}" if value is not None else "-" for value in (one.a, one.b)),
            f"{one.ratio:.3f}" if one.ratio is not None else "-",
            f"{one.low:.3f} to {one.high:.3f}" if sure else "",
            one.verdict,
        )
    return table


def _devices(found: Compared) -> Table:
    """What each did with the engine."""
    table = _table("what it took", "", "A", "B")
    rows: tuple[tuple[str, Any], ...] = (
        ("device ms a request", lambda r: r.device_ms_per_request),
        ("share of the time busy", lambda r: r.utilisation),
        ("requests of a batch", lambda r: r.batch_size_mean),
        ("refused and failed", lambda r: sum(r.refused.values()) + sum(r.failed.values())),
        ("launched because", _because),
    )
    for name, value in rows:
        table.add_row(name, *(_cell(value(report)) for report in found.reports))
    return table


def _because(report: Report) -> str:
    most = sorted(report.launches.items(), key=lambda item: -item[1])[:2]
    total = sum(report.launches.values()) or 1
    return ", ".join(f"{name} {count / total:.0%}" for name, count in most)


def _cell(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:,.3g}"


def _calibration(found: Compared) -> Text:
    one = found.calibration
    if one is None:
        return Text(
            "Nothing live is known of this traffic: the engine's cost is taken as given, and how far simulated "
            "times are from live ones is not known."
        )
    lines = [
        f"Calibrated on the first {one.fitted_on} requests as they went live under A: the cost is {one.factor:.2f} "
        f"times what was given. On the other {one.held_out}, simulated under A against live:"
    ]
    lines += [
        f"  {error.figure}: {error.simulated_ms:,.1f} ms, live {error.live_ms:,.1f} ms ({error.share:+.1%})"
        for error in one.errors
    ]
    if worst_error(one) > AIM:
        lines.append(f"That is more than {AIM:.0%} off: differences of this size mean nothing.")
    return Text("\n".join(lines))
