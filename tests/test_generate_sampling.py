"""Parameters inside the generate engine: mixed requests answer as alone, wherever and in how many parts they run."""

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.link import Item, Row, pack_ids, unpack_logprobs  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.pages import Pages  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

PROMPT = [5, 17, 101, 44, 9, 300, 12]


@functools.cache
def whole() -> list[int]:
    """The greedy answer."""
    return tiny.solo("llama", PROMPT, 24)


@functools.cache
def eos() -> int:
    """An end token that the greedy answer meets early."""
    assert whole().index(whole()[2]) == 2
    return whole()[2]


@functools.cache
def mixed() -> dict[str, Params]:
    """One request of every kind."""
    return {
        "plain": Params(max_new_tokens=24, ignore_eos=True),
        "repetition": Params(max_new_tokens=24, repetition_penalty=1.3, ignore_eos=True),
        "sampled": Params(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=42),
        "min_tokens": Params(
            max_new_tokens=24, min_tokens=10, stop_token_ids=[whole()[0], whole()[4]], stop=["x", "y"]
        ),
        "output penalties": Params(max_new_tokens=24, presence_penalty=1.5, frequency_penalty=0.7, ignore_eos=True),
        "everything": Params(
            max_new_tokens=24,
            min_tokens=3,
            temperature=1.2,
            top_k=50,
            top_p=0.95,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=-0.3,
            frequency_penalty=0.2,
            seed=1 << 62,
            logit_bias={7: 2.0},
            logprobs=5,
        ),
        "logprobs": Params(max_new_tokens=24, logprobs=2, ignore_eos=True),
    }


@functools.cache
def engine() -> GenerateEngine:
    """One for all tests that leave nothing behind."""
    return tiny.engine(eos=[eos()])


@functools.cache
def alone(name: str) -> tuple[list[int], str, list[Any]]:
    """Tokens, ending and logprobs of one of them by itself."""
    return told(driven(engine(), [name]), 0)


def driven(subject: GenerateEngine, names: list[str], **options: Any) -> tiny.Answers:
    return tiny.drive(subject, [(PROMPT, mixed()[name]) for name in names], **options)


def told(answers: tiny.Answers, rid: int) -> tuple[list[int], str, list[Any]]:
    rows = [row for step in answers.steps for row in step.rows if row.rid == rid]
    return answers.tokens[rid], answers.rows[rid].finish, [odds(row) for row in rows if row.tokens]


def odds(row: Row) -> Any:
    return None if row.logprobs is None else unpack_logprobs(row.logprobs, 1)


def test_every_request_of_a_mixed_batch_answers_as_alone() -> None:
    names = list(mixed())
    for order in (names, names[::-1]):
        answers = driven(engine(), order)
        for rid, name in enumerate(order):
            tokens, finish, logprobs = told(answers, rid)
            assert (tokens, finish) == alone(name)[:2], name
            for one, other in zip(logprobs, alone(name)[2], strict=True):  # a packed forward rounds in its own way
                assert (one is None) == (other is None)
                if one:
                    assert one[1] == other[1]
                    assert one[0] + one[2][0] == pytest.approx(other[0] + other[2][0], abs=1e-4)


def test_latecomers_change_nothing() -> None:
    subject = tiny.engine(eos=[eos()], step_tokens=13)
    late = [name for name in mixed() if name != "plain"]

    def join(step: int, _: tiny.Answers) -> None:
        if step == 3:
            subject.add(2, tiny.items([(PROMPT, mixed()[name]) for name in late], first=1))

    answers = driven(subject, ["plain"], before=join)
    assert answers.tokens[0] == whole()
    for rid, name in enumerate(late, start=1):
        assert answers.tokens[rid] == alone(name)[0], name


@pytest.mark.parametrize("name", ["repetition", "sampled", "min_tokens", "output penalties", "everything", "logprobs"])
def test_an_answer_goes_on_elsewhere_as_if_it_had_stayed(name: str) -> None:
    tokens, finish, logprobs = alone(name)
    assert len(tokens) > 3
    for made in (1, len(tokens) // 2):
        item = Item(0, ids=pack_ids(PROMPT), done=pack_ids(tokens[:made]), params=mixed()[name])
        subject = engine()
        subject.add(1, [item])
        rest, ending, odds_of_rest = told(tiny.drive(subject), 0)
        assert (tokens[:made] + rest, ending) == (tokens, finish)
        assert len(odds_of_rest) == len(logprobs) - made


def test_a_preempted_request_answers_as_if_it_had_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny.engine(eos=[eos()])
    subject._pages = Pages(9)
    preempted, preempt = [], subject._preempt

    def counting() -> None:
        preempted.append(subject._running[-1].rid)
        preempt()

    monkeypatch.setattr(subject, "_preempt", counting)
    names = ["plain", "repetition", "output penalties", "everything"]
    answers = driven(subject, names)
    assert preempted
    for rid, name in enumerate(names):
        assert answers.tokens[rid] == alone(name)[0], name


# ---------------------------------------------------------------- what they mean


def test_greedy_penalties_are_those_of_transformers_generate() -> None:
    """The whole path: the tokens of the stock model's own `generate`."""
    stock = tiny.model("llama")
    prompt = torch.tensor([PROMPT])
    out = stock.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=24,
        min_new_tokens=8,
        do_sample=False,
        repetition_penalty=1.3,
        eos_token_id=[eos()],
        pad_token_id=0,
    )
    params = Params(max_new_tokens=24, min_tokens=8, repetition_penalty=1.3)
    answers = tiny.drive(engine(), [(PROMPT, params)])
    assert answers.tokens[0] == out[0, len(PROMPT) :].tolist()
    assert answers.tokens[0] != whole()


def test_logprobs_are_those_of_the_stock_model() -> None:
    tokens, _, logprobs = alone("logprobs")
    assert tokens == whole()
    with torch.inference_mode():
        logits = tiny.model("llama")(torch.tensor([[*PROMPT, *tokens[:-1]]]), use_cache=False).logits[0]
    expected = logits[len(PROMPT) - 1 :].log_softmax(-1)
    for place, (token, (chosen, top_ids, top)) in enumerate(zip(tokens, logprobs, strict=True)):
        values, ids = expected[place].topk(2)
        assert chosen == pytest.approx([float(expected[place, token])], abs=1e-4)
        assert top_ids == [ids.tolist()]
        assert top == [pytest.approx(values.tolist(), abs=1e-4)]


def test_end_tokens_wait_for_min_tokens() -> None:
    for least in (0, 2, 3, 24):
        answers = tiny.drive(engine(), [(PROMPT, Params(max_new_tokens=24, min_tokens=least))])
        tokens = answers.tokens[0]
        assert eos() not in tokens[:least]
        assert (answers.rows[0].finish == "stop") is (tokens[-1] == eos())
        assert len(tokens) > least - 1
        assert tokens[:2] == whole()[:2]
    ignored = Params(max_new_tokens=24, min_tokens=10, ignore_eos=True)
    assert tiny.drive(engine(), [(PROMPT, ignored)]).tokens[0] == whole()  # an end token that ends nothing is not muted


def test_a_seed_counts_in_any_company() -> None:
    """Beside rows without a seed, with another, at any place, and when a neighbour ends early."""
    tokens = alone("sampled")[0]
    ours = (PROMPT, mixed()["sampled"])
    unseeded, other = Params(max_new_tokens=16, temperature=0.8), Params(max_new_tokens=3, temperature=0.8, seed=7)
    for place in (0, 3, 7):
        crowd = [(PROMPT, unseeded if at % 2 else other) for at in range(8)]
        crowd[place] = ours
        assert tiny.drive(engine(), crowd).tokens[place] == tokens
    free = [tiny.drive(engine(), [(PROMPT, unseeded)]).tokens[0] for _ in range(2)]
    assert free[0] != free[1]
