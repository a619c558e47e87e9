"""Which way to run a model that cannot be packed: tried at start, on two texts that join and leave each other.

The reference is each text alone, in the manner of `generate`: with the model's own cache if that works at all, else
without. A way is taken only if every token of the trial has the logits that it has there, windows narrowed included.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.workers.generate.probe import Probe, probes, reason
from headway.workers.generate.rows import Afresh, Apart, Forward, Key, Together, Way
from headway.workers.generate.weights import PackedWeights, packed_if_right
from headway.workers.load import Loaded
from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")

ALONE: Key = (0, 0)
MEASURED = (4, 12)  # lengths of text between which the cost of a token is measured

# What is tried: text 1 decodes alone, is joined by text 0 which reads in two pieces, they change places, one leaves,
# the other goes on, and at last text 0 comes again. (text, end): it is read, or decoded, up to there.
READ, PIECE = {0: 8, 1: 4}, 6
ROUNDS = [[(1, 5)], [(0, 9), (1, 6)], [(1, 7), (0, 10)], [(1, 8)], [(0, 9)]]


def way_of(loaded: Loaded) -> tuple[Way, PackedWeights]:
    """The first way in which texts side by side are answered as each is alone, in the manner of `generate`: its own
    cache if that works at all. Raises LoadError if none is."""
    forward, checks = Forward(loaded), probes(loaded)
    ways: list[Callable[[], Way]] = [
        *(functools.partial(kind, forward, whole=whole) for kind in (Together, Apart) for whole in (False, True)),
        functools.partial(Afresh, forward),
    ]
    with torch.inference_mode():
        alone = [_alone(forward, probe) for probe in checks]
        for make in ways:
            check = functools.partial(_try_all, make, checks, alone)
            try:
                check()
            except Exception as error:  # a model's own code may raise anything
                log.info("%r does not work for this model: %s", make(), reason(error))
            else:
                return make(), packed_if_right(loaded.model, check)
    raise LoadError(f"{loaded.source} answers otherwise beside other texts than alone, in every way there is to run it")


def _alone(forward: Forward, probe: Probe) -> dict[tuple[int, int], Any]:
    """What `_try` should find: each text by itself, with the model's cache, or without if it has none that works."""
    try:
        with probe.applied():
            found = {}
            for text, read in READ.items():
                way, tokens = Apart(forward, whole=True), probe.texts[text]
                found[text, read] = way.read(ALONE, tokens[:read], 0)
                for end in sorted({end for step in ROUNDS for who, end in step if who == text}):
                    found[text, end] = way.decode([(ALONE, tokens[:end])])[0]
        return found
    except Exception as error:
        log.info("its cache is not used: %s", reason(error))
        return {(text, at + 1): row for text, rows in enumerate(probe.expected) for at, row in enumerate(rows)}


def _try_all(make: Callable[[], Way], checks: Sequence[Probe], alone: Sequence[dict[tuple[int, int], Any]]) -> None:
    for probe, expected in zip(checks, alone, strict=True):
        with probe.applied():
            _try(make(), probe, expected)


def _try(way: Way, probe: Probe, expected: dict[tuple[int, int], Any]) -> None:
    """Take both texts through ROUNDS. Raises DifferentError, or whatever the model raises."""
    read: set[int] = set()
    for step in ROUNDS:
        way.drop([(0, text) for text in read - {text for text, _ in step}])
        read &= {text for text, _ in step}
        for text in [text for text, _ in step if text not in read]:
            tokens, end = probe.texts[text], READ[text]
            cut = 0 if way.whole or text else PIECE
            if cut:
                way.read((0, text), tokens[:cut], 0)
            probe.same(way.read((0, text), tokens[:end], cut)[None], expected[text, end][None])
            read.add(text)
        made = way.decode([((0, text), probe.texts[text][:end]) for text, end in step])
        probe.same(made, torch.stack([expected[text, end] for text, end in step]))


def cost_of(way: Way) -> tuple[int, int]:
    """Bytes of a request's state: fixed, and for each token. Nothing where nothing is kept."""
    if not isinstance(way, Apart):
        return 0, 0
    sizes = []
    for length in MEASURED:
        with torch.inference_mode():
            way.read(ALONE, [1] * length, 0)
        sizes.append(way.bytes_of(ALONE))
        way.drop([ALONE])
    per_token = -(-(sizes[1] - sizes[0]) // (MEASURED[1] - MEASURED[0]))
    return max(0, sizes[0] - per_token * MEASURED[0]), per_token
