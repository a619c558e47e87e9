"""A replay's report as JSON for other programs, under the names of vLLM's `benchmark_serving`, and read back.

Times are milliseconds in flat keys: mean_ttft_ms, median_ttft_ms, p99_itl_ms, std_e2el_ms. A key that is absent has no
value, or too few samples for one; `n_ttft` says of how many it is.
"""

from pathlib import Path
from typing import Any

import msgspec

from headway import __version__
from headway.bench.replay.report import METRICS, Report
from headway.bench.sim.report import Spread
from headway.scheduler.config import ConfigError

FORMAT = "headway-replay-1"
_KEYS = {
    "mean_ms": "mean",
    "p50_ms": "median",
    "p90_ms": "p90",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "p999_ms": "p99.9",
    "max_ms": "max",
}


def as_map(report: Report) -> dict[str, Any]:
    """The whole report; what has no value is absent."""
    facts = report.facts
    found: dict[str, Any] = {
        "format": FORMAT,
        "headway": __version__,
        "source": facts.source,
        "date": facts.date or None,
        "backend": facts.target,
        "model_id": facts.model or None,
        "mode": facts.mode,
        "seed": facts.seed,
        "request_rate": facts.offered_rps,
        "max_concurrency": facts.concurrency or None,
        "processes": facts.processes,
        "duration": report.duration_s,
        "num_prompts": report.requests,
        **report.endings,
        "left_out": report.left_out,
        "interrupted": facts.cut or None,
        "slow_readers": report.slow_readers,
        "first_tokens": report.first_tokens,
        "total_input_tokens": report.input_tokens,
        "total_output_tokens": report.output_tokens,
        "request_throughput": rate(report, report.completed),
        "output_throughput": rate(report, report.output_tokens),
        "total_token_throughput": rate(report, report.input_tokens + report.output_tokens),
        "slo": report.slo,
        "request_goodput": None if report.good is None else rate(report, report.good),
        "goodput_share": None if report.good is None or not report.requests else report.good / report.requests,
        "refused_by": report.refused,
        "failed_by": report.failed,
        "messages": report.messages,
        "device_ms_per_request": per_request(report),
        "cost_per_request": cost(report),
        "warnings": report.warnings,
        "notes": facts.notes,
    }
    for name in METRICS:
        found |= _times(name, report.times[name], report.stds.get(name))
    found |= _server(report)
    found["tenants"] = report.tenants or None
    found["requests"] = report.columns
    return {name: value for name, value in found.items() if value is not None}


def _times(name: str, times: Spread, std: float | None) -> dict[str, Any]:
    if not times.n:
        return {}
    values = {f"{short}_{name}_ms": getattr(times, key) for key, short in _KEYS.items()}
    return {f"n_{name}": times.n, **values, f"std_{name}_ms": std}


def _server(report: Report) -> dict[str, Any]:
    """What the server said of itself."""
    watched = report.watched
    if watched is None:
        return {}
    return {
        "batches": watched.launched,
        "batches_seen": len(watched.batches),
        "running_mean": running(report),
        "batch_sizes": {str(size): count for size, count in sorted(sizes(report).items())},
        "launched_because": reasons(report),
        "held_because": reasons(report, "held"),
        "refused_because": reasons(report, "refusal"),
        "server_counters": watched.counters,
    }


def sizes(report: Report) -> dict[int, int]:
    """How many batches had which size."""
    found: dict[int, int] = {}
    for batch in report.watched.batches.values() if report.watched is not None else ():
        found[batch["size"]] = found.get(batch["size"], 0) + 1
    return found


def running(report: Report) -> float | None:
    """How many requests ran together on a worker when a batch joined, its own counted; where engines run in steps this
    is what shares the device, and not the size of a batch."""
    found = [batch["running"] for batch in report.watched.batches.values()] if report.watched is not None else []
    return round(sum(found) / len(found), 6) if found else None


def reasons(report: Report, what: str = "launched") -> dict[str, int]:
    """Why batches were `launched`, lanes were `held` back or requests had their `refusal`, most often first."""
    prefix = f"{what}."
    counters = report.watched.counters if report.watched is not None else {}
    named = {name.removeprefix(prefix): count for name, count in counters.items() if name.startswith(prefix)}
    return dict(sorted(named.items(), key=lambda item: (-item[1], item[0])))


def rate(report: Report, count: int) -> float | None:
    """So many a second."""
    return round(count / report.duration_s, 6) if report.duration_s > 0 else None


def per_request(report: Report) -> float | None:
    """Device time for each request that ended well, in milliseconds."""
    if report.device_ms is None or not report.completed:
        return None
    return round(report.device_ms / report.completed, 6)


def cost(report: Report) -> float | None:
    """Of a request that ended well, in the currency of `cost_per_hour`: the devices are paid whether busy or not."""
    hourly = report.facts.cost_per_hour
    if hourly is None or not report.completed:
        return None
    return hourly * report.duration_s / 3600 / report.completed


def write_json(path: Path, report: Report) -> None:
    """One file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(as_map(report)), indent=1) + b"\n")


class Run(msgspec.Struct):
    """What comparing needs of a report that was written."""

    format: str
    source: str
    backend: str
    mode: str
    duration: float
    num_prompts: int
    completed: int
    total_output_tokens: int
    requests: dict[str, list[Any]]
    goodput_share: float | None = None
    device_ms_per_request: float | None = None
    request_throughput: float | None = None
    output_throughput: float | None = None


def read_run(path: Path) -> Run:
    """A report written by `write_json`. Raises ConfigError."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a replay's report ({error}); one is written by headway replay --json") from None
    if run.format != FORMAT:
        raise ConfigError(f"{path}: a report of format {run.format!r}; this headway reads {FORMAT!r}")
    return run
