"""The virtual world against what queueing theory knows, and against itself: the same run, whatever the hash seed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from headway.bench.sim.arrivals import Arrivals, ints, plain  # noqa: E402
from headway.bench.sim.compare import Setting, compare, grid, simulate, with_window  # noqa: E402
from headway.bench.sim.engines import PRESETS, Engine, Noise, engine_of  # noqa: E402
from headway.bench.sim.report import Report  # noqa: E402
from headway.bench.sim.sources import Load, open_source  # noqa: E402
from headway.bench.sim.world import Outcome  # noqa: E402
from headway.scheduler import clock  # noqa: E402
from headway.scheduler.config import ConfigError  # noqa: E402
from headway.scheduler.spec import PolicySpec  # noqa: E402

MS = 1_000_000
FLAT = Engine("flat", 10.0, 0.0, 0.0)  # ten milliseconds, whatever is in it


def went(load: Load, engine: Engine, window: str = "greedy", **changes: Any) -> tuple[Report, Outcome]:
    spec = PolicySpec(bypass_tokens=changes.pop("bypass_tokens", 1024), queue_max=1 << 20)
    return simulate(load, Setting(engine, with_window(spec, window), **changes))


def at(*times_ms: float, tokens: int = 10, max_new: int = 0) -> Arrivals:
    count = len(times_ms)
    return plain("some", ints([int(t * MS) for t in times_ms]), ints([tokens] * count), ints([max_new] * count))


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_at_a_time_is_m_d_1(load: float) -> None:
    """Mean wait of M/D/1: load x service / (2 x (1 - load))."""
    arrivals = open_source(f"poisson:rps={100 * load},n=20000", seed=5)
    report, _ = went(arrivals, FLAT, max_batch=1)
    assert report.waited.mean_ms == pytest.approx(load * 10 / (2 * (1 - load)), rel=0.05)
    assert report.utilisation == pytest.approx(load, rel=0.02)
    assert report.latency.mean_ms == pytest.approx((report.waited.mean_ms or 0) + 10)


def test_many_workers_are_m_d_infinity() -> None:
    report, _ = went(open_source("poisson:rps=100,n=5000"), FLAT, max_batch=1, workers=32)
    assert report.waited.max_ms == 0
    assert report.latency.mean_ms == 10


def test_unbounded_batches_of_equal_time_wait_less_than_one() -> None:
    """Whoever comes while a batch runs is in the next: nobody waits longer than one batch."""
    report, _ = went(open_source("poisson:rps=1000,n=20000"), FLAT, max_batch=4096)
    assert report.waited.max_ms is not None
    assert report.waited.max_ms <= 10
    assert report.waited.mean_ms == pytest.approx(5, rel=0.02)
    assert report.batch_size_mean == pytest.approx(10, rel=0.02)


def test_a_fixed_window_is_kept_to_the_nanosecond() -> None:
    report, outcome = went(at(0, 3, 1000), FLAT, "fixed:5")
    assert [t / MS for t in outcome.done_ns] == [15, 15, 1015]
    assert report.launches == {"window_over": 2}


def test_one_client_in_a_closed_loop_waits_for_nothing() -> None:
    report, _ = went(open_source("closed:clients=1,think_ms=5,n=2000"), FLAT)
    assert report.latency.max_ms == 10
    assert report.completed_rps == pytest.approx(1000 / 15, rel=0.05)


def test_as_many_clients_as_they_are_never_more_at_once() -> None:
    report, _ = went(open_source("closed:clients=6,think_ms=1,n=3000"), FLAT)
    assert max(map(int, report.batch_sizes)) <= 6
    assert report.completed == 3000


def test_requests_of_one_nanosecond_are_one_batch() -> None:
    report, _ = went(at(0, 0, 0, 0), FLAT)
    assert report.batch_sizes == {"4": 1}


def test_a_deadline_ends_what_is_too_late() -> None:
    report, _ = went(at(*range(30)).with_deadline(25), FLAT, max_batch=1)
    assert report.completed + sum(report.failed.values()) + sum(report.refused.values()) == 30
    assert report.failed["deadline_exceeded"] > 0
    assert report.latency.max_ms is not None
    assert report.latency.max_ms <= 25


def test_a_full_queue_refuses() -> None:
    setting = Setting(FLAT, PolicySpec(window="greedy", queue_max=3), max_batch=1)
    report, _ = simulate(at(*[0.001 * i for i in range(10)]), setting)
    assert (report.completed, report.refused) == (4, {"queue_full": 6})


# ---------------------------------------------------------------- iteration


def test_a_row_alone_takes_its_steps() -> None:
    engine = Engine("g", 10.0, 0.0, 0.0, iteration=True, step_tokens=100)
    load = at(0, tokens=250, max_new=5)
    report, _ = went(load, engine)
    assert (report.first_token.mean_ms, report.latency.mean_ms) == (30, 70)  # three to read, four more to write
    assert (report.inter_token.n, report.inter_token.mean_ms) == (4, 10)
    assert engine.alone_ns(250, 5) == 70 * MS


def test_rows_join_and_leave_between_steps() -> None:
    engine = Engine("g", 10.0, 0.0, 0.0, iteration=True)
    report, outcome = went(at(0, 15, max_new=3), engine, "adaptive")
    assert [t / MS for t in outcome.first_ns] == [10, 30]
    assert [t / MS for t in outcome.done_ns] == [30, 50]
    assert report.launches["joins_running"] == 1


def test_rows_are_bounded() -> None:
    engine = Engine("g", 1.0, 0.0, 0.0, iteration=True)
    report, outcome = went(at(*[0] * 20, tokens=1, max_new=4), engine, max_num_seqs=10)
    assert report.completed == 20
    assert sorted({t / MS for t in outcome.done_ns}) == [4, 8, 12]  # seven rows at once


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    engine = Engine("g", 10.0, 0.01, 0.0, iteration=True, step_tokens=100)
    load = plain("two", ints([0, 1 * MS]), ints([1000, 20]), ints([2, 2]))
    _, outcome = went(load, engine)
    assert outcome.first_ns[1] < outcome.first_ns[0]


def test_dropped_rows_leave() -> None:
    engine = Engine("g", 10.0, 0.0, 0.0, iteration=True)
    report, _ = went(at(0, 1, 2, max_new=50).with_deadline(100), engine)
    assert (report.completed, report.failed) == (0, {"deadline_exceeded": 3})
    assert report.span_s < 0.2


# ---------------------------------------------------------------- engines


def test_engines_cost_what_they_say() -> None:
    assert PRESETS["e1"].batch_ns([100, 200], [0, 0]) == round((8 + 3 + 0.2) * MS)
    assert engine_of("e1,padded").batch_ns([100, 200], [0, 0]) == round((8 + 4 + 0.2) * MS)
    assert engine_of("1,0.5,2").batch_ns([2], [0]) == 4 * MS
    assert PRESETS["static"].batch_ns([100, 50], [3, 2]) == round((10 + 4 + 3 * 20.4) * MS)
    assert engine_of("20,0,0,iteration").iteration


@pytest.mark.parametrize("text", ["e9", "1,2", "1,2,x", "-1,0,0", "0,0,0", "nan,1,1", "e1,fast", ""])
def test_engines_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="engine"):
        engine_of(text)


def test_noise_has_mean_one_and_stragglers_take_three_times() -> None:
    noise = Noise(Engine("n", 1, 0, 0, noise=0.3), seed=1)
    assert np.mean([noise(MS) for _ in range(20_000)]) == pytest.approx(MS, rel=0.02)
    slow = Noise(Engine("n", 1, 0, 0, stragglers=0.1), seed=1)
    drawn = [slow(MS) for _ in range(10_000)]
    assert set(drawn) == {MS, 3 * MS}
    assert drawn.count(3 * MS) / len(drawn) == pytest.approx(0.1, rel=0.2)


def test_capacity_is_what_full_batches_do() -> None:
    """At ten times the load the workers do as many as the capacity says, and no more."""
    load = open_source("poisson:n=4000")
    assert isinstance(load, Arrivals)
    for engine, workers in ((PRESETS["e1"], 1), (PRESETS["e2"], 2), (engine_of("e1,padded"), 1)):
        setting = Setting(engine, PolicySpec(window="greedy", queue_max=1 << 20), workers=workers)
        report, _ = simulate(setting.at_load(load, 10), setting)
        assert report.completed_rps == pytest.approx(setting.capacity_rps(load), rel=0.05)


# ---------------------------------------------------------------- comparing


def test_hindsight_is_the_best_of_the_grid() -> None:
    load = Setting(PRESETS["e1"], PolicySpec()).at_load(open_source("poisson:n=1500"), 0.5)  # type: ignore[arg-type]
    found = compare(load, Setting(PRESETS["e1"], PolicySpec()), ["greedy", "fixed:100"])
    rows = {row.window: row for row in found.windows}
    assert set(grid(PRESETS["e1"], load)) <= set(rows)
    assert min(row.mean_ratio or 0 for name, row in rows.items() if name in grid(PRESETS["e1"], load)) == 1
    assert rows["greedy"].latency == rows["fixed:0"].latency
    assert (rows["fixed:100"].mean_ratio or 0) > 2
    assert found.best_mean is not None
    assert rows[found.best_mean].mean_ratio == 1


@pytest.mark.parametrize("window", ["never", "greedy:5", "fixed:x", "fixed:-1"])
def test_windows_that_are_none(window: str) -> None:
    with pytest.raises(ConfigError, match="window"):
        with_window(PolicySpec(), window)


# ---------------------------------------------------------------- determinism and speed

RUNS = """
import hashlib, sys
from headway.bench.sim.compare import Setting, simulate, with_window
from headway.bench.sim.engines import PRESETS
from headway.bench.sim.sources import open_source
from headway.scheduler.spec import PolicySpec
from dataclasses import replace
digest = hashlib.sha256()
for source, engine in (("poisson:n=3000,spread=0.5,max_new=20", "e1"), ("closed:clients=9,n=2000", "e2"),
                       ("poisson:n=200,rps=2,max_new=30", "gen")):
    noisy = replace(PRESETS[engine], noise=0.2, stragglers=0.02)
    _, outcome = simulate(open_source(source, seed=7), Setting(noisy, PolicySpec(), workers=2, seed=7))
    for column in (outcome.at_ns, outcome.started_ns, outcome.first_ns, outcome.done_ns, outcome.ending):
        digest.update(column.tobytes())
    digest.update(repr((sorted(outcome.reasons.items()), outcome.gaps)).encode())
print(digest.hexdigest())
"""


def test_a_run_is_the_same_whatever_the_hash_seed() -> None:
    def run(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", RUNS], env=environment, check=True, capture_output=True, text=True
        ).stdout

    first, second = run("0"), run("4242")
    assert first == second
    assert len(first.strip()) == 64


def test_requests_by_the_ten_thousand_take_seconds() -> None:
    """With room for a busy machine; the window study measures a million."""
    load = open_source("poisson:n=20000,rps=300")
    begin = clock.now_ns()
    report, _ = went(load, PRESETS["e1"], "adaptive")
    assert report.completed == 20_000
    assert (clock.now_ns() - begin) / clock.NS_PER_S < 10


def test_a_real_hour_runs() -> None:
    folder = next((p / "shared/traces" for p in Path(__file__).parents if (p / "shared/traces").is_dir()), None)
    if folder is None:
        pytest.skip("shared/traces is not there")
    load = open_source(str(folder / "AzureLLMInferenceTrace_conv.csv"))
    assert isinstance(load, Arrivals)
    report, _ = went(load, PRESETS["e1"], "adaptive")
    assert report.completed == 19_366
    assert report.latency.p95_ms is not None
    short = load.shorter(1024).cut(limit=3000)
    adaptive, greedy = (went(short, PRESETS["e1"], window)[0] for window in ("adaptive", "greedy"))
    assert (adaptive.latency.mean_ms or 0) <= 1.05 * (greedy.latency.mean_ms or 0)
