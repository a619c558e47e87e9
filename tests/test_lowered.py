"""Keys and values in fewer bits: what is lost, what is saved, and that a model that does not stand it is refused."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.lowered import decode, encode  # noqa: E402
from headway.workers.load import LoadError  # noqa: E402
from tests import torch_models as tiny  # noqa: E402


def test_int8_is_off_by_half_a_scale_at_most() -> None:
    """Of each token and head by itself, whatever its size: from a head of zeros to one of thousands."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 1e-3, 1.0, 5000.0])[None, :, None]
    states = torch.randn(9, 4, 16) * sizes
    stored, scale = encode(states, torch.int8)
    assert (stored.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float16, (9, 4, 1))
    back = decode(stored, scale, torch.float32)
    half = states.abs().amax(-1, keepdim=True) / 127 * 0.5
    assert ((back - states).abs() <= half * 1.15 + 1e-6).all()  # 0.1 for the scale's own rounding
    assert not back[:, 0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float_dtype_is_a_cast(dtype: Any) -> None:
    states = torch.randn(3, 2, 8)
    stored, scale = encode(states, dtype)
    assert scale is None
    assert torch.equal(decode(stored, scale, torch.float32), states.to(dtype).float())


@pytest.mark.parametrize(
    ("dtype", "share"), [("auto", 1.0), ("float32", 1.0), ("float16", 0.5), ("int8", 0.25 + 2 / (16 * 4))]
)
def test_what_is_stored_and_said(dtype: str, share: float) -> None:
    """Heads of 16 float32 numbers: int8 is a quarter, and 2 bytes of scale for 64."""
    full, subject = tiny.engine(), tiny.engine(kv_dtype=dtype, kv_mib=1)
    assert subject._cache.bytes_per_token == share * full._cache.bytes_per_token
    held = sum(store.numel() * store.element_size() for store in subject._cache.stores)
    assert held == subject._room.plan.kv_bytes <= 1 << 20
    assert subject.card.kv_tokens * subject._cache.bytes_per_token == held
    kept = subject.card.facts["kv_dtype"]
    assert kept == "float32" if share == 1.0 else kept.startswith(f"{dtype}, ")


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_an_answer_does_not_depend_on_how_its_prompt_was_cut_or_who_shares_the_step(name: str) -> None:
    """What a step has just computed is read back as it is stored, so that one step more or less changes nothing."""
    wanted = tiny.requests(6)
    answers = [tiny.drive(tiny.engine(name, kv_dtype="int8", step_tokens=step), wanted) for step in (500, 40, 7)]
    alone = [tiny.drive(tiny.engine(name, kv_dtype="int8"), [one]).tokens[0] for one in wanted[:3]]
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens
    assert [answers[0].tokens[rid] for rid in range(3)] == alone
    assert any(answers[0].tokens[rid] != tiny.solo(name, *cut) for rid, cut in enumerate(map(whole, wanted)))


def whole(wanted: tiny.Wanted) -> tuple[list[int], int]:
    ids, params = wanted
    return list(ids), params.max_new_tokens


def test_a_free_page_full_of_nan_changes_nothing() -> None:
    wanted = tiny.requests(6)
    clean = tiny.drive(tiny.engine(kv_dtype="int8"), wanted).tokens
    subject = tiny.engine(kv_dtype="int8")
    for scales in (*subject._cache.key_scales.values(), *subject._cache.value_scales.values()):
        scales.fill_(float("nan"))
    assert tiny.drive(subject, wanted).tokens == clean


def lopsided(size: float, dtype: str) -> GenerateEngine:
    """One number of each key is about `size`, for every token: no answer of the model depends on it."""
    made = tiny.model("gpt2")
    for layer in made.transformer.h:
        layer.attn.c_attn.weight.data[:, :64:16] = 0  # the queries' number beside it
        layer.attn.c_attn.weight.data[:, 64:128].mul_(4)
        layer.attn.c_attn.bias.data[64:128:16] = size
    return GenerateEngine(ModelSpec(name="t", kv_dtype=dtype, kv_mib=1), tiny.loaded(made))


def test_a_model_that_does_not_stand_it_is_refused() -> None:
    """One scale for a number of thousands says nothing of those beside it; past 65504 there is no float16."""
    assert lopsided(3e4, "auto").card.facts["kv_dtype"] == "float32"
    with pytest.raises(LoadError, match=r"does not stand a KV cache of int8: .*% of the best 5 tokens.*85% are needed"):
        lopsided(3e4, "int8")
    with pytest.raises(LoadError, match=r"does not stand a KV cache of float16: 0\.0%"):
        lopsided(1e6, "float16")


def test_auto_never_stores_less_than_the_model_computes() -> None:
    half = tiny.model("llama").to(torch.bfloat16)
    subject = GenerateEngine(ModelSpec(name="t", kv_mib=1), tiny.loaded(half, dtype=torch.bfloat16))
    assert {store.dtype for store in subject._cache.stores} == {torch.bfloat16}
    assert subject.card.facts["kv_dtype"] == "bfloat16"
