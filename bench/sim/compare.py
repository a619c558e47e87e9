"""One load, many windows: what each makes of it, and how far it is from the best fixed window in hindsight.

A window is named as on the command line: the name of a policy, or `fixed:MS`. Hindsight is the fixed window that would
have been best for this very load, from a grid of {0, 5, 20, 100} ms and {.1, .25, .5, 1, 2} x the time of one request
alone. Nobody can set it beforehand; it is what an adaptive window is to be held against.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from pydantic import ValidationError

from headway.bench.sim.arrivals import Arrivals
from headway.bench.sim.engines import Engine, capacity_rps
from headway.bench.sim.report import Report, Spread, report_of
from headway.bench.sim.sources import Load
from headway.bench.sim.world import Outcome, Watch, World
from headway.policies.views import Cost
from headway.scheduler.chosen import policies_of
from headway.scheduler.config import ConfigError
from headway.scheduler.spec import PolicySpec

GRID_MS = (0.0, 5.0, 20.0, 100.0)
TOKENS_ALL = 1 << 62  # nothing is long
GRID_SOLO = (0.1, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Setting:
    """All but load and window. `policy.window` is what `--window` asked for."""

    engine: Engine
    policy: PolicySpec
    workers: int = 1
    max_batch: int = 32
    max_num_seqs: int = 32
    seed: int = 0
    slo_ms: float | None = None
    load: float | None = None
    grouped: bool = True

    @property
    def rows(self) -> int:
        """Requests at once on an iteration-level worker."""
        return max(1, int(self.policy.in_flight_fraction * self.max_num_seqs))

    def capacity_rps(self, load: Load) -> float:
        """What the workers can do at most of it."""
        sizes = {"max_batch": self.max_batch, "max_rows": self.rows, "bypass_tokens": self.bypass_tokens}
        return capacity_rps(self.engine, load, workers=self.workers, **sizes)

    @property
    def bypass_tokens(self) -> int:
        """Where the long lane begins; with `auto` where it will, once the cost is learned."""
        engine = self.engine
        return int(min(1 << 31, policies_of(self.policy).bypass(Cost(engine.a_ms, engine.b_ms, engine.m_ms, True))))

    def at_load(self, load: Arrivals, share: float) -> Arrivals:
        """The load at this share of the capacity."""
        return load.at_rate(share * self.capacity_rps(load))


def with_window(policy: PolicySpec, window: str) -> PolicySpec:
    """The policy with this window: a name or `fixed:MS`. Raises ConfigError."""
    name, colon, wait = window.partition(":")
    values = policy.model_dump() | {"window": name if name == "fixed" else window}
    if colon and name == "fixed":
        values["fixed_wait_ms"] = wait
    try:
        return PolicySpec.model_validate(values)
    except ValidationError as error:
        said = "; ".join(str(detail["msg"]) for detail in error.errors())
        raise ConfigError(f"window {window!r}: {said}") from None


def window_name(policy: PolicySpec) -> str:
    """As `with_window` takes it."""
    return f"fixed:{policy.fixed_wait_ms:g}" if policy.window == "fixed" else str(policy.window)


def simulate(load: Load, setting: Setting, watch: Watch | None = None) -> tuple[Report, Outcome]:
    """One run."""
    world = World(
        load,
        setting.engine,
        policies_of(setting.policy),
        workers=setting.workers,
        max_batch=setting.max_batch,
        max_num_seqs=setting.max_num_seqs,
        seed=setting.seed,
        grouped=setting.grouped,
    )
    outcome = world.run(watch)
    report = report_of(
        outcome,
        load,
        engine=setting.engine.name,
        window=window_name(setting.policy),
        workers=setting.workers,
        seed=setting.seed,
        offered_load=setting.load,
        slo_ms=setting.slo_ms,
    )
    return report, outcome


def grid(engine: Engine, load: Load) -> list[str]:
    """The fixed windows of hindsight, shortest first."""
    tokens, new = int(np.median(load.tokens)), int(np.median(load.max_new))
    solo_ms = engine.alone_ns(tokens, new) / 1e6
    waits = {round(wait, 3) for wait in (*GRID_MS, *(share * solo_ms for share in GRID_SOLO)) if wait <= 60_000}
    return [f"fixed:{wait:g}" for wait in sorted(waits)]


class Ratio(msgspec.Struct, frozen=True, omit_defaults=True):
    """One window, against the best fixed ones in hindsight. Absent: one of the two has too few samples."""

    window: str
    latency: Spread
    device_ms_per_request: float | None
    batch_size_mean: float | None
    mean_ratio: float | None = None
    p95_ratio: float | None = None
    goodput: float | None = None


class Comparison(msgspec.Struct, frozen=True, omit_defaults=True):
    """`best_mean`, `best_p95`: the windows of the grid that were best."""

    windows: list[Ratio]
    reports: list[Report]
    best_mean: str | None = None
    best_p95: str | None = None


def compare(
    load: Load, setting: Setting, windows: Iterable[str], watch: Callable[[str, int], None] | None = None
) -> Comparison:
    """These windows and the whole grid, on one load."""
    wanted = list(dict.fromkeys(windows))
    fixed = grid(setting.engine, load)
    named = {window: with_window(setting.policy, window) for window in [*wanted, *fixed]}
    reports: dict[str, Report] = {}
    for window, policy in named.items():
        told = None if watch is None else (lambda done, window=window: watch(window, done))
        reports[window], _ = simulate(load, _with_policy(setting, policy), told)
    mean = best([reports[name] for name in fixed], "mean_ms")
    p95 = best([reports[name] for name in fixed], "p95_ms")
    rows = [
        Ratio(
            window=window,
            latency=reports[window].latency,
            device_ms_per_request=reports[window].device_ms_per_request,
            batch_size_mean=reports[window].batch_size_mean,
            mean_ratio=_over(reports[window].latency.mean_ms, mean.latency.mean_ms if mean else None),
            p95_ratio=_over(reports[window].latency.p95_ms, p95.latency.p95_ms if p95 else None),
            goodput=reports[window].goodput,
        )
        for window in named
    ]
    return Comparison(rows, list(reports.values()), mean.window if mean else None, p95.window if p95 else None)


def _with_policy(setting: Setting, policy: PolicySpec) -> Setting:
    return Setting(**(vars(setting) | {"policy": policy}))


def best(reports: Sequence[Report], key: str) -> Report | None:
    """The one with the least of this; None if none has it."""
    having = [report for report in reports if getattr(report.latency, key) is not None]
    return min(having, key=lambda report: (getattr(report.latency, key), report.window), default=None)


def _over(value: float | None, least: float | None) -> float | None:
    return None if value is None or not least else round(value / least, 4)


def geomean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else None
