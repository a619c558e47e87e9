"""Every family runs, and answers in company what plain Transformers answers it alone: token for token."""

import functools
import random
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import plan  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.make import engine_for  # noqa: E402
from tests import families  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

ENGINES = Path(__file__).parents[1] / "docs" / "engines.md"
HEADER = ["| family | class | runs | prompts | why not packed |", "|---|---|---|---|---|"]
SHAPES = ((1, 9), (30, 6), (13, 12), (47, 3), (5, 14), (22, 8))  # tokens of a prompt, and of its answer


def wanted_of(vocab: int) -> list[tiny.Wanted]:
    rng = random.Random(4)
    return [([rng.randrange(1, vocab) for _ in range(read)], Params(max_new_tokens=made)) for read, made in SHAPES]


WANTED = wanted_of(families.VOCAB)


@functools.cache
def generated(name: str) -> list[list[int]]:
    """What `generate` of Transformers answers to each of WANTED, alone."""
    model = families.model(name)
    return [families.generate(model, ids, params.max_new_tokens) for ids, params in WANTED]


def engine(name: str, **spec: Any) -> GenerateEngine:
    settings = {"name": "tiny", "page_tokens": 4, "step_tokens": 20, "max_num_seqs": 4, "kv_mib": 4} | spec
    limits = {"context_tokens": families.PLAIN["max_position_embeddings"], "vocab_size": families.VOCAB}
    return GenerateEngine(
        ModelSpec(**settings), tiny.loaded(families.model(name), **limits), random.Random(1), tiny.FullBudget()
    )


def arriving(subject: Any, wanted: list[tiny.Wanted], seed: int) -> tiny.Answers:
    """Drive `subject`; requests arrive in an order and at times drawn from `seed`."""
    rng, answers = random.Random(seed), tiny.Answers()
    order = rng.sample(range(len(wanted)), len(wanted))
    while order or subject.busy:
        for _ in range(min(len(order), rng.randint(0, 2))):
            rid = order.pop()
            subject.add(1, tiny.items([wanted[rid]], first=rid))
        answers.take(subject.step())
    return answers


@pytest.mark.parametrize("name", families.FAMILIES)
def test_tokens_in_company_are_those_of_generate_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(name)
    assert len({token for answer in expected for token in answer}) >= 10  # a model that repeats itself proves nothing
    preempted = 0
    preempt = GenerateEngine._preempt

    def counting(self: GenerateEngine) -> None:
        nonlocal preempted
        preempted += 1
        preempt(self)

    monkeypatch.setattr(GenerateEngine, "_preempt", counting)
    for seed, (page_tokens, step_tokens, split_slots) in enumerate([(4, 20, 1 << 20), (1, 7, 4), (16, 300, 1 << 20)]):
        monkeypatch.setattr(plan, "SPLIT_SLOTS", {"cpu": split_slots})
        subject = engine(name, page_tokens=page_tokens, step_tokens=step_tokens)
        tiny.squeeze(subject, tokens=64)
        tiny.poison(subject)
        answers = arriving(subject, WANTED, seed)
        assert [answers.tokens[rid] for rid in range(len(WANTED))] == expected, (page_tokens, step_tokens)
        assert not answers.failed
        assert subject._pages.used == 0
    assert preempted
    assert families.row(name, subject.card.facts) in ENGINES.read_text()


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "GPT-OSS"])
def test_sampled_tokens_do_not_depend_on_company(name: str) -> None:
    sampled = [
        (ids, Params(max_new_tokens=params.max_new_tokens, temperature=0.9, top_p=0.95, seed=rid))
        for rid, (ids, params) in enumerate(WANTED)
    ]
    alone = [tiny.drive(engine(name), [one]).tokens[0] for one in sampled]
    answers = arriving(engine(name, step_tokens=9), [*sampled, *WANTED], seed=3)
    assert [answers.tokens[rid] for rid in range(len(sampled))] == alone
    assert alone != generated(name)


def test_the_table_lists_every_family(rewrite: bool) -> None:
    """What each line says is held against an engine where its family is tried."""
    names = [*families.FAMILIES, *families.OTHERS]
    text = ENGINES.read_text()
    if rewrite:
        settings = ModelSpec(kv_mib=4)
        limits = {"context_tokens": families.PLAIN["max_position_embeddings"], "vocab_size": families.VOCAB}
        facts = {name: engine_for(settings, tiny.loaded(families.model(name), **limits)).card.facts for name in names}
        table = "\n".join(HEADER + [families.row(name, facts[name]) for name in names])
        ENGINES.write_text(re.sub(r"(<!-- families -->\n)(\n\|.*?\n)?(?=\n[^|])", rf"\1\n{table}\n", text, flags=re.S))
        text = ENGINES.read_text()
    lines = text.split("<!-- families -->\n\n")[1].split("\n\n")[0].splitlines()
    assert lines[:2] == HEADER
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in names]


def test_the_text_model_inside_a_vision_model_is_served() -> None:
    """What `AutoModelForCausalLM` makes of the larger Gemma 3: pictures are not sent, texts are answered."""
    text = families.config_of(families.FAMILIES["Gemma 3"])
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"image_token_index": 255, "boi_token_index": 254, "eoi_token_index": 253}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=seen | {"image_size": 16, "patch_size": 8}, **ids
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    wanted = [([token % 250 for token in ids], params) for ids, params in WANTED]
    expected = [families.generate(model, ids, params.max_new_tokens) for ids, params in wanted]
    subject = engine_for(ModelSpec(kv_mib=4), tiny.loaded(model, context_tokens=128, vocab_size=families.VOCAB))
    assert subject.card.facts["generation"] == "packed"
    answers = arriving(subject, wanted, 1)
    assert [answers.tokens[rid] for rid in range(len(wanted))] == expected
