"""The engine for models that cannot be run packed: the same promises, with the model's own cache."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.link import Item, pack_ids  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import padded, rows  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.make import engine_for, make_engine  # noqa: E402
from headway.workers.generate.padded import Budget, PaddedEngine  # noqa: E402
from headway.workers.load import LoadError  # noqa: E402
from tests import families  # noqa: E402
from tests import torch_models as tiny  # noqa: E402
from tests.test_families import ENGINES, WANTED, arriving, generated  # noqa: E402

WAYS = ["BLOOM", "Jamba", "RWKV", "GPT"]  # padded, padded with states, one by one, without a cache
PROMPT = [5, 17, 101, 44, 9, 200, 12]


def engine(name: str, *, eos: tuple[int, ...] = (), **spec: Any) -> PaddedEngine:
    settings = {"name": "tiny", "step_tokens": 20, "max_num_seqs": 4, "kv_mib": 4} | spec
    limits = {"context_tokens": 128, "vocab_size": families.VOCAB, "eos": frozenset(eos)}
    loaded = tiny.loaded(families.model(name), **limits)
    return PaddedEngine(ModelSpec(**settings), loaded, "it is a test", random.Random(1), tiny.FullBudget())


def alone(name: str, ids: list[int], **params: Any) -> tuple[list[int], str]:
    answers = tiny.drive(engine(name, eos=params.pop("eos", ())), [(ids, Params(**params))])
    return answers.tokens[0], answers.rows[0].finish


# ---------------------------------------------------------------- which models, and their answers


@pytest.mark.parametrize("name", families.OTHERS)
def test_tokens_in_company_are_those_of_generate_alone(name: str) -> None:
    expected = generated(name)
    assert len({token for answer in expected for token in answer}) >= 10
    loaded = tiny.loaded(families.model(name), context_tokens=128, vocab_size=families.VOCAB)
    subject = engine_for(ModelSpec(step_tokens=9, max_num_seqs=3, kv_mib=4), loaded)
    assert families.row(name, subject.card.facts) in ENGINES.read_text()
    for seed in range(2 if name in WAYS else 1):
        answers = arriving(subject, WANTED, seed)
        assert [answers.tokens[rid] for rid in range(len(WANTED))] == expected, seed
        assert not answers.failed
        assert answers.steps[-1].kv_used == 0


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "GPT-OSS"])
def test_what_could_be_packed_runs_padded_if_that_is_wanted(name: str) -> None:
    """Windows too: rows of a sliding cache share a rectangle."""
    loaded = tiny.loaded(families.model(name), context_tokens=128, vocab_size=families.VOCAB)
    subject = engine_for(ModelSpec(packing="padded", kv_mib=4, max_num_seqs=4), loaded)
    assert isinstance(subject, PaddedEngine)
    assert subject.card.facts["generation"] == "padded, not packed: packing: padded"
    answers = arriving(subject, WANTED, 5)
    assert [answers.tokens[rid] for rid in range(len(WANTED))] == generated(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LFM2", "layers of the kinds conv"),
        ("RWKV", "recurrent state"),
        ("BLOOM", "attention interface"),
        ("Phi-3.5-MoE, sliding window", "logits differ from its own"),
    ],
)
def test_what_cannot_be_packed_says_so(name: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded = tiny.loaded(families.model(name), context_tokens=128, vocab_size=families.VOCAB)
    with pytest.raises(LoadError, match=f"cannot be run packed: .*{why}.*leave out packing: packed"):
        engine_for(ModelSpec(packing="packed", kv_mib=4), loaded)
    caplog.clear()
    card = engine_for(ModelSpec(kv_mib=4), loaded).card
    assert why in card.facts["generation"]
    assert f"is not run packed ({card.facts['generation'].split(': ', 1)[1]})" in caplog.text


def test_a_folder_is_served_and_refused_before_its_weights_are_read(tmp_path: Any) -> None:
    families.model("LFM2").save_pretrained(tmp_path)
    spec = ModelSpec(name="lfm2", engine="generate", model=str(tmp_path), device="cpu", kv_mib=4)
    subject = make_engine(spec)
    assert isinstance(subject, PaddedEngine)
    answers = tiny.drive(subject, WANTED)
    assert [answers.tokens[rid] for rid in range(len(WANTED))] == generated("LFM2")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="cannot be run packed"):
        make_engine(spec.model_copy(update={"packing": "packed"}))


def test_settings_of_pages_are_said_to_be_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    engine("BLOOM")
    assert "not used" not in caplog.text
    engine("BLOOM", kv_dtype="int8", canary=True)
    assert "kv_dtype, canary: only for models that are packed; not used" in caplog.text


def test_packable_models_are_packed() -> None:
    loaded = tiny.loaded(families.model("Llama"), context_tokens=128, vocab_size=families.VOCAB)
    assert isinstance(engine_for(ModelSpec(kv_mib=4), loaded), GenerateEngine)


def test_a_model_that_mixes_neighbours_in_every_way_is_refused() -> None:
    """State in a module, outside of any cache: what is read for one request is left there for the next."""
    model = families.model("BLOOM")
    left = [torch.zeros(1, 1, 32)]

    def leak(_module: Any, _inputs: Any, output: Any) -> Any:
        mixed, left[0] = output + left[0], output[:1, -1:].clone()
        return mixed

    model.transformer.word_embeddings.register_forward_hook(leak)
    loaded = tiny.loaded(model, context_tokens=128, vocab_size=families.VOCAB)
    with pytest.raises(LoadError, match="answers otherwise beside other texts than alone"):
        PaddedEngine(ModelSpec(kv_mib=4), loaded, "")


# ---------------------------------------------------------------- one request and its neighbours


@pytest.mark.parametrize("name", WAYS)
def test_mixed_parameters_answer_as_alone(name: str) -> None:
    kinds = [
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 42},
        {"min_tokens": 10, "stop_token_ids": [generated(name)[1][0]]},
        {"temperature": 1.2, "top_k": 20, "seed": 7, "presence_penalty": 0.5, "logprobs": 3},
    ]
    wanted = [(ids, Params(max_new_tokens=12, **kind)) for (ids, _), kind in zip(WANTED, kinds, strict=False)]
    expected = [alone(name, ids, max_new_tokens=12, **kind)[0] for (ids, _), kind in zip(wanted, kinds, strict=True)]
    answers = arriving(engine(name), wanted, 2)
    assert [answers.tokens[rid] for rid in range(len(wanted))] == expected


def traced(monkeypatch: pytest.MonkeyPatch, name: str, wanted: list[tiny.Wanted]) -> dict[int, list[Any]]:
    """The logits each request saw, in order."""
    trace: dict[int, list[Any]] = {}
    choose = padded.choose

    def recording(logits: Any, requests: Any) -> Any:
        for row, request in zip(logits, requests, strict=True):
            trace.setdefault(request.rid, []).append(row.clone())
        return choose(logits, requests)

    with monkeypatch.context() as patch:
        patch.setattr(padded, "choose", recording)
        tiny.drive(engine(name), wanted)
    return trace


@pytest.mark.parametrize("name", ["BLOOM", "Falcon", "Qwen3.5", "LFM2", "RWKV"])
def test_changing_one_request_leaves_the_others_logits_bit_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = list(WANTED)
    changed[1] = ([(token * 7 + 13) % 255 + 1 for token in WANTED[1][0]], WANTED[1][1])
    before, after = traced(monkeypatch, name, WANTED), traced(monkeypatch, name, changed)
    assert not torch.equal(before[1][0], after[1][0])
    for rid in set(range(len(WANTED))) - {1}:
        assert all(map(torch.equal, before[rid], after[rid])), rid


@pytest.mark.parametrize("name", ["BLOOM", "MPT", "Falcon", "GPT-Neo", "Llama 4", "Jamba", "Qwen3-Next", "Gemma 3"])
def test_what_lies_in_the_padding_reaches_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = traced(monkeypatch, name, WANTED)
    pads = []

    def poisoned(states: Any, width: int) -> Any:
        pads.append(width - states.shape[-2])
        return torch.nn.functional.pad(states, (0, 0, pads[-1], 0), value=1e4)

    monkeypatch.setattr(rows, "_padded", poisoned)
    dirty = traced(monkeypatch, name, WANTED)
    assert max(pads) >= 5  # or as many as a window has
    for rid in range(len(WANTED)):
        assert all(map(torch.equal, clean[rid], dirty[rid])), rid


@pytest.mark.parametrize("name", ["BLOOM", "Jamba", "RWKV"])
def test_a_later_request_inherits_nothing(name: str) -> None:
    """The same long beginning, one after the other, also after a cancelled and a failed one, as on a new engine."""
    prefix = [index * 37 % 255 + 1 for index in range(60)]
    first, second = [*prefix, 3, 4, 5], [*prefix, 6, 7]
    expected, _ = alone(name, second, max_new_tokens=10)
    subject = engine(name)
    for how in ("whole", "cancelled", "failed"):
        subject.add(1, tiny.items([(first, Params(max_new_tokens=10))]))
        for _ in range(0 if how == "whole" else 6):
            subject.step()
        if how == "cancelled":
            subject.cancel(1, [0])
        elif how == "failed":
            subject._after(RuntimeError("a kernel said no"), list(subject._running), [])
        tiny.drive(subject)
        assert tiny.drive(subject, [(second, Params(max_new_tokens=10))]).tokens[0] == expected, how


# ---------------------------------------------------------------- the protocol


@pytest.mark.parametrize("name", WAYS)
def test_endings_and_continued_work(name: str) -> None:
    whole, finish = alone(name, PROMPT, max_new_tokens=12)
    assert (len(whole), finish) == (12, "length")
    end = next(token for token in whole if whole.index(token) > 2)
    at = whole.index(end)
    assert alone(name, PROMPT, max_new_tokens=12, eos=(end,)) == (whole[: at + 1], "stop")
    assert alone(name, PROMPT, max_new_tokens=12, eos=(end,), ignore_eos=True) == (whole, "length")
    subject = engine(name)
    params = Params(max_new_tokens=12)
    subject.add(1, [Item(0, ids=pack_ids(PROMPT), done=pack_ids(whole[:5]), params=params)])
    subject.add(1, [Item(1, ids=pack_ids(PROMPT), done=pack_ids(whole), params=params)])
    answers = tiny.drive(subject)
    assert answers.tokens[0] == whole[5:]
    assert (answers.tokens[1], answers.rows[1].finish) == ([], "length")
    long = [index % 255 + 1 for index in range(120)]
    tokens, finish = alone(name, long, max_new_tokens=50)
    assert (len(tokens), finish) == (8, "length")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_forgets_at_once_and_disturbs_nobody(name: str, steps: int) -> None:
    subject = engine(name, step_tokens=30)
    subject.add(1, tiny.items(WANTED))
    answers = tiny.Answers()
    for _ in range(steps):
        answers.take(subject.step())
    subject.cancel(1, [1, 99])
    subject.cancel(5, [0])
    while subject.busy:
        answers.take(subject.step())
    assert answers.rows[1].finish == "dropped"
    assert [answers.tokens[rid] for rid in (0, 2, 3, 4, 5)] == [generated(name)[rid] for rid in (0, 2, 3, 4, 5)]
    assert subject.step() == []
    subject.add(2, tiny.items(WANTED))
    subject.close()
    assert not subject.busy


def test_prompts_are_read_in_pieces_beside_running_answers() -> None:
    subject = engine("BLOOM", step_tokens=10)
    subject.add(1, tiny.items([(PROMPT, Params(max_new_tokens=40))]))
    subject.step()
    subject.add(2, tiny.items([(PROMPT * 12, Params(max_new_tokens=1))], first=1))
    for _ in range(9):
        (step,) = subject.step()
        assert [row.rid for row in step.rows] == [0]
        assert step.tokens == 10


def test_what_must_be_read_whole_is_and_one_at_a_time() -> None:
    subject = engine("Jamba", step_tokens=10)
    assert subject.card.facts["prompts"] == "read whole"
    subject.add(1, tiny.items([(PROMPT * 2, Params(max_new_tokens=3)), (PROMPT * 3, Params(max_new_tokens=3))]))
    assert [subject.step()[0].tokens for _ in range(3)] == [14, 1 + 21, 2]


def test_a_bad_request_ends_alone() -> None:
    subject = engine("BLOOM", max_input_tokens=60)
    bad = [
        (Item(10, ids=pack_ids([1, 256])), "invalid_request", "token id 256 is outside the vocabulary of 256"),
        (Item(11), "invalid_request", "empty"),
        (Item(12, ids=b"abc"), "invalid_request", "32-bit"),
        (Item(13, ids=pack_ids([1] * 61)), "too_long", "61 tokens; the limit is 60"),
    ]
    subject.add(2, [item for item, _, _ in bad])
    answers = tiny.drive(subject, WANTED)
    assert [answers.tokens[rid] for rid in range(len(WANTED))] == generated("BLOOM")
    for item, code, words in bad:
        assert (answers.rows[item.rid].code, answers.rows[item.rid].batch) == (code, 2)
        assert words in answers.rows[item.rid].message


# ---------------------------------------------------------------- memory


def test_no_more_start_than_fit_at_full_length() -> None:
    subject = engine("BLOOM", max_num_seqs=6)
    tokens = 60  # the longest may grow to 50
    subject._budget = Budget(total_bytes=tokens * 512 * 2, fixed=0, per_token=512, square=True)
    answers = tiny.drive(subject, WANTED)
    assert [answers.tokens[rid] for rid in range(len(WANTED))] == generated("BLOOM")
    assert max(step.kv_used for step in answers.steps) <= 2 * tokens
    assert 1 < max(step.running for step in answers.steps) < 6
    subject.add(3, tiny.items([(PROMPT * 10, Params(max_new_tokens=55))], first=50))
    ending = tiny.drive(subject).rows[50]
    assert (ending.code, ending.message) == (
        "too_long",
        "input and output need 124 tokens of cache; it has 120 (kv_mib)",
    )


@pytest.mark.parametrize("name", ["BLOOM", "Jamba", "RWKV"])
def test_the_state_of_a_request_takes_what_was_said(name: str) -> None:
    subject = engine(name)
    subject._way.forward.ran = lambda _: None
    for length in (20, 61):
        subject._way.read((9, length), [1] * length, 0)
        found = subject._way.bytes_of((9, length))  # type: ignore[attr-defined]
        assert found == subject._budget.bytes_of([length])


def test_no_room_for_one_state_is_said_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "cost_of", lambda _: (5 << 20, 0))
    with pytest.raises(LoadError, match=r"the state of one request takes 5 MiB .*4 MiB are there for it \(kv_mib\)"):
        engine("Mamba")


# ---------------------------------------------------------------- faults


def failing(monkeypatch: pytest.MonkeyPatch, subject: PaddedEngine, method: str, at: int, error: Exception) -> None:
    run, count = getattr(subject._way, method), iter(range(10_000))

    def maybe(*args: Any) -> Any:
        if next(count) == at:
            raise error
        return run(*args)

    monkeypatch.setattr(subject._way, method, maybe)


def test_a_fault_in_a_prompt_is_that_request_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine("BLOOM", step_tokens=300)
    failing(monkeypatch, subject, "read", 2, RuntimeError("a kernel said no"))
    answers = tiny.drive(subject, WANTED)
    (failed,) = answers.failed
    assert (failed.code, len(failed.rids)) == ("engine_error", 1)
    others = set(range(len(WANTED))) - set(failed.rids)
    assert all(answers.tokens[rid] == generated("BLOOM")[rid] for rid in others)


def test_a_fault_in_a_batch_fails_its_rows_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine("Jamba", step_tokens=300, max_num_seqs=3)
    failing(monkeypatch, subject, "decode", 1, RuntimeError("a kernel said no"))
    answers = tiny.drive(subject, WANTED)
    failed = {rid for one in answers.failed for rid in one.rids}
    assert failed
    assert all(answers.tokens[rid] == generated("Jamba")[rid] for rid in set(range(len(WANTED))) - failed)
    assert len(answers.rows) + len(failed) == len(WANTED)


@pytest.mark.parametrize("method", ["read", "decode"])
def test_out_of_memory_costs_time_and_no_answer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine("Jamba", step_tokens=300)
    failing(monkeypatch, subject, method, 2, torch.OutOfMemoryError("no memory"))
    answers = tiny.drive(subject, WANTED)
    assert [answers.tokens[rid] for rid in range(len(WANTED))] == generated("Jamba")
    assert not answers.failed
    assert sum(step.shortages for step in answers.steps) == 1


def test_one_that_does_not_fit_alone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine("BLOOM", max_num_seqs=1)
    right = subject._way.read

    def short(key: Any, tokens: Any, start: int) -> Any:
        if key[1] == 0:
            raise torch.OutOfMemoryError("no memory")
        return right(key, tokens, start)

    monkeypatch.setattr(subject._way, "read", short)
    answers = tiny.drive(subject, WANTED[:2])
    assert (answers.rows[0].finish, answers.rows[0].code) == ("error", "out_of_memory")
    assert answers.tokens[1] == generated("BLOOM")[1]


def test_logits_that_are_not_finite_fail_their_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engine("BLOOM", step_tokens=300)
    run, count = subject._way.decode, iter(range(10_000))

    def broken(texts: Any) -> Any:
        logits = run(texts)
        if next(count) == 1:
            logits[1, 5] = float("nan")
        return logits

    monkeypatch.setattr(subject._way, "decode", broken)
    answers = tiny.drive(subject, WANTED[1:4])
    assert [(one.rids, one.code) for one in answers.failed] == [([1], "engine_error")]
    assert [answers.tokens[rid] for rid in (0, 2)] == [generated("BLOOM")[rid] for rid in (1, 3)]
