"""The predictor of expert loads: what it learns, what an odd tenant can do to it, and what it may cost in memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policies.experts import predictor as predictor_module
from headway.policies.experts.arrays import Loads, critical, imbalance
from headway.policies.experts.placement import Placement, contiguous, from_slots, packed
from headway.policies.experts.predictor import (
    MEMORY_BYTES_MAX,
    SETTLED,
    TENANTS_MAX,
    Predictor,
    Prompt,
    prompt_of,
)

LAYERS, DEVICES, TOPICS = 2, 4, 4


def document(rng: np.random.Generator, topic: int) -> tuple[Prompt, Loads]:
    """A prompt mostly of one topic's tokens, each of which goes to its topic's device in every layer."""
    length = int(rng.integers(20, 80))
    ids = rng.integers(0, 50, length) * TOPICS + np.where(rng.random(length) < 0.8, topic, rng.integers(0, TOPICS))
    counts = np.bincount(ids % TOPICS, minlength=DEVICES).astype(np.float32)
    return prompt_of(ids), np.stack([counts] * LAYERS)


def taught(reports: int, *, seed: int = 0, hostile: float = 0.0, rotating: bool = False) -> Predictor:
    """A predictor that has seen documents of honest tenants; a share of reports is of one who always hits device 0."""
    rng = np.random.default_rng(seed)
    predictor = Predictor(LAYERS, DEVICES)
    for at in range(reports):
        prompt, load = document(rng, int(rng.integers(TOPICS)))
        if rng.random() < hostile:
            load = np.zeros_like(load)
            load[:, 0] = prompt.tokens
            predictor.learn(prompt, load, f"hostile-{at}" if rotating else "hostile")
        else:
            predictor.learn(prompt, load, f"honest-{at % 5}")
    return predictor


def score(predictor: Predictor, tenant: str = "honest-0") -> float:
    """R2 on held-out documents of an honest tenant."""
    rng = np.random.default_rng(99)
    held = [document(rng, at % TOPICS) for at in range(80)]
    missed = sum(float(np.square(predictor.predict(prompt, tenant) - load).sum()) for prompt, load in held)
    spread = sum(float(np.square(load - load.mean(1, keepdims=True)).sum()) for _, load in held)
    return 1.0 - missed / spread


def test_it_learns_which_tokens_go_where() -> None:
    assert score(taught(0)) <= 0.0
    assert score(taught(60)) > 0.6
    well = taught(400)
    assert score(well) > 0.95
    assert well.r2 > 0.9
    assert repr(well) == f"<Predictor 2 x 4, 400 reports, R2 {well.r2:.2f}>"


def test_loads_that_are_not_in_the_tokens_are_not_believed() -> None:
    rng = np.random.default_rng(0)
    predictor = Predictor(LAYERS, DEVICES)
    for _ in range(400):
        prompt, load = document(rng, int(rng.integers(TOPICS)))
        predictor.learn(prompt, rng.permuted(load, axis=1))
    assert predictor.r2 < 0.1


@pytest.mark.parametrize("rotating", [False, True])
def test_a_poisoning_tenant_costs_others_little(rotating: bool) -> None:
    assert score(taught(600)) - score(taught(600, hostile=0.1, rotating=rotating)) <= 0.05


def test_a_tenant_whose_load_is_its_own_is_known_by_itself() -> None:
    predictor = taught(600, hostile=0.1)
    prompt, _ = document(np.random.default_rng(5), 2)
    honest, hostile = predictor.predict(prompt, "honest-0"), predictor.predict(prompt, "hostile")
    assert honest[0, 0] / honest[0].sum() < 0.4
    assert hostile[0, 0] / hostile[0].sum() > 0.7


def test_a_newcomer_whose_tokens_nobody_knew_is_learned_from() -> None:
    predictor, rng = taught(500), np.random.default_rng(4)
    news = []
    for _ in range(160):
        ids = rng.integers(1_000, 1_030, 40) * TOPICS
        counts = np.bincount((ids // TOPICS) % 2 + 2, minlength=DEVICES).astype(np.float32)
        news.append((prompt_of(ids), np.stack([counts] * LAYERS)))
        predictor.learn(*news[-1], "newcomer")
        predictor.learn(*document(rng, int(rng.integers(TOPICS))), "honest-0")
    missed = [float(np.abs(predictor.predict(prompt, "somebody") - load).sum() / load.sum()) for prompt, load in news]
    assert np.mean(missed) < 0.3
    assert score(predictor) > 0.95


def test_another_revision_is_learned_faster_than_by_chance() -> None:
    def after(renewed: bool) -> float:
        predictor = taught(500)
        if renewed:
            predictor.renew()
        rng = np.random.default_rng(8)
        for _ in range(60):
            prompt, load = document(rng, int(rng.integers(TOPICS)))
            predictor.learn(prompt, 0.5 * load + 0.5 * np.roll(load, 1, axis=1))
        held = [document(rng, at % TOPICS) for at in range(60)]
        return sum(
            float(np.square(predictor.predict(prompt) - 0.5 * (load + np.roll(load, 1, axis=1))).sum())
            for prompt, load in held
        )

    assert after(renewed=True) < 0.7 * after(renewed=False)


def test_a_change_that_nobody_announced_is_noticed() -> None:
    predictor = taught(400)
    rng = np.random.default_rng(8)
    for _ in range(120):
        prompt, load = document(rng, int(rng.integers(TOPICS)))
        predictor.learn(prompt, np.roll(load, 2, axis=1), f"honest-{rng.integers(5)}")
    assert predictor.changes >= 1


def exchanged(reports: int) -> Predictor:
    """One who knew the model well, until devices changed places in silence."""
    predictor, rng = taught(400), np.random.default_rng(8)
    for _ in range(reports):
        prompt, load = document(rng, int(rng.integers(TOPICS)))
        predictor.learn(prompt, np.roll(load, 1, axis=1), f"honest-{rng.integers(5)}")
    return predictor


def missed(predictor: Predictor) -> float:
    """Squared errors on held-out documents after the exchange."""
    rng = np.random.default_rng(99)
    held = [document(rng, at % TOPICS) for at in range(80)]
    return sum(float(np.square(predictor.predict(prompt) - np.roll(load, 1, axis=1)).sum()) for prompt, load in held)


def test_what_predicts_worse_than_the_mean_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known of devices that changed places is no help: without it the new places are learned sooner."""
    monkeypatch.setattr(predictor_module, "STRANGE_RATE", 0.0)  # surprise alone does not say it
    found = exchanged(110)
    assert found.changes == 1
    monkeypatch.setattr(predictor_module, "WORSE_MAX", 1.0)
    kept = exchanged(110)
    assert kept.changes == 0
    assert missed(found) < 0.5 * missed(kept)


def test_nothing_is_forgotten_without_a_change() -> None:
    """Not for a hostile tenant, not for one topic after another, and not where nothing was ever predicted."""
    assert taught(600, hostile=0.1).changes == taught(600, hostile=0.1, rotating=True).changes == 0
    rng, runs, random = np.random.default_rng(6), Predictor(LAYERS, DEVICES), Predictor(LAYERS, DEVICES)
    for at in range(640):
        prompt, load = document(rng, at // 16 % TOPICS)
        runs.learn(prompt, load, "honest")
        random.learn(prompt, rng.permuted(load, axis=1), "honest")
    assert runs.changes == random.changes == 0


def test_memory_is_bounded_whatever_arrives() -> None:
    wide = Predictor(8, 512)
    assert wide.rows < 32768
    assert wide.rows & (wide.rows - 1) == 0
    predictor = Predictor(1, 2)
    prompt = predictor.prompt([1, 2, 3])
    for at in range(SETTLED + TENANTS_MAX + 50):
        predictor.learn(prompt, np.array([[2.0, 1.0]], np.float32), f"tenant-{at}")
    assert max(wide.memory_bytes, predictor.memory_bytes) <= MEMORY_BYTES_MAX
    assert len(predictor._tenants) == TENANTS_MAX


def test_rows_that_do_not_belong_are_refused() -> None:
    predictor = Predictor(1, 2, rows=64)
    prompt = prompt_of([1, 2, 3], 128)
    with pytest.raises(ValueError, match="counted in 128 rows"):
        predictor.predict(prompt)
    with pytest.raises(ValueError, match="counted in 128 rows"):
        predictor.learn(prompt, np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="1 x 2 counts"):
        predictor.learn(predictor.prompt([1]), np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="power of two"):
        Predictor(1, 2, rows=100)
    with pytest.raises(ValueError, match="layers and groups"):
        Predictor(0, 2)


prompts = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(prompts, st.lists(st.integers(0, 4_000), min_size=6, max_size=6), st.text(max_size=3))))
def test_whatever_is_reported_predictions_stay_finite_and_positive(
    reports: list[tuple[list[int], list[int], str]],
) -> None:
    predictor = Predictor(2, 3, rows=128)
    for ids, counts, tenant in reports * (2 if len(reports) > 10 else 1):
        prompt = predictor.prompt(ids)
        predictor.learn(prompt, np.array(counts, np.float32).reshape(2, 3), tenant)
        load = predictor.predict(prompt, tenant)
        assert np.isfinite(load).all()
        assert (load >= 0).all()
        assert 0.0 <= predictor.uncertainty(prompt) <= 1.1


@given(prompts)
def test_a_prompt_is_its_counts(ids: list[int]) -> None:
    prompt = prompt_of(ids)
    assert prompt.tokens == len(ids) == prompt.counts.sum()
    again = prompt_of(list(reversed(ids)))
    assert (again.rows == prompt.rows).all()
    assert (again.counts == prompt.counts).all()


# ---------------------------------------------------------------- placements


def test_replicas_share_an_expert() -> None:
    placement = from_slots([[0, 1, 0, 2]], experts=3, devices=2, revision=4)
    assert placement.share[0].tolist() == [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]
    assert placement.project(np.array([[4.0, 1.0, 2.0]])).tolist() == [[3.0, 4.0]]
    assert repr(placement) == "<Placement 4: 1 x 3 experts on 2 devices>"


def test_packing_is_more_even_than_equal_runs() -> None:
    load = np.array([[8.0, 7.0, 6.0, 5.0, 1.0, 1.0, 1.0, 1.0]])
    assert imbalance(packed(load, 4).project(load)) < imbalance(contiguous(1, 8, 4).project(load))
    assert critical(packed(load, 4).project(load)) == 9.0
    assert (packed(load, 4).share.sum(1) == 2).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: from_slots([[0, 1, 2]], 3, 2), "do not divide into 2 devices"),
        (lambda: from_slots([[0, 1, 0, 1]], 3, 2), "expert 2 of layer 0 is on no device"),
        (lambda: from_slots([[0, 9]], 2, 2), "outside 0..1"),
        (lambda: packed(np.ones((1, 3)), 2), "do not divide"),
        (lambda: Placement(np.ones((1, 2), np.float32)), "three axes"),
        (lambda: Placement(np.ones((1, 2, 2), np.float32)), "sum to 1"),
        (lambda: Placement(np.zeros((1, 0, 2), np.float32)), "up to 4096 experts"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words):
        make()
