"""`headway ab`: a recording whose truth is known is calibrated to it, and what is better is found better."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from headway.bench.ab.calibrate import Error, calibrated, scaled, traffic_of
from headway.bench.ab.simulated import Compared, compare, setting_of
from headway.bench.sim.compare import Setting, simulate
from headway.bench.sim.engines import Engine
from headway.bench.sim.sources import open_source
from headway.bench.sim.world import OK
from headway.cli.app import app
from headway.scheduler.config import ConfigError
from headway.scheduler.recorder import VERSION, Came, Went
from headway.scheduler.spec import ModelSpec, PolicySpec, ServerSpec

TRUE = Engine("true", 8.0, 0.02, 0.4, noise=0.1)
STEPS = Engine("steps", 12.0, 0.05, 0.3, iteration=True, noise=0.1)


def recorded(path: Path, engine: Engine, source: str, model: str = "m") -> Path:
    """What a server with this engine would have recorded of this traffic."""
    load = open_source(source)
    _, outcome = simulate(load, Setting(engine, PolicySpec(), seed=5))
    with path.open("ab") as file:
        for rid, at_ns in enumerate(outcome.at_ns, 1):
            i = rid - 1
            tokens, new = int(load.tokens[i]), int(load.max_new[i])
            file.write(msgspec.msgpack.encode(Came(VERSION, at_ns, tokens, new, model=model, rid=rid)))
            ok = outcome.ending[i] == OK
            first = (outcome.first_ns[i] - at_ns) / 1e6 if outcome.first_ns[i] else None
            total = (outcome.done_ns[i] - at_ns) / 1e6
            ending = Went(VERSION, rid, outcome.done_ns[i], "ok" if ok else "x", new, 0.0, first, total)
            file.write(msgspec.msgpack.encode(ending))
    return path


@pytest.mark.parametrize(
    ("engine", "source"),
    [(TRUE, "poisson:rps=60,n=3000,tokens=100"), (STEPS, "poisson:rps=6,n=800,tokens=60,max_new=12")],
)
def test_the_cost_is_found_again_and_the_error_said(tmp_path: Path, engine: Engine, source: str) -> None:
    """A profile that is 1.7 times too fast."""
    traffic = traffic_of(str(recorded(tmp_path / "a.rec", engine, source)), "", seed=0)
    assert traffic.live
    _, found = calibrated(traffic, Setting(scaled(replace(engine, noise=0.0), 1 / 1.7), PolicySpec()))
    assert found.factor == pytest.approx(1.7, rel=0.1)
    assert found.errors[0].figure == "mean total"
    assert all(abs(error.share) < 0.15 for error in found.errors), found.errors
    assert len(found.errors) == (4 if engine.iteration else 2)


def test_what_no_factor_explains_is_refused(tmp_path: Path) -> None:
    traffic = traffic_of(str(recorded(tmp_path / "a.rec", TRUE, "poisson:rps=20,n=200,tokens=100")), "", seed=0)
    with pytest.raises(ConfigError, match="no factor up to 16 explains it"):
        calibrated(traffic, Setting(Engine("x", 0.001, 0.0, 0.0), PolicySpec()))
    assert Error("mean", 10.0, 11.0).share == pytest.approx(0.1)


def run(a: PolicySpec, b: PolicySpec, source: str = "poisson:rps=40,n=2000,tokens=100") -> Compared:
    settings = [Setting(TRUE, policy) for policy in (a, b)]
    return compare(("a", "b"), settings[0], settings[1], traffic_of(source, "", seed=0))


def verdicts(found: Compared) -> dict[str, str]:
    return {one.figure: one.verdict for one in found.differences}


def test_a_longer_window_is_found_slower_and_the_same_is_the_same() -> None:
    slow = run(PolicySpec(), PolicySpec(window="fixed", fixed_wait_ms=50.0))
    assert verdicts(slow)["mean_e2el_ms"] == "higher"
    assert verdicts(slow)["p95_e2el_ms"] == "higher"
    assert not slow.same
    equal = run(PolicySpec(), PolicySpec())
    assert equal.same
    assert verdicts(equal)["mean_e2el_ms"] == "the same"
    assert equal.calibration is None
    mean = next(one for one in equal.differences if one.figure == "mean_e2el_ms")
    assert (mean.low, mean.high) == (1.0, 1.0)  # drawn together: chance has nothing to say


def test_settings_follow_the_configuration_and_its_profile(tmp_path: Path) -> None:
    spec = ServerSpec(models=(ModelSpec(model="minilm", max_batch=7, workers=3, window="greedy"), ModelSpec()))
    with pytest.raises(ConfigError, match="which model\\? There are 'minilm', 'smollm2'"):
        setting_of(spec, "", "", "e1", 0)
    made = setting_of(spec, "minilm", "", "e1", 0)
    assert (made.max_batch, made.workers, made.policy.window) == (7, 3, "greedy")
    with pytest.raises(ConfigError, match="say what the engine costs"):
        setting_of(spec, "minilm", "", "", 0)
    tuned = setting_of(spec, "smollm2", profile(tmp_path / "p.yaml"), "", 0)
    assert (tuned.engine.a_ms, tuned.engine.iteration, tuned.max_num_seqs) == (12.0, True, 9)


def profile(path: Path) -> str:
    values: dict[str, Any] = {"headway_profile": 1, "model": "smollm2", "engine": "generate"}
    values |= {"cost_ns": [12e6, 5e4, 3e5], "recommended": {"max_num_seqs": 9}}
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_one_of_several_recorded_models(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a.rec", TRUE, "poisson:rps=60,n=100", "chat")
    recorded(path, TRUE, "poisson:rps=60,n=150", "search")
    with pytest.raises(ConfigError, match="holds traffic of 'chat', 'search'; say which with --model"):
        traffic_of(str(path), "", seed=0)
    found = traffic_of(str(path), "search", seed=0)
    assert len(found.load) == len(found.total_ms) == 150
    assert np.isfinite(found.total_ms).all()
    assert found.load.notes[-1].startswith("100 recorded requests were for other models")
    one = recorded(tmp_path / "b.rec", TRUE, "poisson:rps=60,n=100", "chat")
    recorded(one, TRUE, "poisson:rps=60,n=20", "")  # a server whose worker was not up yet: no model, and no tokens
    assert len(traffic_of(str(one), "", seed=0).load) == 100
    with pytest.raises(ConfigError, match="closed loop"):
        traffic_of("closed:clients=3", "", seed=0)


def test_on_the_command_line(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "a.rec", STEPS, "poisson:rps=6,n=400,tokens=60,max_new=12", "smollm2")
    for name, policy in (("a", {"window": "adaptive"}), ("b", {"in_flight_fraction": 0.1})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"models": [{"model": "smollm2"}], "policy": policy}))
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    command = ["ab", *files, "--trace", str(trace), "--profile", profile(tmp_path / "p.yaml")]
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert told["calibration"]["factor"] == pytest.approx(1.0, rel=0.15)
    assert told["calibration"]["worst_error"] < 0.15
    plain = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    assert plain.exit_code == 0, plain.stderr
    for words in ("B / A", "mean_e2el_ms", "Calibrated on the first 200 requests", "launched because"):
        assert words in plain.stdout
    for more, words in ((["--rate", "3"], "leave it out"), (["--engine", "e1"], "give one of them")):
        wrong = CliRunner().invoke(app, command + more)
        assert wrong.exit_code == 2
        assert words in " ".join(wrong.stderr.split())


def test_what_the_calibration_found_holds_for_both(tmp_path: Path) -> None:
    """The same configuration twice, with a cost that is 1.7 times too short: still the same in everything."""
    traffic = traffic_of(str(recorded(tmp_path / "a.rec", TRUE, "poisson:rps=60,n=600,tokens=100")), "", seed=0)
    guessed = Setting(scaled(replace(TRUE, noise=0.0), 1 / 1.7), PolicySpec())
    found = compare(("a", "a"), guessed, guessed, traffic)
    assert found.calibration is not None
    assert found.calibration.factor > 1.5
    assert found.same
