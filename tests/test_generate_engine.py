"""The generate engine: what it answers, how requests share it, and how it ends what cannot be run."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.link import Item, pack_ids  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.pages import Pages  # noqa: E402
from headway.workers.load import LoadError  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

PROMPT = [5, 17, 101, 44, 9, 300, 12]


def one(subject: GenerateEngine, ids: list[int], **params: Any) -> tuple[list[int], str]:
    answers = tiny.drive(subject, [(ids, Params(**params))])
    return answers.tokens[0], answers.rows[0].finish


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("name", tiny.CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_batched_tokens_are_those_of_a_solo_run(name: str, attention: str) -> None:
    wanted = tiny.requests()
    subject = tiny.engine(name, attention=attention)
    answers = tiny.drive(subject, wanted)
    tiny.expect_solo(answers, wanted, name)
    assert subject.card.facts["attention"] == f"packed {attention}"


def test_the_card_says_what_is_served() -> None:
    card = tiny.engine(max_num_seqs=6, max_batch=9).card
    assert (card.kind, card.mode, card.max_batch, card.max_num_seqs) == ("generate", "iteration", 9, 6)
    assert (card.context_tokens, card.max_input_tokens, card.vocab_size) == (512, 511, 512)
    assert card.kv_tokens == 6 * 512  # 4 MiB would hold more: never more than all could use
    assert card.facts["pages"].startswith("384 of 8 tokens")
    assert len(card.prior_ns) == 3
    assert min(card.prior_ns) >= 0.0


def test_a_step_reports_what_it_did() -> None:
    subject = tiny.engine(step_tokens=40)
    subject.add(1, tiny.items([(PROMPT * 10, Params(max_new_tokens=2)), (PROMPT, Params(max_new_tokens=2))]))
    first, second, third = (subject.step()[0] for _ in range(3))
    assert [step.tokens for step in (first, second, third)] == [40, 38, 1]
    assert [len(step.rows) for step in (first, second, third)] == [1, 2, 1]
    assert [step.running for step in (first, second, third)] == [2, 1, 0]
    assert [step.kv_used for step in (first, second, third)] == [80, 72, 0]
    assert min(step.compute_ns for step in (first, second, third)) > 0
    assert not subject.busy
    assert subject.step() == []


def test_a_long_prompt_neither_holds_up_the_short_ones_nor_is_held_up_by_them() -> None:
    subject = tiny.engine(step_tokens=16)
    subject.add(1, tiny.items([(PROMPT * 16, Params(max_new_tokens=1))]))
    first: dict[int, int] = {}
    for step in range(60):
        if step < 40:  # a short prompt comes with every step, for ever as it were
            subject.add(2 + step, tiny.items([(PROMPT, Params(max_new_tokens=1))], first=1 + step))
        for row in [row for report in subject.step() for row in report.rows]:
            first.setdefault(row.rid, step)
    waits = [first[1 + step] - step for step in range(40)]
    assert max(waits) <= 1
    assert first[0] <= len(PROMPT * 16) * 4 // 16 + 1  # a quarter of the budget at least


def test_work_goes_on_after_tokens_made_elsewhere() -> None:
    whole = tiny.solo("llama", PROMPT, 12)
    subject = tiny.engine()
    subject.add(
        1, [Item(0, ids=pack_ids(PROMPT), done=pack_ids(whole[:5]), params=Params(max_new_tokens=12, temperature=0.0))]
    )
    answers = tiny.drive(subject)
    assert answers.tokens[0] == whole[5:]
    assert answers.rows[0].finish == "length"


def test_work_that_came_complete_ends_at_once() -> None:
    subject = tiny.engine(eos=[7])
    done = pack_ids([3, 4])
    subject.add(
        1,
        [
            Item(0, ids=pack_ids(PROMPT), done=done, params=Params(max_new_tokens=2)),
            Item(1, ids=pack_ids(PROMPT), done=pack_ids([3, 7]), params=Params(max_new_tokens=9)),
        ],
    )
    answers = tiny.drive(subject)
    assert [(answers.rows[rid].finish, answers.tokens[rid]) for rid in (0, 1)] == [("length", []), ("stop", [])]


def test_endings() -> None:
    whole = tiny.solo("llama", PROMPT, 12)
    eos, other = whole[4], whole[6]
    assert whole.index(eos) == 4
    assert one(tiny.engine(eos=[eos, other]), PROMPT, max_new_tokens=12) == (whole[:5], "stop")
    assert one(tiny.engine(eos=[eos]), PROMPT, max_new_tokens=12, ignore_eos=True) == (whole, "length")
    stopped = one(tiny.engine(eos=[eos]), PROMPT, max_new_tokens=12, ignore_eos=True, stop_token_ids=[other])
    assert stopped == (whole[: whole.index(other) + 1], "stop")
    assert one(tiny.engine(), PROMPT, max_new_tokens=5) == (whole[:5], "length")


def test_the_context_ends_an_answer() -> None:
    prompt = [index % 500 + 1 for index in range(505)]
    tokens, finish = one(tiny.engine(), prompt, max_new_tokens=100)
    assert (len(tokens), finish) == (7, "length")
    assert tokens == tiny.solo("llama", prompt, 7)


# ---------------------------------------------------------------- sampling


def test_a_seeded_answer_is_the_same_in_any_company_and_continued_elsewhere() -> None:
    params = Params(max_new_tokens=16, temperature=1.0, top_k=50, top_p=0.9, seed=42)
    alone, _ = one(tiny.engine(), PROMPT, max_new_tokens=16, temperature=1.0, top_k=50, top_p=0.9, seed=42)
    crowd = [*tiny.requests(5), (PROMPT, params), (PROMPT, Params(max_new_tokens=16, temperature=0.7, seed=1))]
    answers = tiny.drive(tiny.engine(step_tokens=13), crowd)
    assert answers.tokens[5] == alone
    subject = tiny.engine()
    subject.add(1, [Item(0, ids=pack_ids(PROMPT), done=pack_ids(alone[:6]), params=params)])
    assert tiny.drive(subject).tokens[0] == alone[6:]


def test_every_token_is_drawn_anew() -> None:
    even = {70: 1000.0, 71: 1000.0}
    tokens, _ = one(tiny.engine(), PROMPT, max_new_tokens=32, temperature=10.0, seed=5, logit_bias=even)
    assert set(tokens) == {70, 71}
    assert tokens != sorted(tokens)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    wanted = tiny.requests(4)
    hot = [(PROMPT, Params(max_new_tokens=20, temperature=1.5)) for _ in range(2)]
    answers = tiny.drive(tiny.engine(), wanted + hot)
    tiny.expect_solo(answers, wanted)
    assert answers.tokens[4] != answers.tokens[5]  # without a seed each has its own


def test_logit_bias_forbids_and_forces() -> None:
    whole = tiny.solo("llama", PROMPT, 6)
    free, _ = one(tiny.engine(), PROMPT, max_new_tokens=6, logit_bias={whole[0]: -1000.0})
    assert whole[0] not in free
    assert one(tiny.engine(), PROMPT, max_new_tokens=3, logit_bias={77: 1000.0}) == ([77, 77, 77], "length")


# ---------------------------------------------------------------- sharing


def test_decoding_is_never_starved_by_a_long_prompt() -> None:
    subject = tiny.engine(step_tokens=10)
    subject.add(1, tiny.items([(PROMPT, Params(max_new_tokens=40))]))
    subject.step()
    subject.add(2, tiny.items([(PROMPT * 30, Params(max_new_tokens=1))], first=1))
    for _ in range(20):
        (step,) = subject.step()
        assert [row.rid for row in step.rows] == [0]
        assert step.tokens == 10


def test_a_budget_below_the_rows_still_moves_prompts() -> None:
    wanted = tiny.requests(6)
    answers = tiny.drive(tiny.engine(step_tokens=1), wanted)
    tiny.expect_solo(answers, wanted)
    subject = tiny.engine(step_tokens=1)
    subject.add(1, tiny.items([([5], Params(max_new_tokens=40)), (PROMPT, Params(max_new_tokens=1))]))
    rows = [row.rid for _ in range(10) for row in subject.step()[0].rows]
    assert rows.count(0) == 10
    assert rows.count(1) == 1


def test_when_pages_run_out_the_youngest_waits_and_nobody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny.engine(step_tokens=200)
    subject._pages = Pages(14)
    preempted = []
    preempt = subject._preempt

    def counting() -> None:
        preempted.append(subject._running[-1].rid)
        assert all(other.rid < preempted[-1] for other in subject._running[:-1])
        preempt()

    monkeypatch.setattr(subject, "_preempt", counting)
    rng = random.Random(2)
    wanted = [([rng.randrange(1, 512) for _ in range(9)], Params(max_new_tokens=60)) for _ in range(6)]
    answers = tiny.drive(subject, wanted)
    tiny.expect_solo(answers, wanted)
    assert preempted
    assert 0 not in preempted  # the oldest always goes on
    assert subject._pages.used == 0
    assert repr(subject) == "<GenerateEngine 0 running, 0 waiting, <Pages 0/14 used>>"


def test_a_request_that_fills_all_pages_runs_alone() -> None:
    subject = tiny.engine()
    subject._pages = Pages(4)  # 32 slots: 10 read and 22 answered tokens, and one more that is never read
    wanted = [([3] * 10, Params(max_new_tokens=23)), ([4] * 10, Params(max_new_tokens=23))]
    tiny.expect_solo(tiny.drive(subject, wanted), wanted)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancel_gives_pages_back_before_the_next_step(steps: int) -> None:
    subject = tiny.engine()
    subject.add(1, tiny.items([(PROMPT * 9, Params(max_new_tokens=30))]))
    for _ in range(steps):
        subject.step()
    subject.cancel(1, [0, 99])
    subject.cancel(5, [0])
    assert subject._pages.used == 0
    assert subject.busy  # its ending is still to be told
    (step,) = subject.step()
    assert [(row.rid, row.finish, row.tokens) for row in step.rows] == [(0, "dropped", [])]
    assert (step.tokens, step.compute_ns) == (0, 0)
    assert not subject.busy
    subject.cancel(1, [0])  # late: harmless
    assert subject.step() == []


def test_close_forgets_everything() -> None:
    subject = tiny.engine()
    subject.add(1, tiny.items(tiny.requests(3)))
    subject.step()
    subject.close()
    assert not subject.busy


# ---------------------------------------------------------------- what cannot be run


def test_a_bad_request_ends_alone() -> None:
    wanted = tiny.requests(3)
    subject = tiny.engine(max_input_tokens=200)
    subject._pages = Pages(20)
    bad: list[tuple[Item, str, str]] = [
        (Item(10, ids=pack_ids([1, 512])), "invalid_request", "token id 512 is outside the vocabulary of 512"),
        (Item(11, ids=pack_ids([1]), done=pack_ids([600])), "invalid_request", "token id 600"),
        (Item(12), "invalid_request", "empty"),
        (Item(13, ids=b"abc"), "invalid_request", "32-bit"),
        (
            Item(14, ids=pack_ids([1]), params=Params(logit_bias={600: 1.0})),
            "invalid_request",
            "params.logit_bias names token 600; the model's vocabulary has 512 tokens",
        ),
        (Item(15, ids=pack_ids([1] * 201)), "too_long", "201 tokens; the limit is 200"),
        (Item(16, ids=pack_ids([1] * 100), params=Params(max_new_tokens=62)), "too_long", "it has 160 (kv_mib)"),
    ]
    subject.add(2, [item for item, _, _ in bad])
    answers = tiny.drive(subject, wanted)
    tiny.expect_solo(answers, wanted)
    for item, code, words in bad:
        row = answers.rows[item.rid]
        assert (row.finish, row.code, row.batch) == ("error", code, 2)
        assert words in row.message


def failing(subject: GenerateEngine, monkeypatch: pytest.MonkeyPatch, at_run: int, error: Exception) -> None:
    run, count = subject._runner.run, iter(range(10_000))

    def maybe(*args: Any) -> Any:
        if next(count) == at_run:
            raise error
        return run(*args)

    monkeypatch.setattr(subject._runner, "run", maybe)


def test_a_fault_in_a_step_fails_those_in_it_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    error, code = RuntimeError("a kernel said no"), "engine_error"
    subject = tiny.engine(step_tokens=20)
    failing(subject, monkeypatch, 1, error)
    long = [(PROMPT * 5, Params(max_new_tokens=4)), (PROMPT * 6, Params(max_new_tokens=4))]
    subject.add(1, tiny.items([(PROMPT, Params(max_new_tokens=9))]))
    subject.add(2, tiny.items(long, first=1))  # request 2 is not reached by the budget of the failing step
    answers = tiny.drive(subject)
    assert [(one.batch, one.rids, one.code) for one in answers.failed] == [(1, [0], code), (2, [1], code)]
    assert str(error) in answers.failed[0].message
    assert answers.failed[0].compute_ns > 0
    assert answers.tokens[2] == tiny.solo("llama", PROMPT * 6, 4)
    assert subject._pages.used == 0
    wanted = tiny.requests(4)
    tiny.expect_solo(tiny.drive(subject, wanted), wanted)


def test_logits_that_are_not_finite_fail_their_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny.engine(step_tokens=500)
    run, count = subject._runner.run, iter(range(10_000))

    def broken(*args: Any) -> Any:
        logits = run(*args)
        if next(count) == 2:
            logits[1, 5] = float("nan")
        return logits

    monkeypatch.setattr(subject._runner, "run", broken)
    wanted = [(PROMPT, Params(max_new_tokens=8)) for _ in range(3)]
    answers = tiny.drive(subject, wanted)
    assert [(one.rids, one.code) for one in answers.failed] == [([1], "engine_error")]
    assert "not finite" in answers.failed[0].message
    assert answers.tokens[0] == answers.tokens[2] == tiny.solo("llama", PROMPT, 8)
    assert subject._pages.used == 0


def test_a_broken_accelerator_breaks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = type("AcceleratorError", (RuntimeError,), {})
    monkeypatch.setattr(torch, "AcceleratorError", broken, raising=False)
    subject = tiny.engine()
    failing(subject, monkeypatch, 0, broken("CUDA error: device-side assert triggered"))
    subject.add(1, tiny.items([(PROMPT, Params())]))
    with pytest.raises(broken, match="device-side"):
        subject.step()


def test_no_room_for_one_page_is_said_at_start() -> None:
    with pytest.raises(LoadError, match="kv_mib 1 does not hold one page of 4096 tokens"):
        tiny.engine(kv_mib=1, page_tokens=4096)
