"""docs/engines.md: its example of an engine of one's own is run, and its answers are those of the model alone."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from headway.scheduler.link import Done, Item  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.custom import load_custom  # noqa: E402
from tests import torch_models as tiny  # noqa: E402
from tests.test_docs import ROOT, block_after  # noqa: E402

WORDS = {"[PAD]": 0, "[UNK]": 1} | {f"w{at}": at + 2 for at in range(100)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model that names some words."""
    made = tiny.encoder("Bert", "ForTokenClassification", id2label={0: "O", 1: "PER", 2: "LOC"})
    made.save_pretrained(tmp_path)
    fast = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    source = block_after((ROOT / "docs" / "engines.md").read_text(), "tagger")
    assert source.startswith("# tagger.py\n")
    (folder / "tagger.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    path = "tagger:Tagger"
    yield load_custom(path, ModelSpec(name="tagger", engine=path, options={"folder": str(folder)}))
    sys.modules.pop("tagger", None)


def alone(folder: Path, text: str) -> list[list[str]]:
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        best = model(torch.tensor([[WORDS[word] for word in text.split()]])).logits[0].argmax(-1).tolist()
    names = model.config.id2label
    return [[word, names[label]] for word, label in zip(text.split(), best, strict=True) if names[label] != "O"]


def test_the_example_answers_each_request_and_fails_a_bad_one_alone(engine: Any, folder: Path) -> None:
    texts = ["w1 w2 w3", " ".join(f"w{at}" for at in range(40)), "w7"]
    payloads: list[Any] = [{"text": texts[0]}, {"text": texts[1]}, "no map", {"text": ""}, {"text": texts[2]}]
    engine.add(1, [Item(rid, payload=msgspec.Raw(msgspec.msgpack.encode(one))) for rid, one in enumerate(payloads)])
    (done,) = engine.step()
    assert isinstance(done, Done)
    assert [outcome.code for outcome in done.outcomes] == ["", "", "engine_error", "engine_error", ""]
    assert done.outcomes[2].message.startswith("ValueError: send a map with a text")
    found = [msgspec.msgpack.decode(done.outcomes[at].value) for at in (0, 1, 4)]
    assert found == [alone(folder, text) for text in texts]
    assert found[1]
