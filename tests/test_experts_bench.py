"""What expert-aware scheduling is worth: planted models everywhere, recorded routings where they are."""

import functools
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from headway.bench.experts import composition, guards, joining, overload, prediction, study  # noqa: E402
from headway.bench.experts.routings import Routings, recorded, routed, stream  # noqa: E402

RECORDED = next((p / "shared/traces/moe" for p in Path(__file__).parents if (p / "shared/traces/moe").is_dir()), None)
needs_recordings = pytest.mark.skipif(RECORDED is None, reason="shared/traces/moe is not there")


@functools.cache
def planted() -> Routings:
    pytest.importorskip("transformers")
    from headway.bench.experts.planted import planted_routings

    return planted_routings("qwen3_moe", num_hidden_layers=2)


@functools.cache
def made() -> Routings:
    """Routings by rule: a token's experts are its topic's, so that no model is needed."""
    rng = np.random.default_rng(0)

    def one() -> object:
        topic, length = int(rng.integers(8)), int(rng.integers(30, 120))
        ids = rng.integers(0, 60, length) * 8 + np.where(rng.random(length) < 0.7, topic, rng.integers(0, 8, length))
        first = ids % 8 * 2
        return routed(ids, np.stack([np.stack([first, first + 1], 1)] * 2, 1), 16, topic)

    requests = [one() for _ in range(500)]
    return Routings("made", requests[:350], requests[350:], 8)  # type: ignore[arg-type]


@functools.cache
def recording() -> Routings:
    assert RECORDED is not None
    return recorded(RECORDED / f"{study.MAIN}.npz")


@pytest.mark.models
def test_planted_models_can_be_predicted() -> None:
    scores = {one.name: one.r2 for one in prediction.compare(planted(), 8, [350], held_out=150)}
    assert scores["ours"] >= 0.95
    assert scores["oracle"] == 1.0


@pytest.mark.models
def test_planted_models_are_balanced() -> None:
    placement = planted().placement(8)
    predictor = composition.learned(planted().train, placement)
    runs = composition.compare(stream(planted().test, 800, burst=16, seed=0), placement, predictor, 16)
    assert runs["ours"].step_over(runs["fifo"]) < -0.15
    assert runs["ours"].imbalance < 1.1 * runs["oracle"].imbalance


@needs_recordings
def test_recorded_routings_are_predicted_better_than_by_tables() -> None:
    last = len(recording().train)
    at = {(one.name, one.requests): one.r2 for one in prediction.compare(recording(), 8, [200, last])}
    assert at["ours", last] >= 0.85
    assert at["ours", 200] >= 0.65
    assert at["ours", last] - at["token table", last] >= 0.08
    assert at["ours", last] - at["tenant mean", last] >= 0.6


@needs_recordings
@pytest.mark.parametrize(("burst", "most"), [(16, -0.20), (1, -0.09)])
def test_recorded_routings_are_balanced(burst: int, most: float) -> None:
    placement = recording().placement(8)
    predictor = composition.learned(recording().train, placement)
    runs = composition.compare(stream(recording().test, 1600, burst=burst, seed=0), placement, predictor, 16)
    assert runs["ours"].step_over(runs["fifo"]) <= most
    assert runs["ours"].step_over(runs["oracle"]) < 0.03
    assert runs["ours"].wait_max <= 17


@needs_recordings
def test_a_poisoning_tenant_costs_others_little() -> None:
    clean = guards.poisoned(recording(), 8, how="none", seed=0)
    for how in ("steady", "random", "rotating"):
        assert clean - guards.poisoned(recording(), 8, how=how, seed=0) <= 0.05, how
    assert guards.newcomer(recording(), 8, overload.HOT_DOMAIN) > 0.85


@needs_recordings
def test_devices_that_changed_places_in_silence_are_learned_anew() -> None:
    assert guards.exchanged(recording(), 8) > 0.7


@needs_recordings
def test_another_revision_keeps_what_was_learned() -> None:
    _, forgot = guards.swapped(recording(), 8, renewed=False)
    before, after = guards.swapped(recording(), 8, renewed=True)
    assert after > 0.85 * before
    assert after > forgot


@needs_recordings
def test_overload_brings_more_in_time_and_shields_others_from_a_hot_tenant() -> None:
    """Two thirds of all requests are of one tenant, twice as many as could be served first come, first served."""
    scenario, _ = study.scenarios(3000)["2x, one tenant 67%, runs of 16"]
    found = overload.simulate(recording(), scenario, (overload.FIFO, overload.COMPOSED, overload.OURS), 0)
    fifo, blind, ours = (found[one.name] for one in (overload.FIFO, overload.COMPOSED, overload.OURS))
    hot = overload.HOT
    others = np.mean([value for name, value in ours.success.items() if name != hot])
    assert others >= 0.75
    assert ours.success[hot] >= 0.8 * blind.success[hot]
    assert ours.tokens >= blind.tokens > fifo.tokens


def test_overload_of_what_is_known_by_rule() -> None:
    """The closed loop without a recording: more in time than blind, few late; off where nothing can be predicted."""
    two = (overload.FIFO, overload.OURS)
    found = overload.simulate(made(), overload.Scenario(1.3, requests=2500), two, 0)
    fifo, ours = found[overload.FIFO.name], found[overload.OURS.name]
    assert ours.tokens > 1.08 * fifo.tokens
    assert (ours.late, ours.worst) <= (0.005, 1.05)
    assert ours.off_after > 2000


@pytest.mark.parametrize("control", ["unpredictable", "flat"])
def test_it_is_off_where_it_brings_nothing(control: str) -> None:
    scenario = overload.Scenario(1.3, requests=1200, **{control: True})
    found = overload.simulate(made(), scenario, (overload.FIFO, overload.OURS), 0)
    fifo, ours = found[overload.FIFO.name], found[overload.OURS.name]
    assert (ours.composed, ours.off_after) == (0.0, 0)
    assert ours.tokens == pytest.approx(fifo.tokens, rel=0.01)


def test_one_late_bound_queue_over_four_workers() -> None:
    scenario = overload.Scenario(1.05, workers=4, requests=6000)
    found = overload.simulate(made(), scenario, (overload.FIFO_OPEN, study.CENTRAL), 0)
    assert found[study.CENTRAL.name].p99 <= 0.5 * found[overload.FIFO_OPEN.name].p99


def test_joining_a_running_batch() -> None:
    placement = made().placement(8)
    predictor = composition.learned(made().train, placement)
    texts = stream(made().test, 400, burst=16, seed=0)
    fifo, ours = (joining.run(policy, texts, placement, predictor, 16).imbalance for policy in ("fifo", "ours"))
    assert ours < 0.95 * fifo


@pytest.mark.models
def test_the_study_runs_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a small recording of a planted model, written as the real ones are."""
    pytest.importorskip("matplotlib")
    stored = {}
    for split, requests in (("train", planted().train[:220]), ("test", planted().test)):
        for domain in range(8):
            own = [one for one in requests if one.domain == domain]
            stored[f"{split}_{domain}_ids"] = np.concatenate([one.ids for one in own]).astype(np.uint16)
            stored[f"{split}_{domain}_idx"] = np.concatenate([one.indices for one in own]).astype(np.uint8)
            stored[f"{split}_{domain}_len"] = np.array([one.tokens for one in own], np.int32)
    np.savez(tmp_path / "small.npz", **stored)
    out = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert study.main(["--recorded", str(tmp_path), "--seeds", "1", "--requests", "150", "--bursts", "16", *out]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b'"name": "small"' in (tmp_path / "a.json").read_bytes()
    assert "held-out R2" in capsys.readouterr().out
