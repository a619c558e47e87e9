"""What the window study measures: small jobs, each a few runs on one load, that know nothing of each other.

A job is a frozen record, `do` runs it and returns plain findings; so they can be spread over processes in any order.
The short lane is what is studied: inputs over 1024 tokens are left out, Mooncake's divided by 16 (agents' prompts are
long). Engines have 10 % lognormal noise and 1 % stragglers; each run is made with several seeds and the means are
averaged, because the best of nine noisy windows is partly the luckiest.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.sim import synthetic
from headway.bench.sim.arrivals import Arrivals
from headway.bench.sim.compare import Setting, grid, simulate, with_window
from headway.bench.sim.engines import PRESETS, Engine
from headway.bench.sim.sources import Load, open_source
from headway.bench.sim.synthetic import Sizes
from headway.bench.sim.world import OK, Outcome
from headway.scheduler.spec import PolicySpec

WINDOWS = ("adaptive", "efficiency", "greedy", "optimal_stopping", "ski_rental", "aimd", "fixed:100", "p95")
ENGINES = ("e1", "e2", "e3")
BYPASS = 1024
MIXED = Sizes(tokens=128, spread=0.8)
RECORDED = {
    "azure_conv": "AzureLLMInferenceTrace_conv.csv",
    "azure_code": "AzureLLMInferenceTrace_code.csv",
    "mooncake_conv": "mooncake_conversation_first.jsonl",
    "mooncake_syn": "mooncake_synthetic_trace.jsonl",
    "servegen_r1": "servegen_deepseek-r1_arrivals.csv",
    "servegen_client": "servegen_m-large_client0_arrivals.csv",
}
MADE_UP = ("poisson", "pulse3", "pulse8", "pulse32", "onoff")


@dataclass(frozen=True)
class Cell:
    """All windows on one trace at one load."""

    trace: str
    load: float
    workers: int
    engine: str
    n: int
    seeds: int
    folder: str


@dataclass(frozen=True)
class Loop:
    """Clients that wait for their answers, or a load of few requests, against greedy."""

    source: str
    engine: str
    seeds: int


@dataclass(frozen=True)
class Steps:
    """Ten times the load at once, and back."""

    engine: str
    seeds: int


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token of an iteration-level engine, against greedy."""

    trace: str
    load: float
    engine: str
    n: int
    folder: str


@dataclass(frozen=True)
class Lengths:
    """A padded engine under requests of many lengths: like lengths together, against order of arrival."""

    trace: str
    load: float
    engine: str
    n: int
    folder: str


Job = Cell | Loop | Steps | FirstToken | Lengths


def traces_in(folder: str) -> list[str]:
    """What can be studied: the recorded traces that are there, and the made-up ones."""
    return [name for name, file in RECORDED.items() if (Path(folder) / file).is_file()] + list(MADE_UP)


@cache
def trace(name: str, n: int, folder: str, short: bool = True) -> Arrivals:
    """`n` requests of it, from its second half."""
    if name in RECORDED:
        whole = open_source(str(Path(folder) / RECORDED[name]), span_s=0.0 if "servegen" not in name else 1800.0)
        assert isinstance(whole, Arrivals)
        whole = replace(whole, name=name, tenants=("",), tenant=np.zeros(len(whole), np.int64))
        if name.startswith("mooncake"):
            whole = whole.divided(16)
        if short:
            whole = whole.shorter(BYPASS)
        begin = min(len(whole) // 2, max(0, len(whole) - n))
        index = np.arange(len(whole))
        return whole.where((index >= begin) & (index < begin + n), "the second half")
    if name == "poisson":
        return synthetic.poisson(rps=50, n=n, sizes=MIXED, seed=1)
    if name == "onoff":
        return synthetic.on_off(rps=100, on_ms=500, off_ms=500, n=n, sizes=MIXED, seed=1)
    burst = int(name.removeprefix("pulse"))
    return synthetic.pulses(burst=burst, span_ms=100, idle_ms=900, n=n, sizes=MIXED, seed=1)


def noisy(engine: str) -> Engine:
    """As the study uses it."""
    return replace(PRESETS[engine], noise=0.1, stragglers=0.01)


def do(job: Job) -> tuple[Job, dict[str, Any]]:
    """Run it."""
    if isinstance(job, Cell):
        return job, _cell(job)
    if isinstance(job, Loop):
        return job, _loop(job)
    if isinstance(job, Steps):
        return job, _steps(job)
    if isinstance(job, FirstToken):
        return job, _first_token(job)
    return job, _lengths(job)


def _means(load: Load, setting: Setting, names: list[str], seeds: int) -> dict[str, dict[str, float]]:
    """Mean, P95 and device time of each window, over the seeds; a window that ends nobody is left out."""
    found = {}
    for name in names:
        policy = with_window(setting.policy, name)
        runs = [simulate(load, replace(setting, policy=policy, seed=seed))[0] for seed in range(seeds)]
        values = [(run.latency.mean_ms, run.latency.p95_ms, run.device_ms_per_request) for run in runs]
        whole = [value for value in values if None not in value]
        if whole:
            mean, p95, device = np.mean(np.asarray(whole, float), axis=0)
            found[name] = {"mean_ms": float(mean), "p95_ms": float(p95), "device_ms": float(device)}
    return found


def _cell(job: Cell) -> dict[str, Any]:
    load = trace(job.trace, job.n, job.folder)
    setting = Setting(noisy(job.engine), PolicySpec(), workers=job.workers)
    load = setting.at_load(load, job.load)
    fixed = grid(PRESETS[job.engine], load)
    names = list(dict.fromkeys([*WINDOWS, *fixed]))
    found = _means(load, setting, names, job.seeds)
    best_mean = min(found[name]["mean_ms"] for name in fixed)
    best_p95 = min(found[name]["p95_ms"] for name in fixed)
    return {
        name: {
            "mean_ratio": found[name]["mean_ms"] / best_mean,
            "p95_ratio": found[name]["p95_ms"] / best_p95,
            **found[name],
        }
        for name in WINDOWS
    }


def _loop(job: Loop) -> dict[str, Any]:
    setting = Setting(noisy(job.engine), PolicySpec())
    load = open_source(job.source)
    found = _means(load, setting, list(WINDOWS), job.seeds)
    base = found["greedy"]["mean_ms"]
    return {name: {"ratio": values["mean_ms"] / base, **values} for name, values in found.items()}


STEP_RATES = (60.0, 600.0, 60.0)
STEP_S = 12.0
AFTER_S = 2.0


def _steps(job: Steps) -> dict[str, Any]:
    """Mean latency in the first two seconds after each step, over that of the later two thirds of the same part."""
    found = {}
    for name in WINDOWS:
        early: dict[str, list[float]] = {"up": [], "down": []}
        late: dict[str, list[float]] = {"up": [], "down": []}
        for seed in range(job.seeds):
            load = synthetic.steps(rates=STEP_RATES, each_s=STEP_S, sizes=MIXED, seed=seed)
            setting = Setting(noisy(job.engine), with_window(PolicySpec(), name), seed=seed)
            _, outcome = simulate(load, setting)
            for part, key in ((1, "up"), (2, "down")):
                early[key].append(_mean_in(outcome, part * STEP_S, part * STEP_S + AFTER_S))
                late[key].append(_mean_in(outcome, (part + 1 / 3) * STEP_S, (part + 1) * STEP_S))
        found[name] = {key: float(np.nanmean(early[key]) / np.nanmean(late[key])) for key in early}
    return found


def _mean_in(outcome: Outcome, begin_s: float, end_s: float) -> float:
    at, done = np.asarray(outcome.at_ns), np.asarray(outcome.done_ns)
    inside = (at >= begin_s * 1e9) & (at < end_s * 1e9) & (np.asarray(outcome.ending) == OK)
    return float((done - at)[inside].mean()) if inside.any() else float("nan")


def _first_token(job: FirstToken) -> dict[str, Any]:
    load = trace(job.trace, job.n, job.folder, short=False)
    if not load.max_new.any():
        load = replace(load, max_new=np.full(len(load), 60, np.int64))
    setting = Setting(PRESETS[job.engine], PolicySpec())
    load = setting.at_load(load, job.load)
    found = {}
    for name in dict.fromkeys([*WINDOWS, "fixed:20"]):
        report, _ = simulate(load, replace(setting, policy=with_window(setting.policy, name)))
        found[name] = {"mean_ms": report.first_token.mean_ms, "p95_ms": report.first_token.p95_ms}
    base = found["greedy"]
    return {
        name: {**values, "ratio": (values["p95_ms"] or 0.0) / base["p95_ms"] if base["p95_ms"] else None}
        for name, values in found.items()
    }


def _lengths(job: Lengths) -> dict[str, Any]:
    """Padding waste, and mean and P95 latency of short and long inputs apart, for each way to make a batch."""
    load = trace(job.trace, job.n, job.folder, short=False)
    load = replace(load, max_new=np.zeros(len(load), np.int64))
    setting = Setting(replace(noisy(job.engine), padded=True), PolicySpec())
    load = replace(setting, engine=replace(setting.engine, padded=False)).at_load(load, job.load)  # without padding
    long = load.tokens > BYPASS
    ways = {
        "like lengths, by cost": setting,
        "like lengths, full": replace(setting, policy=PolicySpec(batch_size="max")),
        "order of arrival": replace(setting, policy=PolicySpec(batch_size="max"), grouped=False),
        "the same, no long lane": replace(
            setting, policy=PolicySpec(batch_size="max", bypass_tokens=1 << 30), grouped=False
        ),
    }
    return {name: _apart(way, load, long) for name, way in ways.items()}


def _apart(setting: Setting, load: Arrivals, long: Any) -> dict[str, Any]:
    report, outcome = simulate(load, setting)
    took_ms = (np.asarray(outcome.done_ns) - np.asarray(outcome.at_ns)) / 1e6
    good = np.asarray(outcome.ending) == OK
    found: dict[str, Any] = {"waste": report.padding_waste, "device_ms": report.device_ms_per_request}
    for name, mine in (("short", good & ~long), ("long", good & long)):
        if mine.any():
            found[f"{name}_mean_ms"] = float(took_ms[mine].mean())
            found[f"{name}_p95_ms"] = float(np.percentile(took_ms[mine], 95))
    return found
