"""Tiny random models, the dumb oracle for them, and a loop that drives an engine. For tests that have torch."""

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from headway.scheduler.link import Done, Failed, Item, Row, Step, pack_ids
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params
from headway.workers.generate.engine import GenerateEngine
from headway.workers.generate.pace import Pace
from headway.workers.generate.pages import Pages
from headway.workers.load import Loaded

VOCAB = 512
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = BASE | {"head_dim": 16, "num_experts_per_tok": 2}
MLA: dict[str, Any] = BASE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", BASE),
    "qwen3": ("Qwen3", BASE | {"head_dim": 16}),
    "gpt2": ("GPT2", GPT2),
    "mistral": ("Mistral", BASE | {"sliding_window": 16}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 32, "num_experts": 8}),
    "gpt_oss": ("GptOss", EXPERTS | {"num_local_experts": 8, "sliding_window": 16}),
    "deepseek_v3": ("DeepseekV3", MLA),
}
ROUTING: dict[str, tuple[str, dict[str, Any]]] = {  # further families with experts, for what is about experts only
    "olmoe": ("Olmoe", EXPERTS | {"num_experts": 8}),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 8}),
}
DENSE = ("llama", "qwen3", "gpt2", "mistral")

Wanted = tuple[Sequence[int], Params]


def model(name: str, **changes: Any) -> Any:
    """A new model, the same one each time; its weights are large enough for varied answers."""
    family, config = (CONFIGS | ROUTING)[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    made = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**config | changes)).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    return made


ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 60,
}


def encoder(family: str = "Bert", head: str = "Model", **changes: Any) -> Any:
    """A new tiny encoder, or with `head` a classifier; the same one each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}Config")
    made = getattr(transformers, f"{family}{head}")(kind(**ENCODER | changes)).eval()
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 and head != "Model":  # large enough for varied answers, and alike in no two texts
            parameter.data.mul_(4 if "score" in name or "classifier" in name else 2)
    return made


def texts(count: int = 11, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Token ids of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def outcomes(subject: Any, wanted: Sequence[Item]) -> list[Any]:
    """What a one-shot engine makes of one batch, in its order."""
    subject.add(1, wanted)
    (done,) = subject.step()
    assert isinstance(done, Done), done
    assert [outcome.rid for outcome in done.outcomes] == [item.rid for item in wanted]
    return done.outcomes


def loaded(made: Any, **changes: Any) -> Loaded:
    config = made.config
    facts: dict[str, Any] = {
        "model": made,
        "source": str(Path(__file__).parent),
        "tokenizer": None,
        "eos": frozenset(),
        "context_tokens": getattr(config, "max_position_embeddings", 0),
        "vocab_size": VOCAB,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "facts": {"device": "cpu"},
    }
    return Loaded(**facts | changes)


class FullBudget(Pace):
    """Chunks as large as the budget allows, whatever a step took: the same on every machine."""

    def __init__(self) -> None:
        super().__init__((1.0, 1.0, 0.0))

    def room(self, rows: int, budget: int, reading: int = 1, read: int = 0) -> int:  # noqa: ARG002
        return max(1, budget - rows)


def engine(name: str = "llama", *, eos: Iterable[int] = (), pace: Pace | None = None, **spec: Any) -> GenerateEngine:
    """An engine over a new tiny model: few pages of 8 tokens, a budget that cuts prompts into chunks."""
    settings = {"name": "tiny", "page_tokens": 8, "step_tokens": 40, "max_num_seqs": 6, "kv_mib": 4} | spec
    made = loaded(model(name), eos=frozenset(eos))
    return GenerateEngine(ModelSpec(**settings), made, random.Random(1), pace or FullBudget())


@functools.cache
def _reference(name: str) -> Any:
    return model(name)


@functools.cache
def _solo(name: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = _reference(name)(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def solo(name: str, prompt: Sequence[int], count: int) -> list[int]:
    """The oracle: the stock model, alone, without a cache, the whole text again for each greedy token."""
    return list(_solo(name, tuple(prompt), count))


def requests(count: int = 10, seed: int = 1) -> list[Wanted]:
    """Mixed greedy requests."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 70))] for _ in range(count)]
    return [(prompt, Params(max_new_tokens=rng.randint(1, 24))) for prompt in prompts]


def items(wanted: Sequence[Wanted], first: int = 0) -> list[Item]:
    return [Item(first + at, ids=pack_ids(ids), params=params) for at, (ids, params) in enumerate(wanted)]


class Answers:
    """What an engine reported: `tokens` and `rows` (endings) by request id, `failed` reports, `steps`."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.rows: dict[int, Row] = {}
        self.failed: list[Failed] = []
        self.steps: list[Step] = []

    def take(self, reports: Iterable[Any]) -> None:
        for report in reports:
            if isinstance(report, Failed):
                self.failed.append(report)
                continue
            self.steps.append(report)
            for row in report.rows:
                assert row.rid not in self.rows, "a row after its ending"
                self.tokens.setdefault(row.rid, []).extend(row.tokens)
                if row.finish:
                    self.rows[row.rid] = row


def drive(
    subject: GenerateEngine, wanted: Sequence[Wanted] = (), before: Callable[[int, Answers], None] | None = None
) -> Answers:
    """Add `wanted` as batch 1 and step until nothing is left. `before(step, answers)` runs ahead of each step."""
    answers = Answers()
    if wanted:
        subject.add(1, items(wanted))
    while subject.busy:
        if before:
            before(len(answers.steps), answers)
        answers.take(subject.step())
        assert len(answers.steps) < 5000, "no end in sight"
    return answers


def expect_solo(answers: Answers, wanted: Sequence[Wanted], name: str = "llama") -> None:
    """All greedy answers are those of the oracle, to their full length."""
    for rid, (ids, params) in enumerate(wanted):
        assert answers.tokens[rid] == solo(name, ids, params.max_new_tokens), f"request {rid}"
        assert answers.rows[rid].finish == "length"


def poison(subject: GenerateEngine) -> None:
    """Fill the whole pool with NaN now, and every page again when it is given back."""
    stores = [*subject._cache.keys.values(), *subject._cache.values.values()]
    for store in stores:
        store.fill_(float("nan"))
    give = subject._pages.give

    def give_poisoned(pages: Any) -> None:
        for page in pages:
            for store in stores:
                store[page * subject._page_tokens : (page + 1) * subject._page_tokens] = float("nan")
        give(pages)

    subject._pages.give = give_poisoned  # type: ignore[method-assign]


def squeeze(subject: GenerateEngine, tokens: int) -> None:
    """Leave only `tokens` worth of pages."""
    subject._pages = Pages(tokens // subject._page_tokens)
