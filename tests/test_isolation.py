"""One request can never hurt another: proofs on bits, not on looks.

Free pages are full of NaN, so that reading one slot that is not one's own would show; one request is changed, and every
logit of the others must stay the same bit for bit.
"""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import headway.workers.generate.engine as engine_module  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from tests import torch_models as tiny  # noqa: E402


def traced(
    monkeypatch: pytest.MonkeyPatch, subject: GenerateEngine, wanted: list[tiny.Wanted]
) -> tuple[tiny.Answers, dict[int, list[Any]]]:
    """Drive `subject`; also the logits each request saw, in order, by its index (carried as its seed)."""
    trace: dict[int, list[Any]] = {}
    choose = engine_module.choose

    def recording(logits: Any, rows: Any) -> Any:
        for row, request in zip(logits, rows, strict=True):
            trace.setdefault(request.choice.seed, []).append(row.clone())
        return choose(logits, rows)

    seeded = [(ids, Params(max_new_tokens=params.max_new_tokens, seed=at)) for at, (ids, params) in enumerate(wanted)]
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "choose", recording)
        return tiny.drive(subject, seeded), trace


def same_bits(one: dict[int, list[Any]], other: dict[int, list[Any]], rid: int) -> bool:
    return len(one[rid]) == len(other[rid]) and all(map(torch.equal, one[rid], other[rid]))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_pool_full_of_nan_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tiny.requests()
    _, clean = traced(monkeypatch, tiny.engine(name), wanted)
    subject = tiny.engine(name)
    tiny.poison(subject)
    answers, dirty = traced(monkeypatch, subject, wanted)
    assert all(same_bits(clean, dirty, rid) for rid in range(len(wanted)))
    for rid, (ids, params) in enumerate(wanted):
        assert answers.tokens[rid] == tiny.solo(name, ids, params.max_new_tokens)
    assert subject._pages.used == 0


@pytest.mark.parametrize("name", tiny.DENSE)
def test_changing_one_request_leaves_the_others_logits_bit_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tiny.requests()
    changed = list(wanted)
    changed[3] = ([(token * 7 + 13) % 511 + 1 for token in wanted[3][0]], wanted[3][1])
    _, before = traced(monkeypatch, tiny.engine(name), wanted)
    _, after = traced(monkeypatch, tiny.engine(name), changed)
    assert not same_bits(before, after, 3)
    assert all(same_bits(before, after, rid) for rid in range(len(wanted)) if rid != 3)


def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give two requests one page: NaN or a neighbour's text must reach an answer."""
    subject = tiny.engine()
    tiny.poison(subject)
    take = subject._pages.take
    monkeypatch.setattr(subject._pages, "take", lambda count: [0] * count if count > 1 else take(count))
    monkeypatch.setattr(subject._pages, "give", lambda _: None)
    wanted = tiny.requests(4)
    answers = tiny.drive(subject, wanted)
    right = [
        answers.tokens.get(rid) == tiny.solo("llama", ids, p.max_new_tokens) for rid, (ids, p) in enumerate(wanted)
    ]
    assert not all(right)


@pytest.mark.parametrize("seed", range(6))
def test_any_arrival_order_and_chunking_gives_the_same_tokens(seed: int) -> None:
    """Also under memory pressure with preemption, with cancelled neighbours, and in a poisoned pool."""
    rng = random.Random(seed)
    wanted = tiny.requests(12, seed=5)
    subject = tiny.engine(
        step_tokens=rng.randint(1, 60), page_tokens=rng.choice([1, 4, 16]), max_num_seqs=rng.randint(1, 8)
    )
    tiny.squeeze(subject, tokens=160)
    tiny.poison(subject)
    order = list(range(len(wanted)))
    rng.shuffle(order)
    answers = tiny.Answers()
    dropped: list[int] = []
    while order or subject.busy:
        for _ in range(rng.randint(0, 3)):
            if order:
                rid = order.pop()
                subject.add(rid, tiny.items([wanted[rid]], first=rid))
        if rng.random() < 0.05:
            victim = rng.randrange(len(wanted))  # perhaps ended, or not even there yet: then nothing happens
            subject.cancel(victim, [victim])
            dropped.append(victim)
        answers.take(subject.step())
    for rid, (ids, params) in enumerate(wanted):
        expected = tiny.solo("llama", ids, params.max_new_tokens)
        if answers.rows[rid].finish == "dropped":
            assert rid in dropped
            expected = expected[: len(answers.tokens[rid])]
        assert answers.tokens[rid] == expected, f"request {rid}, seed {seed}"
    assert not answers.failed
    assert subject._pages.used == 0
