"""The simulator's engine is fitted to steps that were recorded, and holds to what workers do."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from typer.testing import CliRunner  # noqa: E402

from headway.bench.ab.steps import Seen, fitted, pace, steps_in  # noqa: E402
from headway.bench.replay.rerun import STEP  # noqa: E402
from headway.bench.sim.arrivals import ints, plain  # noqa: E402
from headway.bench.sim.compare import Setting, simulate  # noqa: E402
from headway.bench.sim.engines import Engine  # noqa: E402
from headway.bench.sim.iteration import shared_out  # noqa: E402
from headway.bench.sim.steps import Shape, StepCost  # noqa: E402
from headway.scheduler import actions as act  # noqa: E402
from headway.scheduler import events as ev  # noqa: E402
from headway.scheduler.blackbox import BlackBox  # noqa: E402
from headway.scheduler.clock import NS_PER_MS as MS  # noqa: E402
from headway.scheduler.config import ConfigError  # noqa: E402
from headway.scheduler.spec import PolicySpec, ServerSpec  # noqa: E402

#                    1     ..1  ..2  ..4  ..8  ..16 ..32 ..64 ..128 more rows slots   pairs
TRUE = StepCost((40.0, 0.0, 2.0, 1.0, 1.0, 1.5, 2.0, 2.5, 2.5, 2.5, 0.5, 0.0005, 0.0001), gap_ms=0.3, wake_ms=1.2)


def measured(count: int, seed: int) -> list[Seen]:
    """Steps that cost what TRUE says, give or take a twentieth; one in fifty was held up."""
    rng = random.Random(f"steps {seed}")
    found = []
    for _ in range(count):
        rows = rng.randint(0, 22)
        read = rng.choice((0, 0, rng.randint(1, 200))) if rows else rng.randint(1, 200)
        chunks = rng.randint(1, 3) if read else 0
        shape = Shape(rows, read, chunks, rows * rng.randint(10, 200) + read, read * rng.randint(1, 100))
        took = TRUE.step_ms(shape) * rng.lognormvariate(0.0, 0.05) * (8 if rng.random() < 0.02 else 1)
        found.append(Seen(0, shape, took, rng.uniform(0.2, 0.4), None))
    return found


def test_the_cost_of_steps_is_found_again_beside_steps_that_were_held_up() -> None:
    engine = fitted(measured(1500, 1), "f", 256)
    assert engine.steps is not None
    for shape in (Shape(1, 0, 0, 50), Shape(20, 0, 0, 2000), Shape(0, 40, 1, 40, 800), Shape(8, 24, 2, 900, 700)):
        assert engine.steps.step_ms(shape) == pytest.approx(TRUE.step_ms(shape), rel=0.04), shape
    assert engine.steps.gap_ms == pytest.approx(0.3, abs=0.02)
    again = measured(1500, 2)  # steps that were held up are left to the ratios
    slower = sum(step.took_ms for step in again) / sum(TRUE.step_ms(step.shape) for step in again)
    assert pace(again, engine.steps) == pytest.approx(slower, rel=0.03)
    assert float(np.mean(engine.steps.ratios)) == pytest.approx(1.14, abs=0.06)
    with pytest.raises(ConfigError, match="3 steps of a generating worker are too few"):
        fitted(measured(3, 1), "f", 256)


def test_steps_are_read_from_a_flight_record(tmp_path: Path) -> None:
    """Two requests of 10 and 3 tokens; the first is alone, and read in two pieces; the second waits for a step."""
    record = tmp_path / "f.msgpack"
    box = BlackBox(str(record), ServerSpec())

    def sent(batch: int, rid: int) -> list[act.Action]:
        return [act.Dispatch(1, batch, (rid,), "m", "generate", "short", "idle", "only", 0, 1)]

    def step(at_ms: int, took_ms: int, tokens: int, *rows: ev.RowDone) -> None:
        box.note(ev.StepDone(1, took_ms * MS, tokens, 1, rows), at_ms * MS, [])

    box.note(ev.Submit(7, 1, "m", "generate", 10, 3), 100 * MS, sent(1, 7))
    step(131, 30, 6)
    box.note(ev.Together([ev.Submit(8, 1, "m", "generate", 3, 1)]), 140 * MS, sent(2, 8))
    step(152, 20, 4, ev.RowDone(1, 7, 1))
    step(173, 21, 4, ev.RowDone(1, 7, 1), ev.RowDone(2, 8, 1, "length"))
    step(190, 15, 1, ev.RowDone(1, 7, 1, "length"))
    box.tape.close()
    with record.open("ab") as file:
        file.write(bytes([STEP]))  # the server is writing
    first, second, third, fourth = steps_in(record)
    assert first == Seen(131 * MS, Shape(0, 6, 1, 6, 18), 30.0, None, 1.0)
    assert second == Seen(152 * MS, Shape(0, 4, 1, 10, 32), 20.0, 1.0, None)
    assert third == Seen(173 * MS, Shape(1, 3, 1, 11 + 3, 4), 21.0, 0.0, None)
    assert fourth == Seen(190 * MS, Shape(1, 0, 0, 12, 0), 15.0, 2.0, None)


def test_measured_ratios_are_played_again_and_steps_have_gaps() -> None:
    """One row of three tokens: a step that wakes the worker, and two after gaps, each twice as long as the cost."""
    cost = StepCost((10.0, *[0.0] * 12), gap_ms=0.5, wake_ms=2.0, ratios=(2.0,))
    engine = Engine("g", 10.0, 0.0, 0.0, iteration=True, steps=cost)
    load = plain("one", ints([0]), ints([5]), ints([3]))
    _, outcome = simulate(load, Setting(engine, PolicySpec()))
    assert (outcome.first_ns[0], outcome.done_ns[0]) == (22 * MS, (22 + 2 * 20.5) * MS)
    assert outcome.busy_ns == 60 * MS


def test_who_is_sent_when_somebody_left_misses_the_step_that_begins() -> None:
    """Room for two: the third comes in when the first leaves after a step, and starts a step later."""
    engine = Engine("g", 10.0, 0.0, 0.0, iteration=True)
    load = plain("three", ints([0, 0, 0]), ints([1, 1, 1]), ints([1, 4, 1]))
    _, outcome = simulate(load, Setting(engine, PolicySpec(in_flight_fraction=1.0), max_num_seqs=2))
    assert [at / MS for at in outcome.done_ns] == [10, 40, 30]


def test_simulating_needs_no_torch() -> None:
    said = "import sys, headway.bench.sim.iteration; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stdout == "False\n"


def test_prompts_are_read_as_workers_read_them() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from headway.workers.generate.pace import Pace
    from headway.workers.generate.request import Request
    from headway.workers.generate.sampling import Choice
    from headway.workers.generate.shares import shares_of

    rng = random.Random("shares")
    for _ in range(300):
        sizes = [(rng.randint(2, 300), rng.choice((0, rng.randint(1, 900)))) for _ in range(rng.randint(1, 6))]
        rows, budget = rng.randint(0, 20), rng.randint(21, 300)
        requests = [
            Request(1, rid, [1] * (left + read), left + read, left + read + 9, Choice(), frozenset(), written=read)
            for rid, (left, read) in enumerate(sizes)
        ]
        decoding = [Request(2, rid, [1], 1, 9, Choice(), frozenset()) for rid in range(rows)]
        rule = Pace((50.0 * MS, rng.uniform(0.1, 5.0) * MS, 1.0 * MS))
        live = {one.key: share for one, share in shares_of([*decoding, *requests], rule, budget, 1 << 20, 1)[rows:]}
        room = rule.room(rows, budget, len(sizes), max(read for _, read in sizes))
        assert dict(shared_out({(1, rid): left for rid, (left, _) in enumerate(sizes)}, room)) == live


def test_the_command_starts_a_server_learns_and_compares(tmp_path: Path) -> None:
    """A tiny random model: whether the error is small is for a quiet machine to say, that there is one is checked."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from headway.bench.simulated_live.__main__ import app
    from tests import torch_models as tiny

    tiny.model("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "found.json"
    options = [
        "--quick",
        "--model",
        str(tmp_path / "model"),
        "--prompt",
        "4:40",
        "--output",
        "2:12",
        "--json",
        str(file),
    ]
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, options)
    assert result.exit_code in (0, 1), result.output
    found = json.loads(file.read_text())
    assert [load["share"] for load in found["loads"]] == [0.3, 0.6, 0.85]
    for load in found["loads"]:
        assert (load["requests"], load["lost"]) == (24, 0)
        assert [(one["of"], one["name"]) for one in load["figures"]] == [
            (of, name) for of in ("e2e", "ttft") for name in ("mean", "P50", "P95")
        ]
        assert all(one["live_ms"] > 0 and one["simulated_ms"] > 0 for one in load["figures"])
        assert load["rows"] >= 1
    assert result.exit_code == (1 if max(load["worst"] for load in found["loads"]) > 0.15 else 0)
    assert "worst of means and P95" in result.output
