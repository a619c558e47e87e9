"""The generation bench counts what it says: rates, percentiles, ratios, targets; what is not there is named."""

import io
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.bench.generate import grid, processes, report, steps, ways, work
from headway.bench.generate.__main__ import app
from headway.bench.generate.report import CONTINUOUS, OURS, SOLO, Found
from headway.bench.generate.work import Answer, Run
from headway.scheduler.clock import NS_PER_MS as MS

ANSWERS = [Answer(0, [50 * MS, 60 * MS, 90 * MS]), Answer(20 * MS, [40 * MS, 140 * MS])]


def run(way: str, tokens_per_s: float, concurrency: int = 16) -> Run:
    made = work.run_of(way, concurrency, 2, ANSWERS, 100 * MS, 0.05, 7)
    return msgspec.structs.replace(made, tokens_per_s=tokens_per_s)


def found(*runs: Run) -> Found:
    return Found(runs=list(runs), skipped={"vLLM (CPU)": "it is not installed"}, same=(3, 4))


def test_a_run_in_numbers() -> None:
    made = work.run_of("x", 2, 1, ANSWERS, 200 * MS, 0.1, 7)
    assert (made.requests, made.tokens, made.tokens_per_s, made.cpu_ms_per_token) == (2, 5, 25.0, 20.0)
    assert (made.ttft_p50_ms, made.ttft_p95_ms) == (20.0, 50.0)
    assert (made.gap_p50_ms, made.gap_p99_ms) == (30.0, 100.0)  # of 10, 30 and 100


def test_percentiles_are_nearest_ranks() -> None:
    assert [work.percentile(list(range(1, 101)), percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert work.percentile([3.0], 1) == 3.0
    assert work.percentile([], 50) == 0.0


def test_ratios_are_of_medians_at_the_same_concurrency() -> None:
    runs = [run(OURS, rate) for rate in (90.0, 100.0, 500.0)] + [run(CONTINUOUS, rate) for rate in (50.0, 40.0, 45.0)]
    made = found(*runs, run(OURS, 10.0, 1), run(SOLO, 20.0, 1))
    assert made.ratios(16)[CONTINUOUS] == pytest.approx(100 / 45)
    assert made.ratios(1)[SOLO] == 0.5
    assert Found(runs=[run(SOLO, 5.0)]).ratios(16) == {}


def test_targets_tell_what_was_missed() -> None:
    made = found(run(OURS, 100.0), run(CONTINUOUS, 90.0), run(SOLO, 20.0))
    made.overhead = steps.Overhead(running=16, step_ms=100.0, share=0.05)
    made.long_prompt = steps.LongPrompt(4000, 8, median_ms=100.0, alone_median_ms=90.0, longest_ms=350.0, ttft_ms=9e3)
    assert [aim.met for aim in report.targets(made)] == [False, True, True, False]
    console = Console(width=200, file=io.StringIO(), record=True)
    report.show(made, console)
    text = console.export_text()
    assert "MISSED   longest wait" in text
    assert "left out: vLLM (CPU): it is not installed" in text
    assert "3 of 4 answers" in text
    whole = msgspec.json.decode(report.as_json(made, {"seed": 1}))
    assert whole["medians"][0]["ratios"][SOLO] == 5.0
    assert len(whole["found"]["runs"]) == 3


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(tmp_path / "a.png", found(run(OURS, 100.0), run(OURS, 30.0, 1), run(SOLO, 20.0, 1)))
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_what_processes_use_is_read() -> None:
    assert os.getpid() in processes.tree(os.getppid())
    assert processes.memory_mib(os.getpid()) > 5
    assert processes.cpu_s(os.getpid()) > 0


def test_a_server_that_is_not_installed_is_skipped_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ways.CannotStartError, match="vLLM is not installed in"):
        ways.vllm(tmp_path, tmp_path, 1, 1, 64)


def test_a_model_that_never_ends_is_the_same_but_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"vocab_size": 100, "eos_token_id": 2}')
    (tmp_path / "old" / "model.safetensors").write_text("weights")
    made = ways.endless(tmp_path / "old", tmp_path / "new")
    assert msgspec.json.decode((made / "config.json").read_bytes()) == {"vocab_size": 100, "eos_token_id": 99}
    assert (made / "model.safetensors").resolve() == (tmp_path / "old" / "model.safetensors").resolve()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "0"], "from 1 to 64"),
        (["--concurrency", "a"], "not a list of numbers"),
        (["--prompt", "200:20"], "not above the second"),
        (["--threads", "3", "--workers", "2"], "does not divide"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    outcome = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert outcome.exit_code == 2
    assert words in outcome.output


def test_the_grid_shows_ratios_where_both_ran() -> None:
    cells = [grid.Cell(16, run(OURS, 90.0)), grid.Cell(16, run(CONTINUOUS, 45.0)), grid.Cell(512, run(OURS, 10.0))]
    console = Console(width=120, file=io.StringIO(), record=True)
    for way in (OURS, CONTINUOUS):
        console.print(grid.table_of(cells, way))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines() if line[:1] == "│"]
    assert lines == [["16", "90.0"], ["512", "10.0"], ["16", "2.00"], ["512"]]


def test_nothing_that_runs_is_an_error_that_says_why(tmp_path: Path) -> None:
    asked = ["--only", "vLLM (CPU)", "--vllm", str(tmp_path), "--json", str(tmp_path / "g.json")]
    for one in (app, grid.app):
        result = CliRunner().invoke(one, asked)
        assert result.exit_code == 1
        assert "is not installed" in result.output
        assert not (tmp_path / "g.json").exists()
