"""The headline's baselines are fair servers with right answers, its client keeps its times, its numbers are what they
say."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

pytest.importorskip("torch")

from headway.bench.generate import ways
from headway.bench.generate.work import Answer, Work
from headway.bench.headline import load, report
from headway.bench.headline.baseline import Length, Queue, Wanted
from headway.bench.headline.report import CLOSED, FIXED, OURS, SOLO, Found, run_of
from headway.bench.overhead import free_address
from headway.scheduler.clock import NS_PER_MS as MS
from headway.scheduler.config import ConfigError
from tests import torch_models as tiny


def wanted(at_ms: int) -> Wanted:
    return Wanted(str(at_ms), [1], Length(1), at_ns=at_ms * MS)


def test_a_batch_is_taken_when_it_is_full_or_its_oldest_has_waited() -> None:
    queue = Queue(batch=2, wait_ms=100)
    assert queue._left_ns(0) is None
    queue.put(wanted(50))
    assert queue._left_ns(60 * MS) == 90 * MS
    assert queue._left_ns(150 * MS) == 0
    queue.put(wanted(61))
    queue.put(wanted(62))
    assert queue._left_ns(62 * MS) == 0
    assert [one.id for one in queue.take()] == ["50", "61"]
    assert queue._left_ns(70 * MS) == 92 * MS
    alone = Queue(batch=1, wait_ms=0)
    alone.put(wanted(5))
    assert [one.id for one in alone.take()] == ["5"]


@pytest.mark.models
def test_a_baseline_streams_the_answers_of_the_plain_model(tmp_path: Path) -> None:
    """Padded batches of three; requests of different lengths, each with exactly the tokens it asked for."""
    tiny.model("llama").save_pretrained(tmp_path)
    texts = tiny.texts(5, longest=20)
    work = [Work("", text, new) for text, new in zip(texts, (3, 1, 6, 2, 4), strict=True)]
    address = free_address()
    command = [sys.executable, "-m", "headway.bench.headline.baseline", str(tmp_path), "1", "3", "20", address]
    process = subprocess.Popen(command)
    try:
        closed = load.Player(address, work, 5).run()
        due = [0, 1 * MS, 2 * MS, 30 * MS, 60 * MS]
        opened = load.Player(address, work, due).run()
    finally:
        ways.stop(process)
    for answers in (closed, opened):
        for one, answer in zip(work, answers, strict=True):
            assert answer.tokens == tiny.solo("llama", one.ids, one.new)
            assert len(answer.stamps_ns) == one.new
            assert answer.sent_ns <= answer.stamps_ns[0]
    began = opened[0].sent_ns
    assert [answer.sent_ns - began for answer in opened] == due  # latency counts from when a request was due


def test_arrivals_come_at_the_rate() -> None:
    due = load.poisson(4000, 5.0, seed=3)
    assert due == sorted(due) == load.poisson(4000, 5.0, seed=3)
    assert due[-1] / 1e9 == pytest.approx(800, rel=0.05)
    assert load.from_trace("poisson:n=50,rps=9", 20, 2.0)[-1] / 1e9 == pytest.approx(19 / 2.0)
    with pytest.raises(ConfigError, match="are needed"):
        load.from_trace("poisson:n=10", 20, 2.0)
    with pytest.raises(ConfigError, match="a closed loop"):
        load.from_trace("closed:clients=2", 20, 2.0)


def answers(first_ms: int, count: int = 4) -> list[Answer]:
    return [Answer(0, [first_ms * MS, (first_ms + 10) * MS]) for _ in range(count)]


def found(**changes: Any) -> Found:
    """headway: 4 times the rate, a third of the device time; its first tokens come sooner under a load of 1.5."""
    made = Found(same=(3, 4))
    for number in range(2):
        for way, wall_ms, device_s in ((OURS, 100, 0.02), (SOLO, 400, 0.06), (FIXED, 200, 0.03)):
            made.runs.append(run_of(number, way, CLOSED, answers(30), wall_ms * MS, device_s))
            late = {OURS: 50, SOLO: 100, FIXED: 80} | changes
            made.runs.append(run_of(number, way, "1.5", answers(late[way]), 1000 * MS, device_s))
    return made


def test_ratios_and_targets() -> None:
    made = found()
    assert made.throughput_ratio(SOLO) == pytest.approx(4.0)
    assert made.throughput_ratio(FIXED) == pytest.approx(2.0)
    assert made.device_ratio(SOLO) == pytest.approx(1 / 3)
    assert made.first_ratio(SOLO, "1.5") == 0.5
    row = made.row(OURS, CLOSED)
    assert (row.requests, row.requests_per_s, row.tokens_per_s, row.device_ms) == (8, 40.0, 80.0, 5.0)
    assert [aim.met for aim in report.targets(made)] == [True, True, True]
    assert [aim.met for aim in report.targets(found(headway=101))] == [True, True, False]
    console = Console(width=200, file=io.StringIO(), record=True)
    report.show(made, 16, console)
    text = console.export_text()
    assert "16 clients" in text
    assert "headway over one at a time: 4.00 times the throughput, 0.33 of the device time" in text
    assert "3 of 4 answers are those of one at a time" in text
    assert "a P95 of fewer than 100 requests (here 8)" in text
    told = msgspec.json.decode(report.as_json(made, {"seed": 1}))
    assert told["ratios"][SOLO]["throughput"] == pytest.approx(4.0)
    assert len(told["found"]["runs"]) == 12


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(tmp_path / "a.png", found())
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
