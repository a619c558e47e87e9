"""Live times beside simulated ones: mean, median and P95 to the end and to the first token, and how far off."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from headway.bench.ab.calibrate import times_ms
from headway.bench.replay.seen import OK, Seen
from headway.bench.sim.arrivals import NS_PER_MS, Arrivals
from headway.bench.sim.compare import Setting

Floats = npt.NDArray[np.float64]

SEEDS = 8  # runs of the simulator, each with noise of its own, taken together
JUDGED = ("mean", "P95")


class Figure(msgspec.Struct, frozen=True):
    """One number of one load, live and simulated. `name`: mean, P50 or P95; `of`: e2e or ttft. `paced_ms`: simulated
    with steps as long as the machine made them during that load, by one factor for all."""

    of: str
    name: str
    live_ms: float
    simulated_ms: float
    paced_ms: float

    @property
    def error(self) -> float:
        """Positive: simulated is longer."""
        return self.simulated_ms / self.live_ms - 1

    @property
    def paced_error(self) -> float:
        """Of the simulation at the machine's own pace."""
        return self.paced_ms / self.live_ms - 1


class Load(msgspec.Struct, frozen=True):
    """One load. `share`: of the capacity. `pace`: its steps live, over what the fit says of them: what the machine was
    slower by than while it was calibrated, which no simulator can know. `rows`: requests in a live step, mean."""

    share: float
    rate_rps: float
    requests: int
    lost: int
    pace: float
    rows: float
    figures: list[Figure]

    @property
    def worst(self) -> float:
        """The largest error, at the machine's pace, of those that are judged."""
        return max(abs(one.paced_error) for one in self.figures if one.name in JUDGED)


def load_of(
    share: float, load: Arrivals, seen: list[Seen], setting: Setting, *, way_ms: float, pace: float, rows: float
) -> Load:
    """What was seen of a load, and what the simulator makes of the same arrivals."""
    ok = np.asarray([one.code == OK and one.first_ns > 0 for one in seen])
    ends = np.asarray([(one.done_ns - one.due_ns) / NS_PER_MS for one in seen])
    firsts = np.asarray([(one.first_ns - one.due_ns) / NS_PER_MS for one in seen])
    made, paced = (
        [times_ms(load, replace(one, seed=seed)) for seed in range(SEEDS)] for one in (setting, _paced(setting, pace))
    )
    figures = []
    for at, (of, live) in enumerate((("e2e", ends[ok]), ("ttft", firsts[ok]))):
        simulated, at_pace = (np.concatenate([times[at][ok] for times in runs]) for runs in (made, paced))
        figures += _figures(of, live, *(one[np.isfinite(one)] + way_ms for one in (simulated, at_pace)))
    return Load(share, load.rate_rps or 0.0, len(seen), int((~ok).sum()), pace, rows, figures)


def _paced(setting: Setting, pace: float) -> Setting:
    """The same with all steps so many times as long."""
    engine = setting.engine
    if engine.steps is None:
        return setting
    steps = replace(engine.steps, ms=tuple(pace * price for price in engine.steps.ms))
    return replace(setting, engine=replace(engine, steps=steps))


def _figures(of: str, live: Floats, simulated: Floats, paced: Floats) -> list[Figure]:
    found = [Figure(of, "mean", *(float(one.mean()) for one in (live, simulated, paced)))]
    for name, percent in (("P50", 50), ("P95", 95)):
        found.append(Figure(of, name, *(float(np.percentile(one, percent)) for one in (live, simulated, paced))))
    return found


def shown(loads: list[Load], within: float) -> Table:
    """A row for each figure of each load."""
    table = Table(title="live and simulated, milliseconds", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("load", "requests/s", "n", "machine", "", "", "live", "simulated", "error", "at its pace", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for load in loads:
        head = [f"{load.share:g}", f"{load.rate_rps:.2f}", str(load.requests), f"x{load.pace:.3f}"]
        for at, one in enumerate(load.figures):
            off = abs(one.paced_error) > within and one.name in JUDGED
            cells = [of if at == 0 else "" for of in head]
            error = f"{one.paced_error:+.1%}"
            cells += [one.of, one.name, f"{one.live_ms:,.1f}", f"{one.simulated_ms:,.1f}", f"{one.error:+.1%}"]
            table.add_row(*cells, f"{one.paced_ms:,.1f}", f"[bold red]{error}[/]" if off else error)
        table.add_section()
    return table


def as_json(loads: list[Load], facts: dict[str, Any]) -> bytes:
    """All of it, with the errors."""
    rows = [
        msgspec.to_builtins(load)
        | {
            "figures": [
                msgspec.to_builtins(one) | {"error": round(one.error, 5), "paced_error": round(one.paced_error, 5)}
                for one in load.figures
            ],
            "worst": round(load.worst, 5),
        }
        for load in loads
    ]
    return msgspec.json.format(msgspec.json.encode(facts | {"loads": rows}), indent=1) + b"\n"
