"""What a replay was like, in numbers that mean something, under the names that users know from other benchmarks.

Latencies count from the time a request should have gone (player.py says why), and are of those that ended well and were
read at full speed; all others are counted, by how they ended. A percentile is left out when fewer than five lie beyond
it, and what cannot be computed is absent: no time per token of an answer of one token, no first token of none, no
goodput without an SLO. Nothing is ever NaN, or 0 for want of an answer.

Names are those of vLLM's `benchmark_serving`: ttft, time to first token; tpot, time per output token after the first,
a request's mean; itl, inter-token latency, from message to message; e2el, end to end.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headway.bench.replay.seen import OK, Seen
from headway.bench.replay.slo import Slo
from headway.bench.replay.watch import Watched
from headway.bench.sim.report import BEYOND_MIN, Spread, spread

NS_PER_MS, NS_PER_S = 1e6, 1e9
LAG_P99_MS_MAX = 10.0  # later than this at P99, and the replayer is a part of what it measures
HELD_MS_MAX = 10.0  # held back for want of a place

REFUSED = frozenset(
    (
        *("invalid_request", "unsupported_version", "too_large", "too_long", "unknown_model", "duplicate_id"),
        *("queue_full", "deadline_unreachable", "shutting_down", "no_worker"),
        *(f"http_{status}" for status in (400, 401, 403, 404, 413, 422, 429, 503)),
    )
)
METRICS = {
    "ttft": "first token",
    "tpot": "per output token",
    "itl": "between tokens",
    "e2el": "end to end",
    "queue": "queued at the server",
    "service": "from sending to the end",
    "lag": "replayer late by",
    "held": "held back by the replayer",
}

Floats = npt.NDArray[np.float64]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed against what, and when (`date`: ISO 8601, UTC). `cost_per_hour`: of all devices that serve.
    `cut`: requests that had not ended when the replay was interrupted; they are left out."""

    source: str
    target: str
    mode: str
    model: str = ""
    date: str = ""
    seed: int = 0
    offered_rps: float | None = None
    concurrency: int = 0
    processes: int = 1
    warmup_s: float = 0.0
    cooldown_s: float = 0.0
    cost_per_hour: float | None = None
    cut: int = 0
    notes: tuple[str, ...] = ()


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tenant's part."""

    requests: int
    completed: int
    e2el: Spread
    goodput: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. `endings`: completed, cancelled, expired, refused and failed add up to `requests`. `first_tokens`:
    requests that got one, whatever became of them. `left_out`: in warm-up and cool-down. `columns`: each request."""

    facts: Facts
    requests: int
    left_out: int
    slow_readers: int
    endings: dict[str, int]
    first_tokens: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    times: dict[str, Spread]
    stds: dict[str, float]
    refused: dict[str, int]
    failed: dict[str, int]
    messages: dict[str, str]
    slo: str | None = None
    good: int | None = None
    tenants: dict[str, Tenant] = {}
    watched: Watched | None = None
    device_ms: float | None = None
    warnings: tuple[str, ...] = ()
    columns: dict[str, list[Any]] = {}

    @property
    def completed(self) -> int:
        """Those that ended well."""
        return self.endings["completed"]

    @property
    def all_well(self) -> bool:
        """Nothing but what was asked for happened."""
        return self.completed + self.endings["cancelled"] == self.requests and self.requests > 0


def report_of(facts: Facts, seen: Sequence[Seen], watched: Watched | None, slo: Slo | None = None) -> Report:
    """The numbers of one replay."""
    span_s = max((one.due_ns for one in seen), default=0) / NS_PER_S
    upto_s = span_s - facts.cooldown_s
    counted = [one for one in seen if facts.warmup_s <= one.due_ns / NS_PER_S <= upto_s or not _cut(facts)]
    well = [one for one in counted if one.code == OK and not one.slow]
    times, stds = {}, {}
    for name, values in _times(counted, well).items():
        times[name] = spread(values)
        if len(values) > 1:
            stds[name] = round(float(np.std(values)), 6)
    good = None if slo is None else sum(slo.met(one) for one in well)
    endings = Counter(ending_of(one) for one in counted)
    begin_ns = min((one.due_ns for one in counted), default=0)
    return Report(
        facts=facts,
        requests=len(counted),
        left_out=len(seen) - len(counted),
        slow_readers=sum(one.slow for one in counted),
        endings={name: endings[name] for name in ("completed", "cancelled", "expired", "refused", "failed")},
        first_tokens=sum(one.first_ns > 0 for one in counted),
        duration_s=round((max((one.done_ns for one in counted), default=0) - begin_ns) / NS_PER_S, 6),
        input_tokens=sum(one.input for one in counted if one.code == OK),
        output_tokens=sum(one.output for one in counted),
        times=times,
        stds=stds,
        refused=_by_code(counted, "refused", "expired"),
        failed=_by_code(counted, "failed"),
        messages={one.code: one.message for one in reversed(counted) if one.message},
        slo=None if slo is None else slo.text,
        good=good,
        tenants=_tenants(counted, slo),
        watched=watched,
        device_ms=_device_ms(watched),
        warnings=tuple(_warnings(times, facts, watched, len(counted))),
        columns=_columns(counted),
    )


def _cut(facts: Facts) -> bool:
    return bool(facts.warmup_s or facts.cooldown_s)


def ending_of(one: Seen) -> str:
    """completed, cancelled, expired, refused or failed."""
    if one.code == OK:
        return "completed"
    if one.code == "cancelled":
        return "cancelled"
    if one.code == "deadline_exceeded":
        return "expired"
    return "refused" if one.code in REFUSED and not one.first_ns else "failed"


def tpot_ms(one: Seen) -> float | None:
    """Time per output token after the first; None without a second."""
    if one.output < 2 or one.last_ns <= one.first_ns:
        return None
    return (one.last_ns - one.first_ns) / NS_PER_MS / (one.output - 1)


def _times(counted: Sequence[Seen], well: Sequence[Seen]) -> dict[str, Floats]:
    """Milliseconds, by name."""
    found: dict[str, list[float]] = {
        "ttft": [(one.first_ns - one.due_ns) / NS_PER_MS for one in well if one.first_ns],
        "tpot": [value for one in well if (value := tpot_ms(one)) is not None],
        "itl": [gap / NS_PER_MS for one in well for gap in one.gaps],
        "e2el": [(one.done_ns - one.due_ns) / NS_PER_MS for one in well],
        "queue": [one.queue_ms for one in well if one.queue_ms is not None],
        "service": [(one.done_ns - one.sent_ns) / NS_PER_MS for one in well],
        "lag": [(one.woke_ns - one.due_ns) / NS_PER_MS for one in counted if one.woke_ns],
        "held": [(one.sent_ns - one.woke_ns) / NS_PER_MS for one in counted if one.sent_ns],
    }
    return {name: np.asarray(values, np.float64) for name, values in found.items()}


def _by_code(counted: Sequence[Seen], *endings: str) -> dict[str, int]:
    counts = Counter(one.code for one in counted if ending_of(one) in endings)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _tenants(counted: Sequence[Seen], slo: Slo | None) -> dict[str, Tenant]:
    """Each tenant, where there is more than one."""
    names = sorted({one.tenant for one in counted})
    if len(names) < 2:
        return {}
    found = {}
    for name in names:
        mine = [one for one in counted if one.tenant == name]
        well = [one for one in mine if one.code == OK and not one.slow]
        times = np.asarray([(one.done_ns - one.due_ns) / NS_PER_MS for one in well], np.float64)
        good = None if slo is None else round(sum(slo.met(one) for one in well) / len(mine), 6)
        found[name or "(none)"] = Tenant(len(mine), len(well), spread(times), good)
    return found


def _device_ms(watched: Watched | None) -> float | None:
    """What the engines say they computed; None if nobody was asked, or an older server does not count it."""
    found = watched.counters.get("compute_us") if watched is not None else None
    return None if found is None else found / 1000


def _warnings(times: dict[str, Spread], facts: Facts, watched: Watched | None, counted: int) -> list[str]:
    found = []
    if facts.cut:
        found.append(f"interrupted: {facts.cut:,} of {facts.cut + counted:,} had not ended, and are left out")
    at_p99 = times["lag"].p99_ms is not None
    late = times["lag"].p99_ms if at_p99 else times["lag"].max_ms
    if late is not None and late > LAG_P99_MS_MAX:
        advice = "give it --processes, or a machine of its own" if facts.processes == 1 else "give it more --processes"
        found.append(
            f"the replayer fell behind: it was {late:,.1f} ms late {'at P99' if at_p99 else 'at most'} (limit "
            f"{LAG_P99_MS_MAX:g} ms), which is counted in every latency; {advice}"
        )
    held = times["held"].max_ms
    if held is not None and held > HELD_MS_MAX:
        found.append(
            f"the replayer fell behind: its own limit of {facts.concurrency} at once held requests back for up to "
            f"{held:,.1f} ms (limit {HELD_MS_MAX:g} ms), which is counted in every latency"
        )
    if times["e2el"].n and times["e2el"].p99_ms is None:
        found.append(
            f"{times['e2el'].n} requests are too few for P99: fewer than {BEYOND_MIN} lie beyond it, so it is left out"
        )
    if watched is not None and len(watched.batches) < watched.launched:
        found.append(
            f"{len(watched.batches):,} of {watched.launched:,} batches were seen; what is said of them is of these"
        )
    if not counted:
        found.append("warm-up and cool-down leave nothing to count")
    return found


def _columns(counted: Sequence[Seen]) -> dict[str, list[Any]]:
    def ms(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        "at_s": [round(one.due_ns / NS_PER_S, 4) for one in counted],
        "ending": [ending_of(one) if one.code == OK or ending_of(one) != "failed" else one.code for one in counted],
        "input_lens": [one.input for one in counted],
        "output_lens": [one.output for one in counted],
        "ttft_ms": [
            ms((one.first_ns - one.due_ns) / NS_PER_MS) if one.first_ns and not one.slow else None for one in counted
        ],
        "tpot_ms": [ms(tpot_ms(one)) if not one.slow else None for one in counted],
        "e2el_ms": [ms((one.done_ns - one.due_ns) / NS_PER_MS) if _timed(one) else None for one in counted],
        "queue_ms": [ms(one.queue_ms) if not one.slow else None for one in counted],
        "batch_size": [one.batch_size for one in counted],
    }


def _timed(one: Seen) -> bool:
    return one.code == OK and not one.slow
