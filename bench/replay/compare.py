"""Two replays beside each other: by how much they differ, and whether that is more than chance.

Each figure is computed again from requests drawn with replacement, BOOTSTRAPS times, from each run; the interval holds
95 % of the ratios. One that holds 1 is called the same. Requests of one run are not independent of each other (those of
one burst share its fate), so they are drawn in blocks of neighbours. Sources: Efron and Tibshirani, An Introduction to
the Bootstrap, 13; Künsch, Annals of Statistics 17(3), 1989, for blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headway.bench.replay.output import Run
from headway.bench.sim.report import BEYOND_MIN

BOOTSTRAPS = 2000
BLOCKS_MIN = 20  # blocks that a run is cut into at least: fewer cannot be drawn from
BLOCK_MAX = 50
CELLS_MAX = 4_000_000  # drawn at once: 32 MB
LEVEL = 0.95
NEITHER = "in neither"

Floats = npt.NDArray[np.float64]
Figure = Callable[[Floats], Floats]  # rows of samples -> a number for each row


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure: in A, in B, B / A, and the interval of the ratio. `verdict`: lower, higher, the same, or why none."""

    figure: str
    a: float | None = None
    b: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""


def _mean(rows: Floats) -> Floats:
    return np.asarray(rows.mean(axis=1))


def _percentile(percent: float) -> Figure:
    return lambda rows: np.asarray(np.percentile(rows, percent, axis=1, method="inverted_cdf"))


def _needs(percent: float) -> int:
    """Samples that a percentile needs so that enough lie beyond it."""
    return int(np.ceil(BEYOND_MIN / (1 - percent / 100)))


FIGURES: dict[str, tuple[str, Figure, int]] = {
    f"{name}_{metric}_ms": (f"{metric}_ms", figure, needs)
    for metric in ("ttft", "tpot", "e2el", "queue")
    for name, figure, needs in (
        ("mean", _mean, 2),
        ("median", _percentile(50), _needs(50)),
        ("p95", _percentile(95), _needs(95)),
        ("p99", _percentile(99), _needs(99)),
    )
}


def compare(a: Run, b: Run, *, seed: int = 0) -> list[Difference]:
    """Every figure that both have, of requests that ended well; and how many did."""
    rng = np.random.default_rng([seed, 11])
    found = [
        judged(name, figure, needs, _samples(a, column), _samples(b, column), rng)
        for name, (column, figure, needs) in FIGURES.items()
    ]
    found.append(judged("completed_share", _mean, 1, _completed(a), _completed(b), rng))
    return [one for one in found if one.verdict != NEITHER]


def _completed(run: Run) -> Floats:
    return np.asarray([ending == "completed" for ending in run.requests["ending"]], np.float64)


def _samples(run: Run, column: str) -> Floats:
    """Of completed requests, in order of their times."""
    pairs: Sequence[tuple[Any, str]] = list(zip(run.requests[column], run.requests["ending"], strict=True))
    return np.asarray([value for value, ending in pairs if ending == "completed" and value is not None], np.float64)


def judged(
    name: str, figure: Figure, needs: int, a: Floats, b: Floats, rng: np.random.Generator, *, paired: bool = False
) -> Difference:
    """One figure of two sets of samples; `needs`: how many of them it takes. `paired`: they are of the same requests in
    the same order, and are drawn together."""
    of_a, of_b = (float(figure(samples[None, :])[0]) if len(samples) >= needs else None for samples in (a, b))
    if of_a is None or of_b is None:
        verdict = "too few samples" if len(a) and len(b) else "not in both" if len(a) or len(b) else NEITHER
        return Difference(name, of_a, of_b, verdict=verdict)
    if not of_a:
        return Difference(name, of_a, of_b, verdict="the same" if not of_b else "higher")
    low, high = _interval(figure, a, b, rng, paired)
    verdict = "the same" if low <= 1 <= high else "lower" if high < 1 else "higher"
    return Difference(name, round(of_a, 6), round(of_b, 6), round(of_b / of_a, 4), low, high, verdict)


def _interval(figure: Figure, a: Floats, b: Floats, rng: np.random.Generator, paired: bool) -> tuple[float, float]:
    """Of B / A."""
    seeds = rng.integers(1 << 62, size=2)
    rngs = [np.random.default_rng(seeds[0 if paired else at]) for at in (0, 1)]
    drawn = [
        np.concatenate([figure(rows) for rows in _drawn(samples, each)])
        for samples, each in zip((a, b), rngs, strict=True)
    ]
    some = drawn[0] > 0
    ratios = drawn[1][some] / drawn[0][some]
    if not len(ratios):
        return 0.0, float("inf")
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return round(float(low), 4), round(float(high), 4)


def _drawn(samples: Floats, rng: np.random.Generator) -> Sequence[Floats]:
    """BOOTSTRAPS runs made of blocks of this one, a part at a time."""
    count = len(samples)
    block = max(1, min(BLOCK_MAX, count // BLOCKS_MIN))
    blocks = -(-count // block)
    at_once = max(1, CELLS_MAX // (blocks * block))
    parts = []
    for done in range(0, BOOTSTRAPS, at_once):
        starts = rng.integers(0, count - block + 1, (min(at_once, BOOTSTRAPS - done), blocks))
        places = (starts[:, :, None] + np.arange(block)).reshape(len(starts), -1)[:, :count]
        parts.append(samples[places])
    return parts
