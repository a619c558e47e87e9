"""The memory plan: what it divides, what it refuses, and that it is what a real model and cache then take."""

from types import SimpleNamespace
from typing import Any

import pytest

from headway.scheduler.spec import ModelSpec
from headway.workers import memory
from headway.workers.memory import GIB, KIB, MIB, DoesNotFitError, Layer, divide, layers_of

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


# ---------------------------------------------------------------- what a config says


def token_bytes(config: Any, dtype: str = "bfloat16", **how: Any) -> int:
    return sum(layer.token_bytes(dtype) for layer in layers_of(config, **how))


def test_what_a_token_costs() -> None:
    """Known sizes: 128 KiB for Llama-3-8B, 1152 bytes a layer for DeepSeek-V3's latents, 36 KiB for GPT-2."""
    assert token_bytes(LLAMA_8B) == 128 * KIB
    assert token_bytes(DEEPSEEK_V3) == 61 * (512 + 64) * 2
    assert token_bytes(DEEPSEEK_V3, latent=False) == 61 * 128 * (192 + 128) * 2
    assert token_bytes({"n_layer": 12, "n_head": 12, "n_embd": 768}) == 36 * KIB
    assert token_bytes(SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=64)) == 2 * 2 * 64 * 2


@pytest.mark.parametrize(("dtype", "share"), [("float32", 2.0), ("float16", 1.0), ("int8", 0.5 + 2 / (2 * 128))])
def test_what_a_dtype_saves(dtype: str, share: float) -> None:
    """int8: half of bfloat16, and one float16 scale for each 128 numbers."""
    assert token_bytes(LLAMA_8B, dtype) == share * token_bytes(LLAMA_8B)


def test_windows_are_known_layer_by_layer() -> None:
    base = {"num_attention_heads": 2, "hidden_size": 32, "num_hidden_layers": 3, "sliding_window": 64}
    assert [layer.window for layer in layers_of(base)] == [64, 64, 64]
    mixed = base | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert layers_of(mixed) == (Layer(2, 16, 16, 64), Layer(2, 16, 16), Layer(2, 16, 16, 64))


def test_a_config_that_does_not_say_is_named() -> None:
    with pytest.raises(KeyError, match="none of num_hidden_layers, n_layer"):
        layers_of({"hidden_size": 5})


# ---------------------------------------------------------------- dividing


def test_a_24_gib_card_under_an_8b_model() -> None:
    plan = divide(
        free_bytes=24 * GIB,
        weight_bytes=16_060_522_496,
        work_bytes=memory.work_of(LLAMA_8B).step_bytes("bfloat16", 2048, 64),
        token_bytes=128 * KIB,
        gather_bytes=4 * KIB,
        context_tokens=131072,
        max_num_seqs=64,
    )
    assert 0.88 * 24 * GIB < plan.total_bytes <= 0.9 * 24 * GIB
    assert 40_000 < plan.kv_tokens < 55_000
    assert [plan.requests_at(length) for length in memory.LENGTHS] == [
        plan.kv_tokens // 1024,
        plan.kv_tokens // 4096,
        1,
        0,
    ]
    assert plan.words().startswith("weights 15 GiB, work ")
    assert "of 4k, 1 of 32k; 24 GiB were free" in plan.words()


def test_weights_that_do_not_fit_are_refused_in_words() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"the weights \(15 GiB\) .* need more than 90% of the 8 GiB that are free"
    ):
        divide(free_bytes=8 * GIB, weight_bytes=15 * GIB, work_bytes=0)


def test_a_cache_that_does_not_fit_is_refused_and_told_what_would() -> None:
    sizes = {"free_bytes": 10 * GIB, "weight_bytes": 8 * GIB, "work_bytes": 0, "token_bytes": MIB}
    with pytest.raises(DoesNotFitError, match=r"kv_mib 4096 does not fit: 1 GiB are left"):
        divide(**sizes, kv_bytes=4 * GIB)
    assert divide(**sizes, kv_bytes=512 * MIB).kv_bytes == 512 * MIB
    assert divide(**sizes).kv_bytes == GIB  # 64 pages
    assert divide(**sizes, kv_bytes_max=100 * MIB).kv_bytes == 96 * MIB
    assert divide(**sizes, context_tokens=30, max_num_seqs=3).kv_tokens == 3 * 32  # no more than all could fill
    with pytest.raises(DoesNotFitError, match=r"0 B are left for the KV cache, not one page of 16 tokens"):
        divide(free_bytes=10, weight_bytes=9, work_bytes=0, token_bytes=1)
    with pytest.raises(DoesNotFitError, match="kv_mib 1 does not hold one page of 16 tokens"):
        divide(**sizes, kv_bytes=MIB)


def test_workers_that_load_beside_each_other_share_what_is_free() -> None:
    def plan(workers: int, free_bytes: int = 8 * GIB, cpu: bool = False) -> memory.MemoryPlan:
        return memory.plan_generate(
            ModelSpec(workers=workers),
            dtype="float16",
            free_bytes=free_bytes,
            weight_bytes=GIB,
            cached=memory.Cached(32 * KIB, 2 * KIB),
            work=memory.Work(0, 0),
            context_tokens=0,
            cpu=cpu,
        )

    assert plan(1).kv_bytes > 5 * GIB
    assert 2 * plan(2).total_bytes <= 0.9 * 8 * GIB
    assert plan(2).kv_bytes > 2 * GIB
    again = plan(2, free_bytes=2 * GIB)  # the other's part is gone from what is free
    assert 0.3 * GIB < again.kv_bytes < 0.45 * GIB
    assert plan(1, cpu=True).kv_bytes == GIB


@pytest.mark.parametrize(
    ("count", "words"), [(12, "12 B"), (4096, "4 KiB"), (1023 * MIB, "1023 MiB"), (25 * GIB, "25 GiB")]
)
def test_sizes_are_written_as_people_read_them(count: int, words: str) -> None:
    assert memory.size(count) == words


# ---------------------------------------------------------------- against what is there

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.wire import Params  # noqa: E402
from headway.workers import device  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.load import LoadError, load_model, weight_bytes  # noqa: E402
from tests import torch_models as tiny  # noqa: E402
from tests.live_memory import Live  # noqa: E402


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_what_a_config_says_is_what_a_model_is(name: str) -> None:
    """Weights to the byte, built without storage; a cached token to the byte, as the model's own forward makes it."""
    subject = tiny.engine(name)
    made = subject._runner.model
    held = sum(one.numel() * one.element_size() for one in [*made.parameters(), *made.buffers()])
    assert weight_bytes(made.config, "generate", torch.float32) == held
    cached = memory.cached_of(made.config, "float32")
    assert cached.token_bytes == subject._cache.bytes_per_token
    plan = subject._room.plan
    assert plan.kv_bytes == sum(store.numel() * store.element_size() for store in subject._cache.stores)
    assert plan.kv_tokens == subject.card.kv_tokens
    assert subject.card.facts["memory"] == plan.words()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "deepseek_v3"])
def test_the_plan_is_what_is_taken_within_a_tenth(name: str) -> None:
    """Full pages and a full step, in a model as wide for its vocabulary as real ones are."""
    wide = {"n_embd": 256, "n_layer": 6} if name == "gpt2" else {"hidden_size": 256, "intermediate_size": 704}
    made = tiny.model(name, vocab_size=2048, **wide)
    weights = weight_bytes(made.config, "generate", torch.float32)
    spec = ModelSpec(step_tokens=64, max_num_seqs=4, kv_mib=4, page_tokens=8)
    subject = GenerateEngine(spec, tiny.loaded(made, vocab_size=2048, weight_bytes=weights), pace=tiny.FullBudget())
    plan = subject._room.plan
    length = plan.kv_tokens // 4 - 40
    subject.add(1, tiny.items([([at * 7 % 2048 for at in range(length)], Params(max_new_tokens=40))] * 4))
    peak, used = 0, 0
    while subject.busy:
        with Live([*made.parameters(), *made.buffers(), *subject._cache.stores]) as live:
            used = max(used, subject.step()[0].kv_used)
        peak = max(peak, live.peak)
    assert used > 0.8 * plan.kv_tokens
    taken = weights + plan.kv_bytes + peak
    assert abs(plan.total_bytes - taken) <= 0.1 * taken, f"{plan.words()}; a step took {peak}"
    assert plan.work_bytes >= 0.8 * peak


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.model("llama").config.save_pretrained(tmp_path)  # and no weights at all
    (tmp_path / "model.safetensors").write_bytes(b"not even weights")
    monkeypatch.setattr("headway.workers.load.free_bytes", lambda _: 100 * KIB)
    with pytest.raises(LoadError, match=r"does not fit: the weights \(.*\) and one step .* need more than 90%"):
        load_model(ModelSpec(name="t", engine="generate", model=str(tmp_path), device="cpu"))
    with pytest.raises(LoadError, match=r"does not fit: the weights"):
        load_model(ModelSpec(name="t", engine="embed", model=str(tmp_path), device="cpu"))


def test_a_container_has_the_memory_of_its_limit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("4194304\n")
    (tmp_path / "memory.current").write_text("3145728\n")
    (tmp_path / "memory.stat").write_text("anon 2097152\ninactive_file 1048576\n")
    assert device.free_bytes(torch.device("cpu")) == 2 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_bytes(torch.device("cpu")) > 100 << 20
