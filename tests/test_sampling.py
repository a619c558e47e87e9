"""Choosing tokens: what each parameter means, and that a row is chosen by itself."""

import pytest

torch = pytest.importorskip("torch")

from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import sampling  # noqa: E402
from headway.workers.generate.sampling import Choice, choice_of, choose, uniform  # noqa: E402

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def drawn(params: Params, logits: torch.Tensor = LOGITS, count: int = 2000) -> list[float]:
    """The share of each token over `count` draws of one request."""
    choice = choice_of(params, 7)
    tokens = [choose(logits[None], [choice], [index])[0] for index in range(count)]
    return [tokens.count(token) / count for token in range(logits.shape[0])]


def test_draws_are_a_function_of_seed_and_index() -> None:
    draws = [uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(draws)) == len(draws)
    assert min(draws) >= 0.0
    assert max(draws) < 1.0
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02
    assert uniform(3, 4) == uniform(3, 4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_follows_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0).tolist()
    assert drawn(Params(temperature=temperature)) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_the_k_likeliest() -> None:
    kept = LOGITS[[1, 3]].softmax(0).tolist()
    assert drawn(Params(temperature=1.0, top_k=2)) == pytest.approx([0, kept[0], 0, kept[1], 0], abs=0.03)
    assert drawn(Params(temperature=1.0, top_k=1)) == [0, 1, 0, 0, 0]
    assert drawn(Params(temperature=1.0, top_k=99)) == drawn(Params(temperature=1.0))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    kept = LOGITS[[1, 3]].softmax(0).tolist()  # 0.64 and 0.23: 0.64 does not reach 0.8, both do
    assert drawn(Params(temperature=1.0, top_p=0.8)) == pytest.approx([0, kept[0], 0, kept[1], 0], abs=0.03)
    assert drawn(Params(temperature=1.0, top_p=0.5)) == [0, 1, 0, 0, 0]


def test_a_flat_row_is_ranked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first candidates do not reach top_p, the answer is that of ranking everything at once."""
    torch.manual_seed(0)
    logits = torch.randn(3000) * 0.1
    params = Params(temperature=1.0, top_p=0.9)
    few = [choose(logits[None], [choice_of(params, 7)], [index])[0] for index in range(200)]
    monkeypatch.setattr(sampling, "CANDIDATES", 3000)
    assert few == [choose(logits[None], [choice_of(params, 7)], [index])[0] for index in range(200)]
    assert len(set(few)) > 150


def test_bias_comes_before_everything_else() -> None:
    assert choose(LOGITS[None], [choice_of(Params(logit_bias={4: 5.0}), 0)], [0]) == [4]
    shares = drawn(Params(temperature=1.0, top_k=2, logit_bias={1: -1000.0}))
    assert shares[1] == 0
    assert shares[2] + shares[3] == 1


def test_neighbours_do_not_matter() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 5000)
    choices = [
        Choice(0.0, 0, 1.0, 0, ()),
        Choice(1.0, 0, 1.0, 1, ()),
        Choice(0.7, 40, 1.0, 2, ()),
        Choice(1.0, 0, 0.9, 3, ()),
        Choice(1.5, 2000, 0.95, 4, ((17, 3.0),)),
        Choice(0.0, 0, 1.0, 5, ((18, 30.0),)),
    ]
    together = choose(logits, choices, range(6))
    alone = [choose(logits[at : at + 1], choices[at : at + 1], [at])[0] for at in range(6)]
    assert together == alone
    assert together[5] == 18


def test_rows_that_are_not_finite_choose_nothing() -> None:
    logits = LOGITS.repeat(5, 1)
    logits[1, 0], logits[2, 4] = float("nan"), float("inf")
    logits[3] = float("-inf")
    logits[4, 0] = float("-inf")  # one token masked is a model's right
    for params in (Params(), Params(temperature=1.0, seed=1)):
        tokens = choose(logits, [choice_of(params, 0)] * 5, [0] * 5)
        assert [token is None for token in tokens] == [False, True, True, True, False]


def test_the_coldest_temperature_is_greedy_and_finite() -> None:
    assert drawn(Params(temperature=1e-30), count=20) == [0, 1, 0, 0, 0]
    assert choose(LOGITS[None] * 1e30, [choice_of(Params(temperature=0.1), 0)], [0]) == [1]


def test_half_precision_logits_are_widened() -> None:
    tokens = choose(LOGITS[None].bfloat16(), [choice_of(Params(temperature=1.0, seed=3), 0)], [0])
    assert tokens == choose(LOGITS[None], [choice_of(Params(temperature=1.0, seed=3), 0)], [0])
