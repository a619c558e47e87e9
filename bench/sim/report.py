"""What a run was like, in numbers that mean something.

A percentile says of how many it is, and is left out when fewer than five lie beyond it: the 99th of forty requests is
not a number. What cannot be computed is absent, never NaN and never 0: no inter-token time without second tokens, no
goodput without an SLO, no mean of nothing. Latency counts from arrival to ending, of those that ended well.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headway.bench.sim.arrivals import Arrivals, Ints
from headway.bench.sim.sources import Load
from headway.bench.sim.world import OK, Outcome

NS_PER_MS = 1e6
NS_PER_S = 1e9
BEYOND_MIN = 5  # samples that must lie beyond a percentile
PERCENTILES = ((50, "p50_ms"), (90, "p90_ms"), (95, "p95_ms"), (99, "p99_ms"), (99.9, "p999_ms"))

Floats = npt.NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True, omit_defaults=True):
    """`n` times in milliseconds. A key that is absent has too few samples."""

    n: int
    mean_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    max_ms: float | None = None


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tenant's part."""

    requests: int
    completed: int
    latency: Spread
    goodput: float | None = None


class Report(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One run. Shares are from 0 to 1; `goodput`: share of all requests that ended well within the SLO."""

    source: str
    engine: str
    window: str
    workers: int
    seed: int
    requests: int
    completed: int
    span_s: float
    load: float | None = None
    offered_rps: float | None = None
    completed_rps: float | None = None
    latency: Spread
    first_token: Spread
    inter_token: Spread
    waited: Spread
    slo_ms: float | None = None
    goodput: float | None = None
    goodput_rps: float | None = None
    device_ms_per_request: float | None = None
    utilisation: float | None = None
    batches: int
    batch_size_mean: float | None = None
    batch_sizes: dict[str, int]
    padding_waste: float | None = None
    launches: dict[str, int]
    refused: dict[str, int]
    failed: dict[str, int]
    tenants: dict[str, Tenant]
    notes: tuple[str, ...] = ()


def spread(times_ms: Floats, weights: Ints | None = None) -> Spread:
    """Of these times, each counted as often as its weight says."""
    if weights is not None:
        times_ms, weights = times_ms[weights > 0], weights[weights > 0]
    if not len(times_ms):
        return Spread(0)
    order = np.argsort(times_ms, kind="stable")
    times = times_ms[order]
    upto = np.arange(1, len(times) + 1) if weights is None else np.cumsum(weights[order])
    n = int(upto[-1])
    found: dict[str, float] = {}
    for percent, name in PERCENTILES:
        rank = -(-round(percent * 10) * n // 1000)  # nearest rank, from 1
        if n - rank >= BEYOND_MIN:
            found[name] = round(float(times[np.searchsorted(upto, rank)]), 6)
    mean = float(np.average(times, weights=None if weights is None else weights[order]))
    return Spread(n, mean_ms=round(mean, 6), max_ms=round(float(times[-1]), 6), **found)


def report_of(
    outcome: Outcome,
    load: Load,
    *,
    engine: str,
    window: str,
    workers: int,
    seed: int,
    offered_load: float | None = None,
    slo_ms: float | None = None,
) -> Report:
    """The numbers of one run."""
    at, first, done = (np.asarray(times) for times in (outcome.at_ns, outcome.first_ns, outcome.done_ns))
    ending = np.asarray(outcome.ending)
    came = int((ending != 0).sum())
    ok = ending == OK
    latency = (done[ok] - at[ok]) / NS_PER_MS
    within = int((latency <= slo_ms).sum()) if slo_ms is not None else None
    completed = int(ok.sum())
    span_s = outcome.end_ns / NS_PER_S
    started = np.asarray(outcome.started_ns)
    ran = started >= 0
    batches = sum(outcome.sizes.values())
    gaps = np.asarray(outcome.gaps, np.int64).reshape(-1, 2)
    return Report(
        source=load.name,
        engine=engine,
        window=window,
        workers=workers,
        seed=seed,
        requests=came,
        completed=completed,
        span_s=round(span_s, 6),
        load=offered_load,
        offered_rps=_rounded(load.rate_rps) if isinstance(load, Arrivals) else None,
        completed_rps=_ratio(completed, span_s),
        latency=spread(latency),
        first_token=spread((first[ok & (first > 0)] - at[ok & (first > 0)]) / NS_PER_MS),
        inter_token=spread(gaps[:, 0] / NS_PER_MS, gaps[:, 1]),
        waited=spread((started[ran] - at[ran]) / NS_PER_MS),
        slo_ms=slo_ms,
        goodput=_ratio(within, came),
        goodput_rps=_ratio(within, span_s),
        device_ms_per_request=_ratio(outcome.busy_ns / NS_PER_MS, completed),
        utilisation=_ratio(outcome.busy_ns, outcome.end_ns * workers),
        batches=batches,
        batch_size_mean=_ratio(sum(size * count for size, count in outcome.sizes.items()), batches),
        batch_sizes={str(size): count for size, count in sorted(outcome.sizes.items())},
        padding_waste=_ratio(outcome.tokens_padded - outcome.tokens_run, outcome.tokens_padded),
        launches=_by_count(outcome.reasons),
        refused=_by_count(outcome.refused),
        failed=_by_count(outcome.failed),
        tenants=_tenants(load, ok, (done - at) / NS_PER_MS, slo_ms),
        notes=load.notes,
    )


def _tenants(load: Load, ok: npt.NDArray[np.bool_], latency: Floats, slo_ms: float | None) -> dict[str, Tenant]:
    """Each tenant, where there is more than one."""
    if not isinstance(load, Arrivals) or len(load.tenants) < 2:
        return {}
    found = {}
    for index, name in enumerate(load.tenants):
        mine = load.tenant == index
        times = latency[mine & ok]
        within = None if slo_ms is None else int((times <= slo_ms).sum())
        count = int(mine.sum())
        found[name or "(none)"] = Tenant(count, len(times), spread(times), _ratio(within, count))
    return found


def _ratio(part: float | None, whole: float) -> float | None:
    """Absent where there is nothing to divide by."""
    return None if part is None or not whole else round(part / whole, 6)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _by_count(counts: "dict[str, int]") -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def write_json(path: Path, reports: Sequence[msgspec.Struct] | msgspec.Struct) -> None:
    """As JSON, for other programs."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")
