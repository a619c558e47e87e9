"""The classify and score engines against plain Transformers, text by text: labels, activations, pairs, padding."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from headway.scheduler import link  # noqa: E402
from headway.scheduler.link import Done, Failed, Item, pack_ids  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.classify import classify_engine  # noqa: E402
from headway.workers.load import LoadError  # noqa: E402
from headway.workers.process import make_engine  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

HEAD = "ForSequenceClassification"
DECODER = {"num_key_value_heads": 2, "head_dim": 8, "num_labels": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"num_labels": 3}),
    "roberta": ("Roberta", {"num_labels": 3, "pad_token_id": 1}),
    "distilbert": ("DistilBert", {"num_labels": 3, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "modernbert": ("ModernBert", {"num_labels": 3, "pad_token_id": 0, "local_attention": 8}),
    "qwen3, pad 0": ("Qwen3", DECODER | {"pad_token_id": 0}),
    "qwen3, pad is end": ("Qwen3", DECODER | {"pad_token_id": 7, "eos_token_id": 7}),
    "qwen3, end but no pad": ("Qwen3", DECODER | {"eos_token_id": 7}),
    "qwen3, neither": ("Qwen3", DECODER),
    "qwen3, pad that is none": ("Qwen3", DECODER | {"pad_token_id": -1}),
    "bart": (
        "Bart",
        {"num_labels": 3, "d_model": 32, "pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None},
    ),
}
SMALL = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def classifier(name: str, **changes: Any) -> Any:
    family, config = FAMILIES[name]
    return tiny.encoder(family, HEAD, **config | (SMALL if name == "bart" else {}) | changes)


def engine(made: Any, kind: str = "classify", **changes: Any) -> Any:
    spec = {key: changes.pop(key) for key in list(changes) if key in ModelSpec.model_fields}
    end = made.config.eos_token_id
    eos = frozenset() if end is None else frozenset({end})
    return classify_engine(ModelSpec(name="m", engine=kind, **spec), tiny.loaded(made, eos=eos, **changes))


def items(wanted: list[list[int]]) -> list[Item]:
    return [Item(10 + at, ids=pack_ids(ids)) for at, ids in enumerate(wanted)]


def logits(made: Any, ids: list[int], **inputs: Any) -> Any:
    """The oracle: one text alone, no padding, nothing of ours."""
    with torch.inference_mode():
        return made(input_ids=torch.tensor([ids]), **inputs).logits[0]


def scores(subject: Any, wanted: list[Item]) -> list[list[float]]:
    return [list((outcome.scores or {}).values()) for outcome in tiny.outcomes(subject, wanted)]


def wanted_for(name: str) -> list[list[int]]:
    """Texts of all lengths; for decoders also some that end with what may be taken for padding."""
    wanted = tiny.texts(11, longest=50)
    if name == "bart":  # it reads the last end token, and each text of a batch must have as many of them
        return [[token for token in ids if token not in (1, 2)] + [2] * (1 + at % 2) for at, ids in enumerate(wanted)]
    return [*wanted, [5, 9, 7], [5, 9, 0], [5, 9, 7, 7], [7], [0, 0], [3, 4, 1, 1]]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gives_the_scores_of_each_text_alone(name: str) -> None:
    made, wanted = classifier(name), wanted_for(name)
    expected = [logits(made, ids).softmax(-1).tolist() for ids in wanted]
    subject = engine(classifier(name))
    for found, alone in zip(scores(subject, items(wanted)), expected, strict=True):
        assert found == pytest.approx(alone, abs=1e-5)
    assert max(apart(one, expected[0]) for one in expected) > 0.01  # the texts do differ


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["bert", "qwen3, neither"])
def test_classifiers_do_share_a_rectangle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = classifier(name)
    subject = engine(made)
    shapes: list[tuple[int, ...]] = []
    plain = made.forward

    def watched(input_ids: Any, **inputs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return plain(input_ids, **inputs)

    monkeypatch.setattr(made, "forward", watched)
    scores(subject, items([[5] * 9, [6] * 10, [7] * 10]))
    assert sum(rows for rows, _ in shapes) == 3
    assert max(rows for rows, _ in shapes) > 1


@pytest.mark.parametrize(
    ("config", "asked", "function"),
    [
        ({"num_labels": 3}, "auto", lambda x: x.softmax(-1)),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, "auto", lambda x: x.softmax(-1)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "auto", torch.sigmoid),
        ({"num_labels": 3, "problem_type": "regression"}, "auto", lambda x: x),
        ({"num_labels": 1}, "auto", torch.sigmoid),
        ({"num_labels": 3}, "none", lambda x: x),
        ({"num_labels": 3}, "sigmoid", torch.sigmoid),
    ],
)
def test_what_the_logits_go_through(config: dict[str, Any], asked: str, function: Any) -> None:
    made = tiny.encoder("Bert", HEAD, **config)
    (found,) = scores(engine(made, activation=asked), items([[1, 2, 3]]))
    assert found == pytest.approx(function(logits(made, [1, 2, 3])).tolist(), abs=1e-5)


def test_scores_have_the_names_of_the_labels() -> None:
    made = tiny.encoder("Bert", HEAD, id2label={0: "bad", 1: "so-so", 2: "good"})
    subject = engine(made)
    (outcome,) = tiny.outcomes(subject, items([[1, 2]]))
    assert outcome.scores is not None
    assert list(outcome.scores) == ["bad", "so-so", "good"]
    assert (subject.card.kind, subject.card.facts["labels"], subject.card.max_input_tokens) == ("classify", "3", 60)
    with pytest.raises(LoadError, match="two labels named 'same'"):
        engine(tiny.encoder("Bert", HEAD, id2label={0: "same", 1: "same"}))


# ---------------------------------------------------------------- pairs


def pair_tokenizer(*, types: bool = True) -> link.Tokenizer:
    vocabulary = {"[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{at}": at for at in range(4, tiny.VOCAB)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if types else "[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return link.Tokenizer("json", fast.to_str().encode())


def pairs(count: int = 7) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(3)
    word = lambda: rng.randrange(4, tiny.VOCAB)  # noqa: E731
    return [
        ([1, *(word() for _ in range(rng.randint(1, 20))), 2], [*(word() for _ in range(rng.randint(1, 30))), 2])
        for _ in range(count)
    ]


@pytest.mark.parametrize(("family", "types"), [("Bert", True), ("Bert", False), ("Roberta", False), ("Qwen3", True)])
def test_a_pair_has_the_score_of_the_pair_alone(family: str, types: bool) -> None:
    extra = {"Roberta": {"pad_token_id": 1}, "Qwen3": DECODER}.get(family, {"type_vocab_size": 2})
    made = tiny.encoder(family, HEAD, **extra | {"num_labels": 1})
    typed = types and family == "Bert"
    expected = []
    for first, second in pairs():
        kinds = {"token_type_ids": torch.tensor([[0] * len(first) + [1] * len(second)])} if typed else {}
        expected.append(torch.sigmoid(logits(made, first + second, **kinds)).tolist())
    subject = engine(made, "score", tokenizer=pair_tokenizer(types=types))
    wanted = [Item(at, ids=pack_ids(one), ids_pair=pack_ids(two)) for at, (one, two) in enumerate(pairs())]
    found = tiny.outcomes(subject, wanted)
    assert [list(outcome.scores) for outcome in found] == [["score"]] * len(wanted)
    for outcome, alone in zip(found, expected, strict=True):
        assert [outcome.scores["score"]] == pytest.approx(alone, abs=1e-5)


def test_a_tokenizer_that_leaves_types_out_is_followed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_input_names": ["input_ids", "attention_mask"]}')
    made = tiny.encoder("Bert", HEAD, type_vocab_size=2, num_labels=1)
    subject = engine(made, "score", tokenizer=pair_tokenizer(), source=str(tmp_path))
    (found,) = scores(subject, [Item(1, ids=pack_ids([1, 5, 2]), ids_pair=pack_ids([6, 2]))])
    assert found == pytest.approx(torch.sigmoid(logits(made, [1, 5, 2, 6, 2])).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "function"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, torch.sigmoid),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, torch.tanh),
    ],
)
def test_a_cross_encoders_activation_is_the_one_it_names(config: dict[str, Any], function: Any) -> None:
    made = tiny.encoder("Bert", HEAD, num_labels=1, **config)
    (found,) = scores(engine(made, "score"), items([[1, 2, 3]]))
    assert found == pytest.approx(function(logits(made, [1, 2, 3])).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_labels": 3}, "has 3 labels; the score engine needs a head with one"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "their.code.Odd"}}, "names their.code.Odd as"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Softplus"}}, "choose one with --activ"),
    ],
)
def test_a_head_that_is_no_relevance_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        engine(tiny.encoder("Bert", HEAD, **config), "score")


# ---------------------------------------------------------------- what goes wrong


def test_a_bad_text_fails_alone() -> None:
    made = classifier("bert")
    subject = engine(made)
    made.bert.embeddings.word_embeddings.weight.data[7] = float("nan")
    wanted = [[5, 6], [5, tiny.VOCAB], [1] * 61, [], [5, 7], [8, 9]]
    found = tiny.outcomes(subject, items(wanted))
    codes = ["", "invalid_request", "too_long", "invalid_request", "engine_error", ""]
    assert [outcome.code for outcome in found] == codes
    assert "61 tokens; the limit is 60" in found[2].message
    for at in (0, 5):
        alone = logits(made, wanted[at]).softmax(-1).tolist()
        assert list(found[at].scores.values()) == pytest.approx(alone, abs=1e-5)


class Touchy:
    """A forward that raises for a rectangle with a token in it, or that is too large."""

    def __init__(self, made: Any, token: int = -1, cells_max: int = 1 << 30) -> None:
        self.calls = 0
        self._plain, self._token, self._cells_max = made.forward, token, cells_max

    def __call__(self, input_ids: Any, **inputs: Any) -> Any:
        self.calls += 1
        if bool((input_ids == self._token).any()):
            raise ValueError("touched")
        if input_ids.numel() > self._cells_max:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._plain(input_ids, **inputs)


def test_a_rectangle_that_raises_is_halved_until_the_culprit_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = classifier("bert")
    subject = engine(made)
    touchy = Touchy(made, token=99)
    monkeypatch.setattr(made, "forward", touchy)
    wanted = [[8 + at] * 10 for at in range(16)]
    wanted[5] = [99] * 10
    found = tiny.outcomes(subject, items(wanted))
    assert [outcome.code for outcome in found] == ["engine_error" if at == 5 else "" for at in range(16)]
    assert found[5].message == "ValueError: touched"
    assert touchy.calls == 1 + 2 * 4


def test_a_batch_in_which_all_fail_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = classifier("bert")
    subject = engine(made)
    monkeypatch.setattr(made, "forward", Touchy(made, token=99))
    subject.add(1, items([[99], [99, 4]]))
    (failed,) = subject.step()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message) == ("engine_error", "ValueError: touched")


def test_memory_that_does_not_reach_is_used_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = classifier("bert")
    subject = engine(made)
    touchy = Touchy(made, cells_max=45)
    monkeypatch.setattr(made, "forward", touchy)
    wanted = items([[8 + at] * 10 for at in range(8)])
    assert [outcome.code for outcome in tiny.outcomes(subject, wanted)] == [""] * 8
    assert touchy.calls == 3  # eight, then twice four
    tiny.outcomes(subject, wanted)
    assert touchy.calls == 5  # the ceiling was learned


def test_a_lost_device_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made = classifier("bert")
    subject = engine(made)

    def lost(**_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(made, "forward", lost)
    subject.add(1, items([[1], [2]]))
    with pytest.raises(RuntimeError, match="device-side"):
        subject.step()


def test_a_model_whose_answers_padding_changes_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    made = tiny.encoder("FNet", HEAD, num_labels=3)  # it mixes all tokens, and knows no attention mask
    wanted = tiny.texts(9, longest=20) + tiny.texts(9, longest=20)
    expected = [logits(made, ids).softmax(-1).tolist() for ids in wanted]
    subject = engine(made)
    assert "padding changes the answers of this model" in caplog.text
    assert subject.card.facts["padding"].startswith("none")
    for found, alone in zip(scores(subject, items(wanted)), expected, strict=True):
        assert found == pytest.approx(alone, abs=1e-5)


def test_tokens_are_counted_with_their_padding() -> None:
    subject = engine(classifier("bert"))
    subject.add(1, items([[5] * 9, [6] * 3, [7] * 10, [], [8] * 2]))
    (done,) = subject.step()
    assert isinstance(done, Done)
    assert 24 <= done.tokens <= 40
    assert done.compute_ns > 0


def test_a_folder_is_loaded_and_served(tmp_path: Path) -> None:
    made = classifier("bert", id2label={0: "no", 1: "yes", 2: "maybe"})
    made.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(pair_tokenizer().data)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    subject = make_engine(ModelSpec(engine="classify", model=str(tmp_path), device="cpu", truncate="cut"))
    assert (subject.card.name, subject.card.truncate, subject.card.padded) == (tmp_path.name, True, True)
    assert subject.card.tokenizer is not None
    (found,) = scores(subject, items([[1, 9, 8, 2]]))
    assert found == pytest.approx(logits(made, [1, 9, 8, 2]).softmax(-1).tolist(), abs=1e-5)
