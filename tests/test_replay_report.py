"""The numbers of a replay: what is counted, what is left out, and what two runs differ in."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from rich.console import Console  # noqa: E402

from headway.bench.replay import output, seen, slo, tables  # noqa: E402
from headway.bench.replay.compare import FIGURES, compare, judged  # noqa: E402
from headway.bench.replay.report import Facts, Report, report_of  # noqa: E402
from headway.bench.replay.seen import Note, Seen  # noqa: E402
from headway.bench.replay.watch import Watched  # noqa: E402
from headway.scheduler import clock  # noqa: E402
from headway.scheduler.config import ConfigError  # noqa: E402

MS = 1_000_000
FACTS = Facts(source="some", target="there", mode="open loop")


def one(index: int, tokens: int, code: str = "ok", *, first_ms: int = 200, each_ms: int = 20, **more: Any) -> Seen:
    """A request due at `index` x 10 ms, with so many tokens, one a message."""
    due = index * 10 * MS
    times = [due + (first_ms + each_ms * place) * MS for place in range(tokens)]
    done = (times[-1] if times else due + first_ms * MS) + MS
    made = Seen(index, due, due + 1, due + 2, done_ns=done, code=code, input=5, output=tokens, **more)
    made.gaps = [each_ms * MS] * max(0, tokens - 1)
    made.first_ns, made.last_ns = (times[0], times[-1]) if times else (0, 0)
    return made


def written(report: Report) -> dict[str, Any]:
    """As JSON; what is no number in it is a fault."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in a report")

    found: dict[str, Any] = json.loads(json.dumps(output.as_map(report), default=_plain), parse_constant=refuse)
    return found


def _plain(value: Any) -> Any:
    return {key: getattr(value, key) for key in value.__struct_fields__}


def text(report: Report) -> str:
    console = Console(width=160)
    with console.capture() as caught:
        console.print(tables.shown(report))
    return caught.get()


# ---------------------------------------------------------------- answers of no and of one token


def test_answers_of_few_tokens_have_no_time_per_token() -> None:
    answers = [one(0, 0), one(1, 1), one(2, 2), one(3, 100), one(4, 3, "engine_error"), one(5, 0, "cancelled")]
    report = report_of(FACTS, answers, None)
    assert report.columns["tpot_ms"] == [None, None, 20.0, 20.0, 20.0, None]
    assert (report.times["tpot"].n, report.times["tpot"].mean_ms) == (2, 20.0)
    assert (report.times["itl"].n, report.times["ttft"].n, report.times["e2el"].n) == (100, 3, 4)
    assert report.endings == {"completed": 4, "cancelled": 1, "expired": 0, "refused": 0, "failed": 1}
    assert not report.all_well
    found = written(report)
    assert found["mean_tpot_ms"] == 20.0
    assert "p99_tpot_ms" not in found


def test_an_answer_in_one_message_has_no_time_per_token() -> None:
    """Two tokens that come together: their distance is not 0, it is not known."""
    together = one(0, 2, each_ms=0)
    together.gaps = []
    assert report_of(FACTS, [together], None).columns["tpot_ms"] == [None]


@pytest.mark.parametrize(
    "answers",
    [[], [one(0, 0)], [one(0, 1)], [one(0, 3, "engine_error")], [one(i, 0, "queue_full") for i in range(9)]],
    ids=["nothing", "empty_stream", "single", "single_failed", "all_refused"],
)
def test_a_report_is_made_of_whatever_happened(answers: list[Seen]) -> None:
    report = report_of(FACTS, answers, None, slo.parse("ttft:1,e2e:1"))
    found = written(report)
    assert found["completed"] == sum(answer.code == "ok" for answer in answers)
    for key, value in found.items():
        if key.startswith(("mean_", "median_", "p9", "std_", "max_")) and key.endswith("_ms"):
            assert value >= 0, key
            assert math.isfinite(value), key
        if key.endswith("_tpot_ms") or (not found["completed"] and "_e2el_" in key):
            pytest.fail(f"{key} of nothing")
    assert text(report)
    if not answers or not found["completed"]:
        assert not report.all_well


# ---------------------------------------------------------------- first tokens, and endings that add up


def scripted(monkeypatch: pytest.MonkeyPatch, index: int, *, tokens: int, code: str) -> Seen:
    """A request as a target would note it, on a clock that stands at 200 ms for the first token and goes on by 20."""
    found = Seen(index, 0)
    note = Note(found, 0)
    now = 0
    monkeypatch.setattr(clock, "now_ns", lambda: now)
    for place in range(tokens):
        now = (200 + 20 * place) * MS
        note.tokens(1)
        note.tokens(0)
    now += MS
    note.over(code)
    note.over("internal", "a second ending changes nothing")
    return found


def test_first_tokens_and_endings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [(60, 10, "ok"), (10, 0, "cancelled"), (10, 4, "cancelled"), (10, 0, "engine_error")]
    script.append((10, 0, "deadline_exceeded"))
    answers = [scripted(monkeypatch, 0, tokens=t, code=code) for count, t, code in script for _ in range(count)]
    report = report_of(FACTS, answers, None)
    assert report.endings == {"completed": 60, "cancelled": 20, "expired": 10, "refused": 0, "failed": 10}
    assert (report.first_tokens, report.requests) == (70, 100)
    assert (report.times["ttft"].n, report.times["ttft"].mean_ms, report.times["ttft"].max_ms) == (60, 200.0, 200.0)
    assert (report.times["itl"].n, report.times["itl"].mean_ms) == (540, 20.0)
    assert report.times["e2el"].mean_ms == 381.0


def test_a_note_never_says_that_something_happened_at_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen.clock, "now_ns", lambda: 0)
    answer = Seen(0, 0)
    Note(answer, 0).tokens(1)
    assert answer.first_ns > 0


# ---------------------------------------------------------------- percentiles, objectives, warnings


def test_latency_counts_from_when_a_request_should_have_gone() -> None:
    late = one(0, 3)
    late.woke_ns, late.sent_ns = 50 * MS, 80 * MS
    times = report_of(FACTS, [late], None).times
    assert {name: times[name].mean_ms for name in ("ttft", "e2el", "service", "lag", "held")} == {
        "ttft": 200.0,
        "e2el": 241.0,
        "service": 161.0,
        "lag": 50.0,
        "held": 30.0,
    }


def test_percentiles_need_samples_beyond_them() -> None:
    report = report_of(FACTS, [one(index, 1) for index in range(400)], None)
    assert report.times["e2el"].p99_ms is None
    assert any("400 requests are too few for P99" in warning for warning in report.warnings)
    assert report_of(FACTS, [one(index, 1) for index in range(500)], None).times["e2el"].p99_ms is not None


def test_goodput_counts_all_bounds_and_all_requests() -> None:
    good, late, stalled = one(0, 3), one(1, 3, first_ms=900), one(2, 3)
    stalled.gaps = [1, 70 * MS]
    answers = [good, late, stalled, one(3, 0, "queue_full"), one(4, 0)]
    bounds = slo.parse("ttft:500,itl:50,e2e:2000")
    report = report_of(FACTS, answers, None, bounds)
    assert [bounds.met(answer) for answer in (good, late, stalled, answers[4])] == [True, False, False, False]
    assert written(report)["goodput_share"] == 0.2
    assert (bounds.text, slo.parse("e2el:5").text) == ("ttft:500,itl:50,e2e:2000", "e2e:5")
    with pytest.raises(ConfigError, match="give name:milliseconds"):
        slo.parse("ttft:-1")
    with pytest.raises(ConfigError, match="give name:milliseconds"):
        slo.parse("ttft:inf")
    with pytest.raises(ConfigError, match="bounds ttft twice"):
        slo.parse("ttft:5,ttft:6")


def test_a_replayer_that_falls_behind_is_told_of() -> None:
    answers = [one(index, 1) for index in range(600)]
    for answer in answers[:12]:
        answer.woke_ns += 30 * MS
    report = report_of(FACTS, answers, None)
    assert any("it was 30.0 ms late at P99" in warning for warning in report.warnings)
    assert "warning: the replayer fell behind" in text(report)
    assert not report_of(FACTS, [one(index, 1) for index in range(600)], None).warnings


def test_warm_up_and_cool_down_are_cut_off() -> None:
    facts = Facts(source="some", target="there", mode="open loop", warmup_s=1.0, cooldown_s=2.0)
    report = report_of(facts, [one(index, 1) for index in range(600)], None)
    assert (report.requests, report.left_out) == (300, 300)
    assert report.columns["at_s"][0] == 1.0


def test_what_the_server_says_of_itself() -> None:
    batches = {number: {"size": 2 + number % 2, "running": 6, "at_s": 0.1, "waited_ms": 1.0} for number in range(4)}
    counters = {"batches": 8, "launched.greedy": 6, "launched.full": 2, "compute_us": 30_000}
    counters |= {"held.no_free_worker": 3, "refusal.queue_full": 1}
    report = report_of(FACTS, [one(index, 1) for index in range(10)], Watched(batches, [], counters))
    found = written(report)
    assert found["launched_because"] == {"greedy": 6, "full": 2}
    assert (found["held_because"], found["refused_because"]) == ({"no_free_worker": 3}, {"queue_full": 1})
    assert (found["batch_sizes"], found["batches"]) == ({"2": 2, "3": 2}, 8)
    assert (found["device_ms_per_request"], found["running_mean"]) == (3.0, 6.0)
    assert any("4 of 8 batches were seen" in warning for warning in report.warnings)


def test_json_has_the_names_of_other_benchmarks() -> None:
    found = written(report_of(FACTS, [one(index, 3) for index in range(600)], None))
    names = "duration completed total_input_tokens total_output_tokens request_throughput output_throughput"
    names += " total_token_throughput mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms"
    names += " p99_tpot_ms mean_itl_ms median_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms p99_e2el_ms"
    assert set(names.split()) <= set(found)


# ---------------------------------------------------------------- two runs


def a_run(tmp_path: Path, name: str, scale: float, count: int = 400, seed: int = 0) -> output.Run:
    rng = np.random.default_rng([seed, len(name)])
    answers = [one(index, 3, first_ms=int(scale * t)) for index, t in enumerate(rng.lognormal(5, 0.5, count))]
    output.write_json(tmp_path / name, report_of(FACTS, answers, None))
    return output.read_run(tmp_path / name)


def test_a_difference_is_told_from_chance(tmp_path: Path) -> None:
    base, other, slower = (a_run(tmp_path, *of) for of in (("a", 1.0), ("bb", 1.0), ("ccc", 1.3)))
    found = {difference.figure: difference for difference in compare(base, slower)}
    assert found["mean_ttft_ms"].verdict == "higher"
    assert found["mean_ttft_ms"].low < 1.3 < found["mean_ttft_ms"].high  # type: ignore[operator]
    assert found["p99_e2el_ms"].verdict == "too few samples"
    assert {difference.figure: difference for difference in compare(base, other)}["mean_ttft_ms"].verdict == "the same"
    assert compare(base, other, seed=3) == compare(base, other, seed=3)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 20 comparisons of the same with the same, one is expected outside a 95 % interval."""
    rng = np.random.default_rng(5)
    _, median, needs = FIGURES["median_ttft_ms"]
    pairs = rng.lognormal(5, 0.5, (20, 2, 200))
    assert sum(judged("", median, needs, a, b, rng).verdict != "the same" for a, b in pairs) <= 4
    assert sum(judged("", median, needs, a, b * 1.5, rng).verdict == "higher" for a, b in pairs) >= 18


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "other"}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json"):
        output.read_run(tmp_path / "a.json")
