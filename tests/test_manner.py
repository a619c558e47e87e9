"""What a model says about generating with it: end tokens from three places, sampling values that count if wanted."""

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from headway.scheduler.params import NEUTRAL, Params, filled  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers import manner  # noqa: E402
from headway.workers.load import load_model  # noqa: E402
from tests import torch_models as tiny  # noqa: E402
from tests.live import live  # noqa: E402

WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "<|im_end|>", "hello", "world"]
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer(template: str | None = None) -> Any:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|end|>", "<|im_end|>"],
    )
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, None),
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}[{{ m.content }}] {% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.content }}{{ '<|end|>' if not loop.last else '</s>' }}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("always the same", None),
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_after_it(template: str | None, end: str | None) -> None:
    assert manner.turn_end(tokenizer(template)) == (None if end is None else WORDS.index(end))


def model(**generation: Any) -> Any:
    made = tiny.model("llama")
    made.generation_config = transformers.GenerationConfig(**generation)
    return made


def test_end_tokens_come_from_all_who_know_them() -> None:
    chat = tokenizer(CHATML)
    assert manner.ends_of(model(eos_token_id=[9, 3]), chat) == {
        9: "generation config",
        3: "generation config",
        2: "tokenizer",
        4: "chat template",
    }
    assert manner.ends_of(model(eos_token_id=4), chat) == {4: "generation config", 2: "tokenizer"}
    assert manner.ends_of(model(), None) == {}
    bare = model()
    bare.config.eos_token_id = 7
    assert manner.ends_of(bare, None) == {7: "config"}


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),  # without do_sample they mean nothing
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}, None),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "top_k": 5, "top_p": 1.5}, {"temperature": 1.0, "top_k": 5}),
    ],
)
def test_the_models_own_values(generation: dict[str, Any], defaults: dict[str, Any] | None) -> None:
    made = tiny.model("llama")
    made.generation_config = transformers.GenerationConfig()
    for name, value in generation.items():  # as a file may have it, valid or not
        setattr(made.generation_config, name, value)
    wanted = {name: value for name, value in generation.items() if name in NEUTRAL} if defaults is None else defaults
    assert manner.defaults_of(made) == wanted


def test_a_value_that_no_request_could_have_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = tiny.model("llama")
    made.generation_config.repetition_penalty = 0.0
    caplog.set_level(logging.WARNING, "headway.worker")
    assert manner.defaults_of(made) == {}
    assert "repetition_penalty 0.0, which is ignored" in caplog.text


def test_what_a_request_says_wins() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert filled(Params(), defaults) == Params(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert filled(Params(temperature=0.0, top_k=0, repetition_penalty=1.0), defaults) == Params(
        temperature=0.0, top_k=0, repetition_penalty=1.0
    )
    assert filled(Params(top_p=0.5), {}) == Params(top_p=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    made = model(do_sample=True, temperature=1.5, top_k=50, eos_token_id=3)
    made.save_pretrained(path)
    tokenizer(CHATML).save_pretrained(path)
    return path


def test_they_are_shown_always_and_count_only_if_wanted(folder: Path) -> None:
    spec = ModelSpec(name="tiny", engine="generate", model=str(folder), device="cpu", kv_mib=8)
    neutral, own = load_model(spec), load_model(spec.model_copy(update={"sampling_defaults": "model"}))
    assert neutral.eos == own.eos == {2, 3, 4}
    assert neutral.facts["eos"] == "3 <|end|>, 2 </s>, 4 <|im_end|>"
    assert neutral.facts["sampling"] == "temperature 1.5, top_k 50 (not applied: sampling_defaults is neutral)"
    assert neutral.defaults == {}
    assert own.facts["sampling"] == "temperature 1.5, top_k 50 (applied)"
    assert own.defaults == {"temperature": 1.5, "top_k": 50}


def test_a_left_out_parameter_has_the_models_value_where_the_operator_wants_it(folder: Path) -> None:
    keys = {"engine": "generate", "model": str(folder), "device": "cpu", "kv_mib": 8}
    with live(ModelSpec(name="own", sampling_defaults="model", **keys), ModelSpec(name="plain", **keys)) as server:
        client = server.client()

        def tokens(name: str, **params: Any) -> list[int]:
            shared = {"max_new_tokens": 12, "ignore_eos": True, **params}
            found = client.ask(type="generate", id="1", model=name, input_ids=[5, 6, 5], params=shared)["token_ids"]
            assert isinstance(found, list)
            return found

        greedy = tokens("plain")
        assert greedy == tiny.solo("llama", [5, 6, 5], 12)
        assert tokens("plain", temperature=0, seed=1) == tokens("own", temperature=0, seed=1) == greedy
        assert tokens("own", seed=1) == tokens("plain", seed=1, temperature=1.5, top_k=50) != greedy
        assert tokens("own", seed=1, top_k=1) == greedy
        assert tokens("plain", seed=1) == greedy
        client.send(type="info", id="i")
        facts = {one["name"]: one["facts"]["sampling"] for one in client.receive()["models"]}
        assert facts["own"].endswith("(applied)")
        assert "not applied" in facts["plain"]
