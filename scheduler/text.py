"""Text to ids and back: what a model's tokenizer and chat template do, without its model.

Lives here: encoding, decoding, and detokenising a stream without ever splitting a character. Never here: torch or
transformers (this belongs to the base install), limits on length (whoever calls has checked them), chat templates
(`chat.py`), stop strings (`stops.py`). Everything but TextStream may be used from several threads at once; the
tokenizers library lets go of the interpreter lock while it works.

A stream has two ways to find out which text is complete. Where tokens are bytes (byte-level BPE, plain bytes), each
token's bytes go through a UTF-8 decoder that keeps an unfinished character: exact, and constant work per token. For all
other tokenizers, whose text depends on neighbours (leading spaces, word pieces), a window of a few tokens is decoded
with and without the new ones, and the difference is the new text.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from headway.scheduler import link
from headway.scheduler.chat import ChatTemplate, Message, refused
from headway.scheduler.errors import HeadwayError

_CHARACTER_BYTES_MAX = 4
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # how sentencepiece spells a byte
PENDING_MAX = 8  # tokens that wait for the end of a character, which has 4 bytes at most


class Encoded(NamedTuple):
    """The ids of an input, special tokens included. `second`: from where a second text begins; `cut`: whether tokens
    were left off."""

    first: list[int]
    second: list[int] = []  # noqa: RUF012 - never changed
    cut: bool = False


class Vocabulary(Protocol):
    """A tokenizer. `piece`: the bytes of one token (b"" for a special one), or None where tokens are not bytes.
    `visible`: the ids that have text: known, and not special. `unfinished`: whether these end inside a character."""

    piece: Callable[[int], bytes] | None

    def encode(self, text: str, special: bool) -> list[int]: ...

    def encode_pair(self, text: str, pair: str) -> Encoded: ...

    def encode_within(self, text: str, pair: str | None, limit: int) -> Encoded: ...

    def encode_batch(self, texts: Sequence[str], special: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def visible(self, ids: Sequence[int]) -> list[int]: ...

    def unfinished(self, ids: Sequence[int]) -> bool: ...


class TextPlane:
    """What a worker's card says about text, ready to use. HeadwayError `internal`: a tokenizer that cannot be read."""

    def __init__(self, tokenizer: link.Tokenizer) -> None:
        self._vocabulary = _vocabulary(tokenizer)
        source = tokenizer.chat_template
        self._template = ChatTemplate(source, tokenizer.special) if source else None
        self._start = self._start_of(tokenizer.special.get("bos_token", ""))
        self.kind = tokenizer.kind

    def __repr__(self) -> str:
        return f"<TextPlane {self.kind}{', chat' if self._template else ''}>"

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of `text`; `special` adds what the model wants around it (start token, [CLS], ...).

        A text that begins with the start token itself does not get a second one: models have not been trained on two.
        """
        ids = self._vocabulary.encode(text, special)
        return ids[1:] if special and self._start and ids[:2] == 2 * self._start else ids

    def _start_of(self, name: str) -> list[int]:
        """The start token, if this is its name and the tokenizer adds it to every text; else empty."""
        added, named = self._vocabulary.encode("", True)[:1], self._vocabulary.encode(name, False)
        return added if name and added == named else []

    def encode_pair(self, text: str, pair: str) -> Encoded:
        """The ids of two texts with the special tokens of a pair: joined, the model's input; the second begins where
        the second segment does (token type 1 for models that have types)."""
        return self._vocabulary.encode_pair(text, pair)

    def encode_within(self, text: str, pair: str | None, limit: int) -> Encoded:
        """The ids of one text or two, at most `limit` of them: what is too much is cut off at the end, of the longer
        text first, and the special tokens stay. As the tokenizers library truncates."""
        return self._vocabulary.encode_within(text, pair, limit)

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """`encode` for each text, in parallel where the library can."""
        return self._vocabulary.encode_batch(texts, special)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; unknown ids have none."""
        return self._vocabulary.decode(ids, skip_special)

    def stream(self) -> "TextStream":
        """A new stream of this model's text."""
        return TextStream(self)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt for a conversation, ready for the assistant's turn.

        Raises HeadwayError `invalid_request` if the model has no chat template or the template refuses the messages.
        """
        if self._template is None:
            raise refused("this model has no chat template; send `prompt` or `input_ids`")
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `render_chat`. The template writes the start token itself, so none is added."""
        return self._vocabulary.encode(self.render_chat(messages), False)


# ---------------------------------------------------------------- tokenizers


def _vocabulary(tokenizer: link.Tokenizer) -> Vocabulary:
    if tokenizer.kind == "bytes":
        return _Bytes()
    if tokenizer.kind != "json":
        raise HeadwayError("internal", f"a worker registered a tokenizer of unknown kind {tokenizer.kind!r}")
    try:
        return _Json(tokenizer.data.decode())
    except Exception as error:  # the library raises bare Exception
        raise HeadwayError("internal", f"a worker registered a tokenizer that cannot be read: {error}") from error


class _Bytes:
    """Ids 0..255 are UTF-8 bytes; there are no special tokens."""

    def __init__(self) -> None:
        self.piece: Callable[[int], bytes] | None = _byte

    def encode(self, text: str, special: bool) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def encode_pair(self, text: str, pair: str) -> Encoded:
        return Encoded(list(text.encode()), list(pair.encode()))

    def encode_within(self, text: str, pair: str | None, limit: int) -> Encoded:
        first, second = list(text.encode()), list((pair or "").encode())
        most = _shares(len(first), len(second), limit)
        return Encoded(first[: most[0]], second[: most[1]], most != (len(first), len(second)))

    def encode_batch(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [self.encode(text, special) for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:  # noqa: ARG002
        return b"".join(map(_byte, ids)).decode("utf-8", "replace")

    def visible(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if 0 <= token < 256]

    def unfinished(self, ids: Sequence[int]) -> bool:
        return _cut_short(b"".join(map(_byte, ids[-_CHARACTER_BYTES_MAX:])))


def _byte(token: int) -> bytes:
    return bytes((token,)) if 0 <= token < 256 else b""


class _Json:
    """A tokenizer.json of the tokenizers library. Its own padding and truncation are off: lengths are exact."""

    def __init__(self, data: str) -> None:
        self._fast = FastTokenizer.from_str(data)
        self._fast.no_padding()
        self._fast.no_truncation()
        self._hidden = frozenset(i for i, token in self._fast.get_added_tokens_decoder().items() if token.special)
        self._pieces: dict[int, bytes] = {}
        steps = _decoder_steps(json.loads(data))
        self._byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps
        self.piece: Callable[[int], bytes] | None = self._piece if steps == ["ByteLevel"] else None

    def encode(self, text: str, special: bool) -> list[int]:
        return self._fast.encode(text, add_special_tokens=special).ids

    def encode_pair(self, text: str, pair: str) -> Encoded:
        both = self._fast.encode(text, pair)
        second = _second(both)
        return Encoded(both.ids[:second], both.ids[second:])

    def encode_within(self, text: str, pair: str | None, limit: int) -> Encoded:
        whole = self._fast.encode(text, pair)
        ids, second = whole.ids, len(whole.ids) if pair is None else _second(whole)
        if len(ids) <= limit:
            return Encoded(ids[:second], ids[second:])
        places: tuple[list[int], list[int]] = ([], [])
        for place, sequence in enumerate(whole.sequence_ids):  # None: a special token of the template
            if sequence is not None:
                places[sequence].append(place)
        texts = len(places[0]) + len(places[1])
        most = _shares(len(places[0]), len(places[1]), max(0, limit - (len(ids) - texts)))
        off = {*places[0][most[0] :], *places[1][most[1] :]}
        kept = [place for place in range(len(ids)) if place not in off]
        return Encoded([ids[p] for p in kept if p < second], [ids[p] for p in kept if p >= second], True)

    def encode_batch(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [found.ids for found in self._fast.encode_batch(list(texts), add_special_tokens=special)]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special)

    def visible(self, ids: Sequence[int]) -> list[int]:
        known = self._fast.id_to_token
        return [token for token in ids if token not in self._hidden and known(token) is not None]

    def unfinished(self, ids: Sequence[int]) -> bool:
        tail = b""
        for token in reversed(ids):
            raw = self._raw(token)
            tail = raw + tail
            if not raw or len(tail) >= _CHARACTER_BYTES_MAX:
                break
        return _cut_short(tail)

    def _raw(self, token: int) -> bytes:
        """The bytes of a token that may be a part of a character; b"" if it is whole text."""
        if self._byte_level:
            return self._piece(token)
        text = (self._fast.id_to_token(token) or "") if self._byte_fallback else ""
        return bytes.fromhex(text[3:5]) if _BYTE_TOKEN.fullmatch(text) else b""

    def _piece(self, token: int) -> bytes:
        """The bytes of one token, kept: a vocabulary is finite."""
        known = self._pieces.get(token)
        if known is None:
            text = None if token in self._hidden else self._fast.id_to_token(token)
            known = b"" if text is None else _bytes_of(text)
            self._pieces[token] = known
        return known


def _second(both: Encoding) -> int:
    """Where the second segment of a pair begins."""
    kinds = zip(both.type_ids, both.sequence_ids, strict=True)
    return next((i for i, (type_id, sequence) in enumerate(kinds) if type_id == 1 or sequence == 1), len(both.ids))


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many of the tokens of two texts stay if there is room for so many: the longer one is cut first."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def _cut_short(data: bytes) -> bool:
    """Whether `data` ends inside a character that more bytes could complete."""
    return codecs.utf_8_decode(data, "replace", False)[1] < len(data)


def _decoder_steps(tokenizer: Mapping[str, Any]) -> list[str]:
    """The types of a tokenizer.json's decoders, in order."""
    decoder = tokenizer.get("decoder") or {}
    return [str(step.get("type")) for step in decoder.get("decoders", [decoder])]


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes are themselves, the others the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(text: str) -> bytes:
    """A byte-level token's bytes. One with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in text)
    except KeyError:
        return text.encode()


# ---------------------------------------------------------------- streams


class _Way(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """The text of one answer, as its ids come. Used from one thread at a time.

    All pieces joined are `decode` of all ids, without special tokens. A piece never ends inside a character, and has a
    U+FFFD only where the ids hold one or hold invalid bytes; a last character that was never completed becomes one in
    `finish`. Where a decoder would change text after the fact, what was shown stands: sentencepiece-like tokenizers
    turn a whole run of byte tokens into marks if its end is invalid, also the good characters before it.
    """

    def __init__(self, plane: TextPlane) -> None:
        piece = plane.vocabulary.piece
        self._way: _Way = _ByteWay(piece) if piece is not None else _WindowWay(plane.vocabulary)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; often none."""
        return self._way.push(ids)

    def finish(self) -> str:
        """What is left: "" or an incomplete character's mark."""
        return self._way.finish()


class _ByteWay:
    """Tokens are bytes: a UTF-8 decoder keeps what is unfinished."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._piece, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowWay:
    """Tokens have neighbours: decode a window with and without what is new.

    `_ids[:_shown]` is context, its text was shown; the rest waits to be complete. At most 2 * PENDING_MAX ids.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token) for token in self._vocabulary.visible(ids)])

    def finish(self) -> str:
        rest = self._new()
        self._ids, self._shown = [], 0
        return rest

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._new()
        finished = text and not self._vocabulary.unfinished(self._ids[self._shown :])
        if finished or len(self._ids) - self._shown > PENDING_MAX:
            self._shown, self._ids = len(self._ids) - self._shown, self._ids[self._shown :]
            return text
        return ""

    def _new(self) -> str:
        """The text of the window that has not been shown."""
        shown, whole = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if whole.startswith(shown):
            return whole[len(shown) :]
        return self._decode(self._ids[self._shown :])  # what was shown stands

    def _decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, False) if ids else ""
