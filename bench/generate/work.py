"""What is asked of every way of generating, and what is made of its answers.

The same requests for all: prompts of made-up English of an exact number of tokens, an exact number of new tokens each,
greedy, ends of texts ignored. An answer is when it was sent and when each of its tokens came; percentiles of gaps are
over all gaps of all answers.
"""

import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.scheduler import clock

WORDS = (
    *("the", "a", "one", "of", "and", "to", "in", "on", "at", "by", "with", "from", "over", "under", "river", "stone"),
    *("light", "house", "garden", "bread", "water", "letter", "winter", "summer", "morning", "evening", "train"),
    *("bridge", "market", "window", "paper", "music", "story", "captain", "doctor", "teacher", "child", "friend"),
    *("road", "hill", "forest", "cloud", "engine", "number", "question", "answer", "reason", "colour", "silver"),
    *("golden", "quiet", "sudden", "gentle", "heavy", "narrow", "open", "early", "late", "walked", "carried"),
    *("found", "opened", "wrote", "counted", "asked", "began", "turned", "followed", "waited", "built", "crossed"),
)


class Work(msgspec.Struct, frozen=True):
    """One request: `text` is `ids` in words, `new` the tokens to be generated."""

    text: str
    ids: list[int]
    new: int


class Answer(msgspec.Struct, frozen=True):
    """`stamps_ns`: when each token came (several in one message: the same time); `tokens` where the way tells them."""

    sent_ns: int
    stamps_ns: list[int]
    tokens: list[int] = []


class Job(msgspec.Struct):
    """What `plain` is told to run. `way`: solo, static or continuous."""

    way: str
    work: list[Work]
    concurrency: int


class Done(msgspec.Struct):
    """What it answers, in the order of the work."""

    answers: list[Answer]


class Run(msgspec.Struct, frozen=True):
    """One way, once through the work. `threads`: CPU threads it may compute with. Nothing is reported as None: 0."""

    way: str
    concurrency: int
    threads: int
    requests: int
    tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    gap_p99_ms: float
    cpu_ms_per_token: float
    memory_mib: int


def make(folder: Path, count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int) -> list[Work]:
    """`count` requests; lengths drawn evenly from the two ranges, ends included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        wanted = rng.randint(*prompt)
        ids = tokenizer.encode(" ".join(rng.choices(WORDS, k=2 * wanted))).ids[:wanted]
        text = tokenizer.decode(ids)
        made.append(Work(text, tokenizer.encode(text).ids, rng.randint(*output)))
    return made


def gaps_ms(answers: Iterable[Answer]) -> list[float]:
    """Times between tokens of the same answer."""
    return [
        (after - before) / clock.NS_PER_MS
        for answer in answers
        for before, after in zip(answer.stamps_ns, answer.stamps_ns[1:], strict=False)
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[max(0, -(-round(len(values) * percent) // 100) - 1)]


def run_of(
    way: str, concurrency: int, threads: int, answers: Sequence[Answer], wall_ns: int, cpu_s: float, memory_mib: int
) -> Run:
    """The numbers of one run."""
    tokens = sum(len(answer.stamps_ns) for answer in answers)
    first = [(answer.stamps_ns[0] - answer.sent_ns) / clock.NS_PER_MS for answer in answers]
    gaps = gaps_ms(answers)
    return Run(
        way=way,
        concurrency=concurrency,
        threads=threads,
        requests=len(answers),
        tokens=tokens,
        wall_s=wall_ns / clock.NS_PER_S,
        tokens_per_s=tokens * clock.NS_PER_S / wall_ns,
        ttft_p50_ms=percentile(first, 50),
        ttft_p95_ms=percentile(first, 95),
        gap_p50_ms=percentile(gaps, 50),
        gap_p95_ms=percentile(gaps, 95),
        gap_p99_ms=percentile(gaps, 99),
        cpu_ms_per_token=1000 * cpu_s / tokens,
        memory_mib=memory_mib,
    )


def median_of(runs: Sequence[Run]) -> Run:
    """Of runs of the same way and concurrency: the median of each number by itself."""
    fields: dict[str, Any] = {}
    for name in Run.__struct_fields__:
        values = [getattr(run, name) for run in runs]
        fields[name] = values[0] if isinstance(values[0], str) else type(values[0])(statistics.median(values))
    return Run(**fields)
