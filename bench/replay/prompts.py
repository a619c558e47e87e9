"""Prompts of an exact number of tokens, made up from a seed.

Token ids are drawn from 32 to 126: in a tokenizer of bytes they are printable characters, in the vocabulary of nearly
any model ordinary pieces of words, and never one of the special tokens at its beginning. Text is made of words that
are one token each to the tokenizer that is given, and counted with it before it is sent.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headway.scheduler.config import ConfigError

LOWEST, HIGHEST = 32, 127  # ids that are drawn: LOWEST to HIGHEST - 1
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "that",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
    "at",
)
BYTES = "bytes"  # a tokenizer for which a byte is a token
TRIES_MAX = 64  # corrections of a text whose words are not one token each when they meet

Text = Callable[[int, int], str]


def ids(index: int, tokens: int, seed: int = 0) -> list[int]:
    """`tokens` ids that depend on `index` and `seed` only."""
    found: list[int] = np.random.default_rng([seed, 8, index]).integers(LOWEST, HIGHEST, tokens).tolist()
    return found


def plain(index: int, tokens: int) -> str:
    """About as many tokens: so many common words, where no tokenizer is there to count with."""
    return " ".join(WORDS[(index + place) % len(WORDS)] for place in range(tokens))


def texts(tokenizer: str, seed: int = 0) -> Text:
    """What makes a text of so many tokens: (index, tokens) -> text. `tokenizer`: a tokenizer.json, or `bytes`. Raises
    ConfigError."""
    if tokenizer == BYTES:
        return lambda index, tokens: bytes(ids(index, tokens, seed)).decode("ascii")
    path = Path(tokenizer)
    if not path.is_file():
        raise ConfigError(f"--tokenizer {tokenizer}: no such file; give the model's tokenizer.json, or {BYTES!r}")
    try:
        known = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"--tokenizer {tokenizer}: not a tokenizer.json: {error}") from None

    def count(text: str) -> int:
        return len(known.encode(text, add_special_tokens=True).ids)

    words = [word for word in WORDS if count(f"of {word}") - count("of") == 1]
    if not words:
        raise ConfigError(f"--tokenizer {tokenizer}: none of {len(WORDS)} common words is one token; send input_ids")

    def text(index: int, tokens: int) -> str:
        """Words until the count is right; shorter than what the tokenizer adds itself it cannot be."""
        rng = np.random.default_rng([seed, 9, index])
        chosen = [words[place] for place in rng.integers(0, len(words), max(1, tokens))]
        for _ in range(TRIES_MAX):
            over = count(" ".join(chosen)) - tokens
            if not over or (over > 0 and len(chosen) == 1):
                break
            chosen = chosen[: max(1, len(chosen) - over)] if over > 0 else chosen + [words[0]] * -over
        return " ".join(chosen)

    return text
