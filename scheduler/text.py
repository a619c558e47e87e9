"""Text to ids and back: what a model's tokenizer and chat template do, without its model.

Lives here: encoding, decoding, chat rendering, and detokenising a stream without ever splitting a character. Never here:
torch or transformers (this belongs to the base install), limits on length (whoever calls has checked them), stop strings
(`stops.py`). Everything but TextStream may be used from several threads at once; the tokenizers library lets go of the
interpreter lock while it works.

A stream has two ways to find out which text is complete. Where tokens are bytes (byte-level BPE, plain bytes), each
token's bytes go through a UTF-8 decoder that keeps an unfinished character: exact, and constant work per token. For all
other tokenizers, whose text depends on neighbours (leading spaces, word pieces), a window of a few tokens is decoded
with and without the new ones, and the difference is the new text.
"""

import codecs
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from headway.scheduler import link
from headway.scheduler.clock import wall_s
from headway.scheduler.errors import HeadwayError
from headway.scheduler.wire import ChatMessage

MARK = "\ufffd"  # what an incomplete or invalid character decodes to
PENDING_MAX = 8  # tokens without a complete text; a character has 4 bytes at most, so past that it is garbage

Message = ChatMessage | Mapping[str, str]


class Vocabulary(Protocol):
    """A tokenizer. `piece` is the bytes of one token (b"" for a special one); it is None where tokens are not bytes."""

    piece: Callable[[int], bytes] | None

    def encode(self, text: str, special: bool) -> list[int]: ...

    def encode_pair(self, text: str, pair: str) -> tuple[list[int], list[int]]: ...

    def encode_batch(self, texts: Sequence[str], special: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...


class TextPlane:
    """What a worker's card says about text, ready to use. Raises HeadwayError `internal` for a tokenizer it cannot read."""

    def __init__(self, tokenizer: link.Tokenizer) -> None:
        self._vocabulary = _vocabulary(tokenizer)
        self._special = dict(tokenizer.special)
        self._template = _Template(tokenizer.chat_template) if tokenizer.chat_template else None
        self.kind = tokenizer.kind

    def __repr__(self) -> str:
        return f"<TextPlane {self.kind}{', chat' if self._template else ''}>"

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of `text`; `special` adds what the model wants around it (start token, [CLS], ...)."""
        return self._vocabulary.encode(text, special)

    def encode_pair(self, text: str, pair: str) -> tuple[list[int], list[int]]:
        """The ids of two texts with the special tokens of a pair: joined, the model's input; the cut is where the
        second segment begins (token type 1 for models that have types)."""
        return self._vocabulary.encode_pair(text, pair)

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
            raise _refused("this model has no chat template; send `prompt` or `input_ids`")
        turns = [dict(m) if isinstance(m, Mapping) else msgspec.structs.asdict(m) for m in messages]
        return self._template.render(turns, self._special)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `render_chat`. The template writes the start token itself, so none is added."""
        return self._vocabulary.encode(self.render_chat(messages), False)


def _refused(message: str) -> HeadwayError:
    return HeadwayError("invalid_request", message, field="messages")


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

    def encode_pair(self, text: str, pair: str) -> tuple[list[int], list[int]]:
        return list(text.encode()), list(pair.encode())

    def encode_batch(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [self.encode(text, special) for text in texts]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:  # noqa: ARG002
        return b"".join(map(_byte, ids)).decode("utf-8", "replace")


def _byte(token: int) -> bytes:
    return bytes((token,)) if 0 <= token < 256 else b""


class _Json:
    """A tokenizer.json of the tokenizers library. Its own padding and truncation are switched off: lengths are exact."""

    def __init__(self, data: str) -> None:
        self._fast = FastTokenizer.from_str(data)
        self._fast.no_padding()
        self._fast.no_truncation()
        self._hidden = frozenset(i for i, token in self._fast.get_added_tokens_decoder().items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self.piece: Callable[[int], bytes] | None = self._piece if _is_byte_level(json.loads(data)) else None

    def encode(self, text: str, special: bool) -> list[int]:
        return self._fast.encode(text, add_special_tokens=special).ids

    def encode_pair(self, text: str, pair: str) -> tuple[list[int], list[int]]:
        both = self._fast.encode(text, pair)
        kinds = zip(both.type_ids, both.sequence_ids, strict=True)
        cut = next((i for i, (type_id, sequence) in enumerate(kinds) if type_id == 1 or sequence == 1), len(both.ids))
        return both.ids[:cut], both.ids[cut:]

    def encode_batch(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [found.ids for found in self._fast.encode_batch(list(texts), add_special_tokens=special)]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special)

    def _piece(self, token: int) -> bytes:
        """The bytes of one token, kept: a vocabulary is finite."""
        known = self._pieces.get(token)
        if known is None:
            text = None if token in self._hidden else self._fast.id_to_token(token)
            known = b"" if text is None else _bytes_of(text)
            self._pieces[token] = known
        return known


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or [{}]
        return len(steps) == 1 and steps[0].get("type") == "ByteLevel"
    return bool(decoder.get("type") == "ByteLevel")


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


class TextStream:
    """The text of one answer, as its ids come. Used from one thread at a time.

    All pieces joined are `decode` of all ids without special tokens. A piece never ends inside a character, and has a
    U+FFFD only where the ids really hold one or hold invalid bytes; a last character that was never completed becomes
    one in `finish`. (One difference: where sentencepiece-like tokenizers turn a whole run of byte tokens into marks
    because its end is invalid, the characters that were complete before it, and were shown, stand.)
    """

    def __init__(self, plane: TextPlane) -> None:
        piece = plane.vocabulary.piece
        way = _ByteWay(piece) if piece is not None else _WindowWay(plane.decode)
        self.push: Callable[[Sequence[int]], str] = way.push
        self.finish: Callable[[], str] = way.finish


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
    """Tokens have neighbours: decode the window with and without what is new.

    `_ids[: _shown]` has been shown and stays only as context for what follows.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """New text; the work is bounded by the new ids and PENDING_MAX."""
        return "".join([self._push(ids[at : at + PENDING_MAX]) for at in range(0, len(ids), PENDING_MAX)])

    def finish(self) -> str:
        rest = self._new(len(self._ids))
        self._ids, self._shown = [], 0
        return rest

    def _push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._new(len(self._ids))
        if text and not text.endswith(MARK):
            return self._show(len(self._ids), text)
        if len(self._ids) - self._shown > PENDING_MAX:
            return self._force()
        return ""

    def _new(self, end: int) -> str:
        """The text of the ids up to `end` that has not been shown."""
        shown, all_of_it = self._decode(self._ids[: self._shown]), self._decode(self._ids[:end])
        if all_of_it.startswith(shown):
            return all_of_it[len(shown) :]
        return self._decode(self._ids[self._shown : end])  # shown text stands, whatever came after it

    def _show(self, end: int, text: str) -> str:
        del self._ids[: self._shown]
        self._shown = end - self._shown if False else len(self._ids) - 0
        return text

    def _force(self) -> str:
        return ""
