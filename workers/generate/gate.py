"""The gate before keys and values are stored in fewer bits than the model computes: does it still say the same?

Probe texts are read and continued twice, through pages that keep what the model computes and through pages that keep
less, along the first one's words. Where the second's first tokens are not among the first one's best, the model does
not stand it, and is refused: the operator asked for that dtype, so nothing else is served in its place in silence.
"""

import logging
from collections.abc import Sequence
from typing import Any

import tokenizers
import torch

from headway.workers.generate.pages import PagedCache
from headway.workers.generate.plan import Span
from headway.workers.generate.runner import Runner
from headway.workers.load import Loaded
from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")

TOP = 5
AGREE_MIN = 0.85  # of the best five, on average: real models in int8 keep 0.95 and more, a broken one half
CONTINUED = 12  # tokens answered to each probe: errors in the cache add up with each that is read
PAGE = 16
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(first, second):\n    return first + second\n\n\ndef multiply(first, second):\n",
    "Once upon a time there was a little girl who lived near the forest. Every morning she",
    "1, 2, 3, 5, 8, 13, 21, 34,",
)
ID_PROBES, ID_PROBE_TOKENS = 4, 24  # of a model without a tokenizer


def check_kv_dtype(runner: Runner, loaded: Loaded, dtype: Any) -> str:
    """How far a cache of `dtype` agrees with the model's own, in words. Raises LoadError if not far enough."""
    name = str(dtype).removeprefix("torch.")
    shares = [share for ids in _probes(loaded) for share in _agreements(runner, ids, dtype)]
    agree = sum(shares) / len(shares)
    said = f"{agree:.1%} of the best {TOP} tokens kept over {len(shares)} probes"
    if agree < AGREE_MIN:
        raise LoadError(
            f"{loaded.source} does not stand a KV cache of {name}: {said}, {AGREE_MIN:.0%} are needed; "
            "set kv_dtype: auto, or another"
        )
    log.info("kv_dtype %s: %s", name, said)
    return f"{name}, {said}"


def _probes(loaded: Loaded) -> list[list[int]]:
    if loaded.tokenizer is not None:
        tokenizer = tokenizers.Tokenizer.from_str(loaded.tokenizer.data.decode())
        probes = [tokenizer.encode(text).ids for text in TEXTS]
    else:
        at = iter(range(1, 1 + ID_PROBES * ID_PROBE_TOKENS))
        probes = [[next(at) * 7919 % loaded.vocab_size for _ in range(ID_PROBE_TOKENS)] for _ in range(ID_PROBES)]
    longest = max(1, (loaded.context_tokens or ID_PROBE_TOKENS + CONTINUED) - CONTINUED)
    return [ids[:longest] for ids in probes if ids] or [[0]]


@torch.inference_mode()
def _agreements(runner: Runner, ids: Sequence[int], dtype: Any) -> list[float]:
    """For each token answered: the share of the own best that are among the other's best."""
    pages = list(range(-(-(len(ids) + CONTINUED) // PAGE)))
    own = PagedCache(len(pages) * PAGE)
    other = PagedCache(len(pages) * PAGE, dtype)
    tokens, written, shares = list(ids), 0, []
    for _ in range(CONTINUED):
        span = Span(tokens[written:], written, pages, last=True)
        decode, prefill = ([span], []) if len(span.ids) == 1 else ([], [span])
        plans = [runner.plan(decode, prefill, PAGE) for _ in range(2)]
        wanted, got = (runner.run(plan, cache)[-1].float() for plan, cache in zip(plans, (own, other), strict=True))
        best = wanted.topk(min(TOP, len(wanted))).indices.tolist()
        kept = set(got.topk(len(best)).indices.tolist()) if bool(torch.isfinite(got).all()) else set()
        shares.append(sum(token in kept for token in best) / len(best))
        written = len(tokens)
        tokens.append(best[0])
    return shares
