"""A replay as one HTML page that needs nothing beside itself: the tables, and pictures drawn into it.

No script, style sheet or font from elsewhere: it can be mailed, and opened in ten years. Needs matplotlib, an extra.
"""

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from headway.bench.replay import output, tables
from headway.bench.replay.report import Report
from headway.bench.sim.plots import figure

POINTS_MAX = 120  # of a curve over time
BATCHES_SHOWN = 400  # of the timeline: those in the middle of the run
WINDOWS_PER_LOAD = 40  # stretches of time, each a point in latency over load
STYLE = "body{font:15px sans-serif;max-width:72em;margin:2em auto;padding:0 1em}pre{font-size:12px;line-height:1.25}"
STYLE += "img{max-width:100%}figure{margin:1.5em 0}figcaption{color:#555}pre{overflow-x:auto}.warning{color:#a50}"
WIDTH = 150  # characters of the tables


def write_page(path: Path, report: Report) -> None:
    """The page. Raises ConfigError without matplotlib."""
    pictures = [(caption, _drawn(draw, report)) for caption, draw in _PICTURES.items()]
    title = html.escape(f"{report.facts.source} on {report.facts.target}")
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>",
        *(f"<p class=warning>{html.escape(text)}</p>" for text in report.warnings),
        f"<pre>{html.escape(_text(report))}</pre>",
    ]
    for caption, picture in pictures:
        if picture:
            source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
            parts.append(f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>')
        else:
            parts.append(f"<p>{caption}: nothing to draw</p>")
    path.write_text("\n".join([*parts, "</html>"]) + "\n", encoding="utf-8")


def _text(report: Report) -> str:
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None)
    with console.capture() as caught:
        console.print(tables.shown(report))
    return caught.get()


def _drawn(draw: Callable[[Report, Any], bool], report: Report) -> bytes:
    """A picture as PNG; empty if there is nothing to draw."""
    picture, axes = figure(1)
    picture.set_size_inches(10, 3.6)
    if not draw(report, axes[0]):
        return b""
    file = io.BytesIO()
    picture.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _columns(report: Report, name: str) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Times of sending and values, of completed requests that have one."""
    columns = report.columns
    rows = [
        (at, value)
        for at, value, ending in zip(columns["at_s"], columns[name], columns["ending"], strict=True)
        if value is not None and ending == "completed"
    ]
    return np.asarray([at for at, _ in rows], float), np.asarray([value for _, value in rows], float)


# ---------------------------------------------------------------- the pictures


def _over_time(report: Report, axis: Any) -> bool:
    """P50, P95 and the longest of each stretch, by the time of sending."""
    drawn = False
    for name, label, colour in (("e2el_ms", "end to end", "tab:blue"), ("ttft_ms", "first token", "tab:orange")):
        at, values = _columns(report, name)
        if len(values) < 2:
            continue
        edges = np.linspace(at.min(), at.max() + 1e-9, min(POINTS_MAX, max(2, len(values) // 20)) + 1)
        place = np.clip(np.digitize(at, edges) - 1, 0, len(edges) - 2)
        middles, parts = (edges[:-1] + edges[1:]) / 2, [values[place == index] for index in range(len(edges) - 1)]
        some = [index for index, part in enumerate(parts) if len(part)]
        for percent, style in ((50, "-"), (95, "--"), (100, ":")):
            found = [np.percentile(parts[index], percent) for index in some]
            axis.plot(middles[some], found, style, color=colour, label=f"{label} {_named(percent)}")
        drawn = True
    axis.set(xlabel="seconds", ylabel="ms", yscale="log")
    if drawn:
        axis.legend(fontsize="small", ncols=2)
    return drawn


def _named(percent: int) -> str:
    return "max" if percent == 100 else f"P{percent}"


def _over_load(report: Report, axis: Any) -> bool:
    """Each stretch of the run: how many a second came, and how long they took."""
    at, values = _columns(report, "e2el_ms")
    if len(values) < 2 or at.max() <= at.min():
        return False
    edges = np.linspace(at.min(), at.max() + 1e-9, WINDOWS_PER_LOAD + 1)
    came, _ = np.histogram(report.columns["at_s"], edges)
    place = np.clip(np.digitize(at, edges) - 1, 0, WINDOWS_PER_LOAD - 1)
    width = edges[1] - edges[0]
    points = [(came[i] / width, values[place == i].mean()) for i in range(WINDOWS_PER_LOAD) if (place == i).any()]
    axis.scatter([x for x, _ in points], [y for _, y in points], s=14)
    axis.set(xlabel="requests a second that came", ylabel="mean end to end, ms", yscale="log")
    return True


def _sizes(report: Report, axis: Any) -> bool:
    found = output.sizes(report)
    axis.bar(list(found), list(found.values()))
    axis.set(xlabel="requests in a batch", ylabel="batches")
    axis.xaxis.get_major_locator().set_params(integer=True)
    return bool(found)


def _window(report: Report, axis: Any) -> bool:
    """What the literal rule would wait, what the window waits, and what batches did wait."""
    watched = report.watched
    if watched is None or not (watched.windows or watched.batches):
        return False
    ruled = [(at, rule) for at, rule, _, _ in watched.windows if rule is not None]
    axis.plot([at for at, _ in ruled], [rule for _, rule in ruled], label="the rule, 1.5 x P95 of intervals")
    axis.plot([row[0] for row in watched.windows], [row[2] for row in watched.windows], label="the window")
    batches = list(watched.batches.values())
    axis.scatter(
        [b["at_s"] for b in batches], [b["waited_ms"] for b in batches], s=4, color="0.5", label="batch waited"
    )
    axis.set(xlabel="seconds", ylabel="ms", yscale="symlog")
    axis.legend(fontsize="small")
    return True


def _timeline(report: Report, axis: Any) -> bool:
    """Batches as bars on their workers; as high as they are large."""
    watched = report.watched
    known = sorted((b for b in watched.batches.values() if "took_ms" in b), key=lambda b: b["at_s"]) if watched else []
    if not known:
        return False
    begin = max(0, (len(known) - BATCHES_SHOWN) // 2)
    part = known[begin : begin + BATCHES_SHOWN]
    workers = sorted({batch["worker"] for batch in part})
    most = max(batch["size"] for batch in part)
    for row, worker in enumerate(workers):
        mine = [batch for batch in part if batch["worker"] == worker]
        heights = [0.9 * batch["size"] / most for batch in mine]
        lefts, widths = [batch["at_s"] for batch in mine], [batch["took_ms"] / 1000 for batch in mine]
        axis.bar(lefts, heights, widths, bottom=row, align="edge", alpha=0.6, edgecolor="tab:blue", linewidth=0.3)
    axis.set(xlabel="seconds", yticks=[row + 0.45 for row in range(len(workers))], yticklabels=workers)
    return True


_PICTURES: dict[str, Callable[[Report, Any], bool]] = {
    "Latency over time, from the time a request should have gone": _over_time,
    "Latency over load": _over_load,
    "Batch sizes": _sizes,
    "Window against rule": _window,
    f"Batches on their workers (at most {BATCHES_SHOWN}, from the middle of the run)": _timeline,
}
