"""Choosing tokens: what each parameter means, by Transformers' own processors, and that a row is chosen by itself."""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.link import unpack_logprobs  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import sampling  # noqa: E402
from headway.workers.generate.history import History  # noqa: E402
from headway.workers.generate.sampling import Choice, Pick, choice_of, choose, uniform  # noqa: E402

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
INPUT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@dataclasses.dataclass
class Row:
    """What `choose` sees of a request."""

    choice: Choice
    tokens: list[int] = dataclasses.field(default_factory=lambda: [0])
    input_tokens: int = 1
    history: History = dataclasses.field(default_factory=History)


def row(params: Params, tokens: Sequence[int] = (), *, seed: int = 7, stops: Sequence[int] = ()) -> Row:
    """A request with INPUT that has put out `tokens`."""
    return Row(choice_of(params, seed, frozenset(stops)), [*INPUT, *tokens], len(INPUT))


def picked(logits: Any, rows: Sequence[Row]) -> list[int]:
    picks = choose(logits, rows)
    assert all(picks)
    return [pick.token for pick in picks if pick]


def drawn(params: Params, logits: Any = LOGITS, count: int = 2000) -> list[float]:
    """The share of each token over `count` draws of one request."""
    request = Row(choice_of(params, 7))
    counts = [0] * logits.shape[0]
    for _ in range(count):
        [token] = picked(logits[None], [request])
        counts[token] += 1
        request.tokens.append(0)
    return [seen / count for seen in counts]


def test_draws_are_a_function_of_seed_and_index() -> None:
    draws = [uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(draws)) == len(draws)
    assert min(draws) >= 0.0
    assert max(draws) < 1.0
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02
    assert uniform(3, 4) == uniform(3, 4)


# ---------------------------------------------------------------- the distribution, by Transformers


def processed(params: Params, scores: Any, tokens: Sequence[int]) -> Any:
    """The probabilities [vocabulary] that Transformers samples from, after the same text."""
    p = transformers.generation.logits_process
    made: list[Any] = []
    if params.logit_bias:
        made.append(p.SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty is not None:
        made.append(p.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        made.append(p.MinNewTokensLengthLogitsProcessor(len(INPUT), params.min_tokens, list(ENDS), device="cpu"))
    if params.temperature:
        made.append(p.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        made.append(p.TopKLogitsWarper(params.top_k))
    if params.top_p is not None:
        made.append(p.TopPLogitsWarper(params.top_p))
    if params.min_p is not None:
        made.append(p.MinPLogitsWarper(params.min_p))
    scores = scores[None].clone()
    ids = torch.tensor([tokens])
    for processor in made:
        scores = processor(ids, scores)
    return scores[0].double().softmax(-1)


ENDS = (2, 30)
CASES = {
    "temperature": Params(temperature=0.7),
    "hot": Params(temperature=2.5),
    "top_k": Params(temperature=1.0, top_k=7),
    "top_p": Params(temperature=1.0, top_p=0.8),
    "min_p": Params(temperature=1.0, min_p=0.1),
    "min_p and top_p": Params(temperature=1.3, top_p=0.9, min_p=0.08),
    "top_k and top_p": Params(temperature=0.8, top_k=12, top_p=0.7),
    "top_k, top_p and min_p": Params(temperature=1.5, top_k=20, top_p=0.95, min_p=0.2),
    "repetition": Params(temperature=1.0, repetition_penalty=1.7),
    "repetition under 1": Params(temperature=1.0, repetition_penalty=0.6, top_k=10),
    "bias, then repetition": Params(temperature=1.0, repetition_penalty=1.4, logit_bias={3: -4.0, 17: 2.5}),
    "min_tokens": Params(temperature=1.0, min_tokens=5, logit_bias={2: 5.0}),
    "everything": Params(
        temperature=1.2,
        top_k=25,
        top_p=0.97,
        min_p=0.02,
        repetition_penalty=1.3,
        min_tokens=4,
        logit_bias={30: 6.0, 8: 1.0},
    ),
}
DRAWS = 2000
ONCE_IN_A_MILLION = 4.753  # of a normal distribution


def chi_square_limit(degrees: int, z: float = ONCE_IN_A_MILLION) -> float:
    """What a chi-square statistic exceeds as rarely as a normal one exceeds z (Wilson and Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def counted(params: Params, scores: Any, output: Sequence[int]) -> list[int]:
    """How often each token is chosen by DRAWS requests that differ in their seeds."""
    counts = [0] * scores.shape[0]
    rows = [row(params, output, seed=seed, stops=ENDS) for seed in range(DRAWS)]
    for token in picked(scores.expand(DRAWS, -1), rows):
        counts[token] += 1
    return counts


def fits(counts: Sequence[int], expected: Any) -> bool:
    """Whether nothing is drawn that has no probability, and the rest as often as it should be (Pearson's test)."""
    wanted = (expected * DRAWS).tolist()
    if any(count and not mean for count, mean in zip(counts, wanted, strict=True)):
        return False
    often = [token for token, mean in enumerate(wanted) if mean >= 5]  # the test's own condition
    cells = [(counts[token], wanted[token]) for token in often]
    rest = DRAWS - sum(seen for seen, _ in cells), DRAWS - sum(mean for _, mean in cells)
    cells += [rest] if rest[1] >= 5 else []
    assert len(cells) > 1
    return sum((seen - mean) ** 2 / mean for seen, mean in cells) < chi_square_limit(len(cells) - 1)


@pytest.mark.parametrize("name", CASES)
def test_samples_follow_the_distribution_that_transformers_computes(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scores, output = torch.randn(40, generator=generator) * 2, [7, 7, 8]
    assert fits(counted(CASES[name], scores, output), processed(CASES[name], scores, [*INPUT, *output]))


def test_the_test_of_the_distribution_can_fail() -> None:
    assert chi_square_limit(30, 3.0902) == pytest.approx(59.703, abs=0.2)  # as in tables, for 1 in 1000
    scores = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    counts = counted(Params(temperature=1.0), scores, [])
    assert fits(counts, processed(Params(temperature=1.0), scores, INPUT))
    assert not fits(counts, processed(Params(temperature=1.2), scores, INPUT))
    assert not fits(counts, processed(Params(temperature=1.0, min_p=0.05), scores, INPUT))
    assert not fits(counts, processed(Params(temperature=1.0, repetition_penalty=1.2), scores, INPUT))


def test_greedy_tokens_are_the_likeliest_that_transformers_leaves() -> None:
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        params = Params(
            repetition_penalty=rng.choice([None, 0.5, 1.2, 3.0]),
            min_tokens=rng.choice([0, 2, 6]),
            logit_bias={rng.randrange(40): rng.uniform(-5, 5) for _ in range(rng.randrange(3))},
        )
        output = [rng.randrange(40) for _ in range(rng.randrange(5))]
        scores = torch.randn(40, generator=generator) * 3
        assert picked(scores[None], [row(params, output, stops=ENDS)]) == [
            int(processed(params, scores, [*INPUT, *output]).argmax())
        ]


# ---------------------------------------------------------------- penalties of the output


def test_presence_and_frequency_count_the_output_alone() -> None:
    """As the OpenAI API defines them: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(40, generator=generator)
    output = [7, 7, 7, 8, 3]
    for frequency, presence in ((0.5, 0.0), (0.0, 1.5), (-0.7, 0.9), (2.0, 2.0)):
        expected = scores.clone()
        for token in range(40):
            count = output.count(token)
            expected[token] -= count * frequency + (count > 0) * presence
        params = Params(frequency_penalty=frequency, presence_penalty=presence)
        made = sampling._shaped(scores[None], [row(params, output)])[0]
        assert torch.allclose(made, expected)
        assert torch.equal(sampling._shaped(scores[None], [row(params)])[0], scores)  # INPUT does not count


def test_a_history_follows_its_text_token_by_token() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(30) for _ in range(200)]
    params = Params(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=-0.1)
    grown = row(params)
    generator = torch.Generator().manual_seed(2)
    for at in range(len(tokens)):
        scores = torch.randn(1, 40, generator=generator)
        anew = row(params, tokens[:at])
        grown.tokens = [*INPUT, *tokens[:at]]
        assert torch.equal(sampling._shaped(scores, [grown]), sampling._shaped(scores, [anew]))
    assert repr(grown.history) == f"<History 30 of {len(INPUT) + 199} tokens>"


# ---------------------------------------------------------------- edges


def test_top_k_keeps_exactly_k() -> None:
    assert drawn(Params(temperature=1.0, top_k=1)) == [0, 1, 0, 0, 0]
    assert drawn(Params(temperature=1.0, top_k=99)) == drawn(Params(temperature=1.0, top_k=5))
    even = drawn(Params(temperature=1.0, top_k=2), torch.zeros(5))
    assert sum(share > 0 for share in even) == 2


@pytest.mark.parametrize("params", [Params(temperature=1.0, top_p=0.9), Params(temperature=1.0, top_k=1500)])
def test_a_flat_row_is_ranked_as_a_whole(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first candidates are not enough, the answer is that of ranking everything at once."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 0.1
    rows = [row(params, seed=seed) for seed in range(200)]
    few = picked(logits.expand(200, -1), rows)
    monkeypatch.setattr(sampling, "MANY", 3000)
    assert few == picked(logits.expand(200, -1), rows)
    assert len(set(few)) > 150


def test_end_tokens_are_muted_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    params = Params(min_tokens=2)
    tokens = [picked(logits, [row(params, [0] * count, stops=[1])])[0] for count in range(4)]
    assert tokens == [2, 2, 1, 1]
    assert picked(logits, [row(params, stops=[0, 1, 2])])[0] in (0, 1, 2)  # all muted: one of them all the same


def test_bias_comes_before_everything_else() -> None:
    assert picked(LOGITS[None], [row(Params(logit_bias={4: 5.0}))]) == [4]
    shares = drawn(Params(temperature=1.0, top_k=2, logit_bias={1: -1000.0}))
    assert shares[1] == 0
    assert shares[2] + shares[3] == 1


def test_rows_that_are_not_finite_choose_nothing() -> None:
    logits = LOGITS.repeat(5, 1)
    logits[1, 0], logits[2, 4] = float("nan"), float("inf")
    logits[3] = float("-inf")
    logits[4, 0] = float("-inf")  # one token masked is a model's right
    for params in (Params(), Params(temperature=1.0, seed=1), Params(repetition_penalty=1.1, logprobs=2)):
        picks = choose(logits, [Row(choice_of(params, 7)) for _ in range(5)])
        assert [pick is None for pick in picks] == [False, True, True, True, False]


def test_the_coldest_temperature_is_greedy_and_finite() -> None:
    for temperature in (1e-30, 1e-300, 5e-324):
        assert drawn(Params(temperature=temperature), count=20) == [0, 1, 0, 0, 0]
    assert picked(LOGITS[None] * 1e30, [row(Params(temperature=0.1))]) == [1]


def test_half_precision_logits_are_widened() -> None:
    params = Params(temperature=1.0, seed=3)
    assert picked(LOGITS[None].bfloat16(), [row(params)]) == picked(LOGITS[None], [row(params)])


# ---------------------------------------------------------------- company


def mixed(count: int, vocabulary: int, seed: int) -> list[Row]:
    """Requests with every parameter, alone and together."""
    rng = random.Random(seed)

    def some(*values: Any) -> Any:
        return rng.choice([None, *values])

    def one() -> Row:
        params = Params(
            temperature=some(0.0, 0.7, 1.0, 1.5),
            top_k=some(1, 40, 2000),
            top_p=some(0.5, 0.9, 0.999),
            min_p=some(0.05, 0.5),
            repetition_penalty=some(1.3, 0.8),
            presence_penalty=some(1.0) or 0.0,
            frequency_penalty=some(0.3) or 0.0,
            min_tokens=some(5) or 0,
            logit_bias={rng.randrange(vocabulary): 3.0} if rng.random() < 0.3 else {},
            logprobs=some(0, 3, 20),
            seed=some(42),
        )
        output = [rng.randrange(vocabulary) for _ in range(rng.randrange(9))]
        return row(params, output, seed=rng.getrandbits(63), stops=[2, 3])

    return [one() for _ in range(count)]


@pytest.mark.parametrize("vocabulary", [40, 5003])
def test_neighbours_do_not_matter(vocabulary: int) -> None:
    """To the last bit: also ties, which half precision is full of, and logprobs."""
    rows = mixed(48, vocabulary, vocabulary)
    logits = torch.randn(48, vocabulary, generator=torch.Generator().manual_seed(1)).mul(3).bfloat16()
    before = logits.clone()
    together = choose(logits, rows)
    assert together == [choose(logits[at : at + 1], [rows[at]])[0] for at in range(48)]
    assert together[::-1] == choose(logits.flip(0), rows[::-1])
    assert torch.equal(logits, before)


def test_rows_stacked_as_on_a_gpu_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed(48, 5003, 6)
    logits = torch.randn(48, 5003, generator=torch.Generator().manual_seed(6)) * 3
    alone = choose(logits, rows)
    monkeypatch.setattr(sampling, "_parts", lambda group, _: [group] if group else [])
    stacked = choose(logits, rows)
    assert [pick and pick.token for pick in stacked] == [pick and pick.token for pick in alone]


def test_plain_rows_are_only_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy row without wishes costs no more than the largest logit, whoever is beside it."""
    seen: list[int] = []
    pick = sampling._pick
    monkeypatch.setattr(sampling, "_pick", lambda *given: seen.append(len(given[-1])) or pick(*given))
    plain = [row(Params(seed=1, top_p=0.5, ignore_eos=True, stop=["x"]), [1, 2], stops=[3]) for _ in range(3)]
    assert choose(LOGITS.expand(3, -1), plain) == [Pick(1)] * 3
    assert seen == []
    choose(LOGITS.expand(4, -1), [*plain, row(Params(temperature=1.0))])
    assert seen == [1]


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties and temperature; the chosen token's, and the likeliest."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(4))
    odds = logits[0].log_softmax(0)
    order = odds.argsort(descending=True).tolist()
    last = order[-1]
    for params in (
        Params(logprobs=3),
        Params(logprobs=3, logit_bias={last: 50.0}),
        Params(logprobs=3, logit_bias={last: 50.0}, temperature=0.3, repetition_penalty=1.5, top_k=4),
    ):
        [pick] = choose(logits, [row(params)])
        assert pick
        assert pick.logprobs
        assert pick.token == (last if params.logit_bias else order[0])
        chosen, top_ids, top = unpack_logprobs(pick.logprobs, 1)
        assert chosen == pytest.approx([float(odds[pick.token])])
        assert top_ids == [order[:3]]
        assert top == [pytest.approx(odds[order[:3]].tolist())]


def test_logprobs_of_none_of_few_and_of_a_small_vocabulary() -> None:
    rows = [row(Params()), row(Params(logprobs=0)), row(Params(logprobs=20))]
    none, few, all_of_them = choose(LOGITS.expand(3, -1), rows)
    assert none == Pick(1)
    assert few
    assert few.logprobs
    assert unpack_logprobs(few.logprobs, 1)[1:] == ([[]], [[]])
    assert all_of_them
    assert all_of_them.logprobs
    assert unpack_logprobs(all_of_them.logprobs, 1)[1] == [[1, 3, 2, 0, 4]]
