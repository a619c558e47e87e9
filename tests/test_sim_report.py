"""Reports: numbers only where there are numbers, the tables and files made of them, and `headway simulate` itself."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

np = pytest.importorskip("numpy")

from headway.bench import window_study  # noqa: E402
from headway.bench.sim import plots, study, tables  # noqa: E402
from headway.bench.sim.arrivals import ints, plain  # noqa: E402
from headway.bench.sim.compare import Setting, geomean, simulate  # noqa: E402
from headway.bench.sim.engines import PRESETS, Engine  # noqa: E402
from headway.bench.sim.report import Report, Spread, report_of, spread, write_json  # noqa: E402
from headway.bench.sim.sources import open_source  # noqa: E402
from headway.bench.sim.world import Outcome  # noqa: E402
from headway.cli.app import app  # noqa: E402
from headway.scheduler.spec import PolicySpec  # noqa: E402

GEN = Engine("g", 10.0, 0.0, 0.0, iteration=True)


def text_of(renderable: object) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as caught:
        console.print(renderable)
    return caught.get()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["simulate", *arguments])

    return invoke


# ---------------------------------------------------------------- percentiles


def test_a_percentile_needs_five_beyond_it() -> None:
    assert spread(np.arange(1.0, 10.0)) == Spread(9, mean_ms=5, max_ms=9)
    assert spread(np.arange(1.0, 11.0)) == Spread(10, mean_ms=5.5, p50_ms=5, max_ms=10)
    whole = spread(np.arange(1.0, 1001.0))
    assert (whole.n, whole.p50_ms, whole.p95_ms, whole.p99_ms, whole.p999_ms) == (1000, 500, 950, 990, None)
    assert spread(np.arange(1.0, 5001.0)).p999_ms == 4995


def test_weights_count_as_often() -> None:
    times = np.asarray([3.0, 1.0, 9.0])
    assert spread(times, ints([2, 300, 0])) == spread(np.asarray([1.0] * 300 + [3.0] * 2))


def test_nothing_has_no_numbers() -> None:
    assert spread(np.empty(0)) == Spread(0)
    assert spread(np.empty(0), ints([])) == Spread(0)
    assert geomean([]) is None


@pytest.mark.parametrize("max_new", [0, 1])
def test_answers_without_second_tokens(max_new: int) -> None:
    load = plain("few", ints([0, 1000]), ints([5, 5]), ints([max_new] * 2))
    report, _ = simulate(load, Setting(GEN, PolicySpec()))
    assert report.completed == 2
    assert report.inter_token == Spread(0)
    assert report.first_token.mean_ms == report.latency.mean_ms
    assert "between tokens" not in text_of(tables.shown(report))


def test_a_run_in_which_nothing_happened(tmp_path: Path) -> None:
    load = plain("none", ints([0]), ints([1]), ints([0]))
    empty = Outcome(*([0] for _ in range(5)))  # type: ignore[arg-type]
    report = report_of(empty, load, engine="e", window="w", workers=1, seed=0, slo_ms=5)
    assert (report.completed, report.goodput, report.device_ms_per_request, report.padding_waste) == (
        0,
        None,
        None,
        None,
    )
    write_json(tmp_path / "a.json", report)
    text = (tmp_path / "a.json").read_text()
    assert "NaN" not in text
    assert "null" not in text
    assert "goodput" not in json.loads(text)
    assert "none: 0 requests" in text_of(tables.shown(report))


def test_goodput_is_a_share_of_all() -> None:
    load = plain("two", ints([0, 0, 0, 0]), ints([1] * 4), ints([0] * 4))
    setting = Setting(Engine("f", 10, 0, 0), PolicySpec(window="greedy", queue_max=2), max_batch=1, slo_ms=15)
    report, _ = simulate(load, setting)
    assert (report.requests, report.completed) == (4, 2)
    assert report.goodput == 0.25  # two are refused, one is too late
    assert "25.0 % within 15 ms" in text_of(tables.shown(report))


def test_padding_is_what_a_padded_batch_would_waste() -> None:
    load = plain("two", ints([0, 0]), ints([10, 30]), ints([0, 0]))
    report, _ = simulate(load, Setting(PRESETS["e1"], PolicySpec(window="greedy")))
    assert report.padding_waste == pytest.approx(20 / 60, abs=1e-6)


def test_tenants_are_told_apart(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens\n" + "".join(f"{i},{'ab'[i % 2]},9,1\n" for i in range(20))
    (tmp_path / "t.csv").write_text(text)
    report, _ = simulate(open_source(str(tmp_path / "t.csv")), Setting(PRESETS["e1"], PolicySpec(), slo_ms=50))
    assert {name: (one.requests, one.completed, one.goodput) for name, one in report.tenants.items()} == {
        "a": (10, 10, 1),
        "b": (10, 10, 1),
    }
    assert "tenants" in text_of(tables.shown(report))


# ---------------------------------------------------------------- the command


def test_a_run_is_shown_and_written(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("poisson:n=600", "--load", "0.6", "--slo-ms", "50", "--seed", "3", "--json", "r.json")
    assert result.exit_code == 0, result.output
    for word in ("poisson: 600 requests", "load 0.6", "e1, 1 worker, adaptive", "latency", "batch size", "goodput"):
        assert word in result.output
    report = json.loads((tmp_path / "r.json").read_bytes(), parse_constant=lambda name: pytest.fail(name))
    assert (report["requests"], report["seed"], report["load"]) == (600, 3, 0.6)
    assert "p99_ms" in report["latency"]
    assert "p999_ms" not in report["latency"]
    assert Report.__struct_fields__[0] in report


def test_policy_flags_and_window_times(run: Callable[..., Result]) -> None:
    result = run("closed:n=300,clients=3", "--window", "fixed:2.5", "--engine", "e2", "--workers", "2")
    assert (result.exit_code, "closed loop: 300 requests; e2, 2 workers, fixed:2.5" in result.output) == (0, True)
    result = run("poisson:n=50", "--queue-max", "1", "--rate", "100000", "--max-batch", "1")
    assert (result.exit_code, "queue_full" in result.output) == (0, True)


def test_windows_are_compared(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("poisson:n=400", "--compare", "greedy,adaptive,fixed:5", "--load", "0.5", "--json", "c.json")
    assert result.exit_code == 0, result.output
    assert "best fixed window by mean" in result.output
    found = json.loads((tmp_path / "c.json").read_bytes())
    assert [row["window"] for row in found["windows"]][:3] == ["greedy", "adaptive", "fixed:5"]
    assert len(found["reports"]) == len(found["windows"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.csv"], "no such file"),
        (["poisson", "--load", "1", "--rate", "5"], "--load and --rate both set the speed"),
        (["closed", "--load", "0.5"], "a closed loop sets its own speed"),
        (["poisson", "--engine", "e7"], "no engine 'e7'"),
        (["poisson", "--window", "soon"], "window 'soon'"),
        (["poisson", "--compare", "soon"], "window 'soon'"),
        (["poisson", "--json", "no/such/folder.json"], "there is no folder"),
        (["poisson", "--plot", "a.txt"], "a plot ends in"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(run: Callable[..., Result], arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_plots_are_drawn(run: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("poisson:n=100", "--load", "0.5", "--plot", "a.png").exit_code == 0
    assert run("poisson:n=30", "--compare", "greedy", "--plot", "b.svg").exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "b.svg").read_text()
    plots.draw_over_load(tmp_path / "c.pdf", {"e1": {"greedy": [(0.1, 1.0), (0.5, 1.1)]}}, "ratio")
    assert (tmp_path / "c.pdf").read_bytes().startswith(b"%PDF")


def test_without_matplotlib_the_extra_is_named(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = run("poisson:n=20", "--plot", "a.png")
    assert (result.exit_code, "pip install 'headway[bench]'" in result.output) == (2, True)


# ---------------------------------------------------------------- the study


def test_the_study_finds_greedy_and_its_targets() -> None:
    work: list[study.Job] = [study.Cell("poisson", 0.5, 1, engine, 200, 1, "") for engine in study.ENGINES]
    work += [
        study.Loop(f"{source},n=100", "e1", 1) for source in ("closed:clients=4", "pulses:burst=3", "poisson:rps=1")
    ]
    work.append(study.FirstToken("poisson", 0.5, "fast", 150, ""))
    work.append(study.Lengths("poisson", 0.9, "e3", 400, ""))
    found = [study.do(job) for job in work]
    ways = found[-1][1]
    assert 0 <= ways["like lengths, full"]["waste"] < ways["order of arrival"]["waste"] < 1
    assert found[3][1]["greedy"]["ratio"] == 1
    found.append((study.Steps("e2", 1), {name: {"up": 1.0, "down": 1.2} for name in study.WINDOWS}))
    rows = window_study.summary(found)
    aims = window_study.targets(found, rows, 60.0)
    assert {row["window"] for row in rows} == set(study.WINDOWS)
    assert all(aim.reached > 0 for aim in aims if "waste" not in aim.name)
    assert next(aim for aim in aims if "waste" in aim.name).reached == ways["like lengths, by cost"]["waste"]
    assert next(aim for aim in aims if "load step" in aim.name).reached == 1.2
    assert set(window_study.over_load(found)) == set(study.ENGINES)
    console = Console(width=160)
    with console.capture() as caught:
        window_study.show(console, found, rows, aims)
    assert "over the best fixed window in hindsight" in caught.get()
    assert len(window_study.jobs(True, "")) < len(window_study.jobs(False, "")) / 4
