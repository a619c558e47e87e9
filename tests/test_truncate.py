"""Texts that are too long: refused unless somebody asked for a cut, cut as the tokenizers library cuts, and never in
silence. And prompts, which go before a text at the same place."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway.scheduler import link
from headway.scheduler.text import TextPlane
from tests.live import Raw
from tests.test_strange_worker import Played, card, stage

WORDS = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{at}": at + 3 for at in range(40)}
TEMPLATES: dict[str, dict[str, Any] | None] = {
    "bert": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"},
    "roberta": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] [SEP] $B [SEP]"},
    "none": None,
}


def tokenizer(template: str) -> Tokenizer:
    fast = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = TEMPLATES[template]
    if given is not None:
        fast.post_processor = processors.TemplateProcessing(special_tokens=[("[CLS]", 0), ("[SEP]", 1)], **given)
    return fast


def plane(template: str) -> TextPlane:
    return TextPlane(link.Tokenizer("json", tokenizer(template).to_str().encode()))


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{first + at}" for at in range(count))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("limit", [5, 6, 9, 12])
def test_a_cut_is_the_librarys_own(template: str, limit: int) -> None:
    subject, library = plane(template), tokenizer(template)
    library.enable_truncation(limit)
    for first in range(1, 12):
        ids, second, cut = subject.encode_within(words(first), None, limit)
        assert (ids, second) == (library.encode(words(first)).ids, [])
        assert cut == (len(subject.encode(words(first), special=True)) > limit)
        for other in range(1, 12):
            texts = words(first), words(other, 20)
            ids, second, cut = subject.encode_within(*texts, limit)
            expected = library.encode(*texts)
            assert ids + second == expected.ids, texts
            kept = subject.encode_pair(*texts)
            assert cut == (len(kept.first) + len(kept.second) > limit)
            if not cut:
                assert (ids, second) == (kept.first, kept.second)
            elif template == "bert":
                assert len(ids) == expected.type_ids.index(1)


def test_bytes_are_cut_as_well() -> None:
    subject = TextPlane(link.Tokenizer("bytes"))
    assert subject.encode_within("abcdef", None, 4) == ([*b"abcd"], [], True)
    assert subject.encode_within("abc", None, 4) == ([*b"abc"], [], False)
    assert subject.encode_within("abcdef", "gh", 5) == ([*b"abc"], [*b"gh"], True)
    assert subject.encode_within("abcdef", "ghijk", 5) == ([*b"abc"], [*b"gh"], True)


def served(kind: str, **changes: Any) -> link.Card:
    fast = link.Tokenizer("json", tokenizer("bert").to_str().encode())
    return card(kind, tokenizer=fast, max_input_tokens=6, **changes)


def ran(client: Raw, worker: Played, **message: Any) -> tuple[list[int], list[int], dict[str, Any]]:
    """The ids that reached the worker, and the usage the client was told."""
    client.send(id="1", **message)
    run = worker.hear()
    item = run.items[0]
    scores = {"score": 0.5} if message["type"] != "embed" else None
    vector = link.pack_floats([1.0]) if message["type"] == "embed" else None
    worker.say(link.Done(run.batch, 5, 6, [link.Outcome(item.rid, embedding=vector, scores=scores)]))
    return link.unpack_ids(item.ids), link.unpack_ids(item.ids_pair), client.ending("1")["usage"]


def test_a_request_may_ask_for_a_cut_or_forbid_it(tmp_path: Path) -> None:
    long = {"type": "embed", "text": words(9)}
    with stage(tmp_path, served("embed")) as (_, client, worker):
        refused = client.ask(id="r", **long)
        assert (refused["code"], refused["field"]) == ("too_long", "text")
        assert "the input has 11 tokens; the limit of model 'm' is 6" in refused["message"]
        assert client.ask(id="r", truncate=False, **long)["code"] == "too_long"
        ids, _, usage = ran(client, worker, truncate=True, **long)
        assert ids == [0, 3, 4, 5, 6, 1]
        assert usage == {"prompt_tokens": 6, "truncated": True}
        _, _, usage = ran(client, worker, truncate=True, type="embed", text="w1")
        assert usage == {"prompt_tokens": 3}
        assert client.ask(id="r", type="embed", input_ids=[5] * 7, truncate=True)["code"] == "too_long"


def test_an_operator_may_have_all_cut_and_a_request_forbid_it(tmp_path: Path) -> None:
    with stage(tmp_path, served("classify", truncate=True)) as (_, client, worker):
        ids, _, usage = ran(client, worker, type="classify", text=words(9))
        assert (len(ids), usage["truncated"]) == (6, True)
        assert client.ask(id="r", type="classify", text=words(9), truncate=False)["code"] == "too_long"


def test_of_a_pair_the_longer_text_is_cut(tmp_path: Path) -> None:
    with stage(tmp_path, served("score")) as (_, client, worker):
        pair = {"type": "score", "text": "w1", "text_pair": words(9, 20)}
        assert client.ask(id="r", **pair)["code"] == "too_long"
        first, second, usage = ran(client, worker, truncate=True, **pair)
        assert (first, second) == ([0, 4, 1], [23, 24, 1])
        assert usage == {"prompt_tokens": 6, "truncated": True}


def test_of_an_endless_text_only_the_beginning_is_looked_at(tmp_path: Path) -> None:
    with stage(tmp_path, served("embed")) as (_, client, worker):
        ids, _, usage = ran(client, worker, type="embed", text="w1 " * 2_000_000, truncate=True)
        assert (ids, usage["truncated"]) == ([0, 4, 4, 4, 4, 1], True)
        blank = client.ask(id="r", type="embed", text="w1" + " " * 1000 + "w2", truncate=True)
        assert (blank["code"], blank["field"]) == ("too_long", "text")
        assert "its first 192 characters have 3 tokens" in blank["message"]


def test_a_prompt_goes_before_the_text(tmp_path: Path) -> None:
    prompts = {"query": "w10 ", "plain": ""}
    with stage(tmp_path, served("embed", prompts=prompts | {"": "w11 "})) as (_, client, worker):
        for name, begins in ((None, [14]), ("query", [13]), ("plain", []), ("", [])):
            ids, _, _ = ran(client, worker, type="embed", text="w1", prompt_name=name)
            assert ids == [0, *begins, 4, 1]
        refused = client.ask(id="r", type="embed", text="w1", prompt_name="passage")
        assert (refused["code"], refused["field"]) == ("invalid_request", "prompt_name")
        assert "has no prompt 'passage'; there: plain, query" in refused["message"]
        refused = client.ask(id="r", type="embed", input_ids=[5], prompt_name="query")
        assert (refused["code"], refused["field"]) == ("invalid_request", "prompt_name")
        assert ran(client, worker, type="embed", input_ids=[5])[0] == [5]
