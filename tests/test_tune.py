"""`headway tune`: the walk over sizes on a machine whose cost is planted, and the whole of it on a tiny real model,
whose engine is killed once; then a server's worker that starts from the profile."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headway.bench.tune import fit
from headway.bench.tune.measure import Tried, Walk, lengths_for
from headway.bench.tune.probe import About, Found, Job
from headway.cli.app import app
from headway.scheduler import config
from headway.scheduler.config import ConfigError
from headway.scheduler.profile import ProfileError, cost_for, profile_of, read_profile, tuned
from headway.scheduler.spec import ModelSpec
from headway.workers.custom import CannotLoad
from headway.workers.process import card_of, make_engine

ABOUT = About("embed", "oneshot", 1000, 512, 512, 0, (), {"device": "cpu"}, 1 << 20)


class Planted:
    """A machine whose batches take 8 ms + 0.01 ms x tokens + 0.1 ms x requests, that holds `tokens_max` tokens."""

    def __init__(self, tokens_max: int = 1 << 30, dies: bool = False, about: About = ABOUT) -> None:
        self.about = about
        self.jobs: list[Job] = []
        self.restarts = 0
        self._tokens_max = tokens_max
        self._dies = dies

    def run(self, job: Job) -> Found:
        self.jobs.append(job)
        tokens = job.requests * job.tokens
        if tokens > self._tokens_max:
            return Found(code="died" if self._dies else "out_of_memory", message="too large")
        return Found([(job.requests, tokens, 8_000_000 + 10_000 * tokens + 100_000 * job.requests)])

    def restart(self) -> None:
        self.restarts += 1


def walked(prober: Planted, lengths: list[int], batch_max: int = 4096, budget_s: float = 1e6) -> Walk:
    walk = Walk(prober, budget_s=budget_s, batch_max=batch_max, seed=1, wrote=lambda _: None)
    walk.run(lengths)
    return walk


def test_sizes_double_until_more_brings_little_and_the_cost_is_found() -> None:
    walk = walked(Planted(), [16, 256])
    sizes = {tokens: [one.requests for one in walk.tried if one.tokens == tokens] for tokens in (16, 256)}
    assert sizes[256] == [1, 2, 4, 8, 16, 32, 64, 128]  # 64 and 128 bring less than a tenth over 32
    assert sizes[16][-1] > 128
    cost = fit.cost_of(fit.reports_of(walk.tried), seed=0)
    assert cost.a_ns == pytest.approx(8e6, rel=0.01)
    assert cost.b_ns == pytest.approx(1e4, rel=0.01)
    assert cost.m_ns == pytest.approx(1e5, rel=0.05)
    assert fit.errors(cost, fit.reports_of(walk.tried))["p95"] < 0.01
    assert {len(one.passes_ms) for one in walk.tried} == {3}
    assert fit.unrest(walk.tried) == 0.0


def test_the_fewest_that_reach_nine_tenths_are_recommended_and_why() -> None:
    tried = walked(Planted(), [256]).tried
    size, why = fit.size_for(tried, 256, None)
    rates = {one.requests: one.rate for one in tried}
    assert rates[size] >= 0.9 * max(rates.values()) > rates[size // 2]
    assert f"{size} at once reach" in why
    assert "would bring" in why
    smaller, why = fit.size_for(tried, 256, 20.0)
    assert smaller == 4
    assert "more at once take longer than 20 ms" in why
    assert fit.size_for(tried, 256, 1.0) == (1, "256 tokens: even one alone takes 10.7 ms, more than 1 ms")


@pytest.mark.parametrize(("dies", "ended"), [(False, "out_of_memory"), (True, "died")])
def test_what_does_not_fit_is_written_down_and_nothing_larger_is_tried(dies: bool, ended: str) -> None:
    prober = Planted(tokens_max=2000, dies=dies)
    walk = walked(prober, [100, 400])
    failed = [(one.requests, one.tokens) for one in walk.tried if one.ended == ended]
    assert failed == ([(8, 400)] if dies else [(8, 400), (6, 400)])
    assert max(job.requests * job.tokens for job in prober.jobs) <= 3200
    assert prober.restarts == (1 if dies else 0)
    assert fit.profile_from(
        ModelSpec(model="m", engine="embed"), ABOUT, walk.tried, ended_by="x", took_ms_max=None, seed=0
    ).recommended.max_batch in (4, 8, 16)


def test_the_walk_ends_with_its_time_its_cache_and_its_process() -> None:
    assert {one.ended for one in walked(Planted(), [16], budget_s=-1.0).tried} == {"no_time"}
    small = Planted(about=About("generate", "oneshot", 9, 512, 512, 1000, (), {}, 1))
    assert [one.ended for one in walked(small, [400]).tried] == ["ok", "ok", "no_room"]
    dead = walked(Planted(tokens_max=0, dies=True), [64, 32, 16, 8])
    assert dead.ended_by in ("all sizes were measured", "the engine's process died 3 times")
    with pytest.raises(ValueError, match="nothing could be measured"):
        fit.profile_from(ModelSpec(), ABOUT, dead.tried, ended_by="", took_ms_max=None, seed=0)
    assert lengths_for(ABOUT, [16, 1000, 256]) == [16, 256]
    assert lengths_for(ABOUT, [1000]) == [480]


# ---------------------------------------------------------------- a profile in a server's hands


def profile(path: Path, **changes: Any) -> str:
    values = {
        "headway_profile": 1,
        "model": "smollm2",
        "engine": "generate",
        "cost_ns": [8e6, 1e4, 1e5],
        "recommended": {"max_num_seqs": 12},
        "facts": {"device": "cpu", "dtype": "float32", "threads": "1"},
    }
    path.write_text(yaml.safe_dump(values | changes))
    return str(path)


def test_a_profile_fills_in_what_is_left_out(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.yaml")
    spec = config.load(flags={"profile": path}).models[0]
    assert tuned(spec, profile_of(spec)).max_num_seqs == 12
    own = config.load(flags={"profile": path, "max_num_seqs": 5}).models[0]
    assert tuned(own, profile_of(own)).max_num_seqs == 5
    asked = read_profile(path)
    assert cost_for(asked, {"device": "cpu", "dtype": "float32"}) == ((8e6, 1e4, 1e5), [])
    assert cost_for(asked, {"device": "cuda", "dtype": "float32"}) == ((), ["device cuda, not cpu"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "minilm", "engine": "embed"}, "is of embed 'minilm', but the model is generate 'smollm2'"),
        ({"cost_ns": [1, 2]}, "cost_ns.2: Field required"),
        ({"cost_ns": [-1, 2, 3]}, "greater than or equal to 0"),
        ({"speed": 1}, "speed: Extra inputs are not permitted"),
        ({"headway_profile": 2}, "headway_profile: Input should be 1"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = profile(tmp_path / "p.yaml", **changes)
    with pytest.raises(ConfigError, match=words):
        config.load(flags={"profile": path})
    with pytest.raises(CannotLoad, match=words):
        make_engine(ModelSpec(model="smollm2", profile=path))


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        config.load(flags={"profile": str(tmp_path / "nowhere.yaml")})
    (tmp_path / "bad.yaml").write_text("[")
    with pytest.raises(ProfileError, match="is not valid YAML"):
        read_profile(str(tmp_path / "bad.yaml"))


# ---------------------------------------------------------------- the whole of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("torch")
    from tests import torch_models

    path = tmp_path_factory.mktemp("tune") / "tiny"
    torch_models.model("llama").save_pretrained(path)
    return str(path)


def test_a_tiny_model_is_tuned_and_its_worker_starts_from_the_profile(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "tiny.yaml"
    command = ["tune", folder, "--lengths", "8,64", "--batch-max", "8", "--kv-mib", "4", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["recommended"]["max_num_seqs"] in (1, 2, 4, 8)
    assert set(told["measured"]) == {"8", "64"}
    assert any(reason.startswith("measuring ended") for reason in told["reasons"])
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert lines[0]["about"]["kind"] == "generate"
    assert all(len(line["found"]["steps"]) >= 8 for line in lines[1:] if line["ended"] == "ok")

    spec = ModelSpec(model=folder, kv_mib=4, profile=str(out))
    engine = make_engine(spec)
    log = logging.LoggerAdapter(logging.getLogger("test"), {})
    card = card_of(engine, spec, log)
    assert card.max_num_seqs == told["recommended"]["max_num_seqs"]
    assert list(card.prior_ns) == told["cost_ns"]
    values = yaml.safe_load(out.read_text())
    values["facts"]["device"] = "some other one"
    out.write_text(yaml.safe_dump(values))
    assert card_of(engine, spec, log).prior_ns == engine.card.prior_ns
    assert "was measured elsewhere and is not used: device" in caplog.text
    engine.close()


def test_interrupted_it_makes_a_profile_of_what_was_measured(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "part.yaml"
    record = out.with_suffix(".jsonl")
    lengths = ["--lengths", "8,16,24,32,48,64,96,128", "--budget-s", "600"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "tune", folder, *lengths, "--out", str(out)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # whoever runs the tests may not
    )
    while not record.exists() or record.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 130, shown
    assert read_profile(str(out)).reasons[-1 if "quiet" not in shown else -2] == "measuring ended: it was interrupted"
    assert "the profile" in shown


def test_an_engine_that_is_killed_is_started_again_and_the_walk_goes_on(folder: str) -> None:
    from headway.bench.tune.measure import Probe

    probe = Probe(ModelSpec(model=folder, kv_mib=4))
    pids = [probe.pid]

    def wrote(one: Tried) -> None:
        if one.requests == 2 and len(pids) == 1:  # it dies while nothing runs, and is found out by the next job
            os.kill(probe.pid, signal.SIGKILL)
            pids.append(0)

    try:
        walk = Walk(probe, budget_s=1e6, batch_max=4, seed=0, wrote=wrote)
        walk.run([8, 20])
        assert [(one.requests, one.tokens, one.ended) for one in walk.tried][:4] == [
            (1, 8, "ok"),
            (1, 20, "ok"),
            (2, 8, "ok"),
            (2, 20, "died"),
        ]
        assert walk.tried[-1].ended == "ok"
        assert probe.pid != pids[0]
        assert "exit code -9" in walk.tried[3].message
    finally:
        probe.close()


def test_what_cannot_be_tuned_is_said(tmp_path: Path) -> None:
    for command, words in (
        (["tune", "--engine", "echo"], "engine 'echo' cannot be tuned"),
        (["tune", "--lengths", "a"], "is not a list of numbers"),
        (["tune", "--lengths", "0"], "lengths of at least 1 token"),
        (["tune", "--out", str(tmp_path / "no" / "p.yaml")], "there is no folder"),
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.split())


def test_a_machine_that_is_not_quiet_is_noticed() -> None:
    class Uneven(Planted):
        def run(self, job: Job) -> Found:
            (one,) = super().run(job).batches
            return Found([(one[0], one[1], one[2] * (1 + len(self.jobs) // 12 % 2))])

    walk = walked(Uneven(), [64], batch_max=8)
    assert fit.unrest(walk.tried) > 0.15
    profile = fit.profile_from(
        ModelSpec(model="m", engine="embed"), ABOUT, walk.tried, ended_by="x", took_ms_max=None, seed=0
    )
    assert "the machine was not quiet" in profile.reasons[-1]
