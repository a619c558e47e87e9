"""A Transformers model made to run plans, after it has shown that it answers as before.

The model's own forward is the reference: a short probe is computed once as the model came, and again packed, in
pieces, through pages. If the two disagree, or the model does not go through the registered attention at all, it is
refused here, at start, rather than served wrongly. The same runs teach the size of a token in the cache and the first
cost estimate.
"""

import importlib.util
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch

from headway.scheduler import clock
from headway.workers.generate import attention
from headway.workers.generate.pages import PagedCache
from headway.workers.generate.plan import Plan, Span
from headway.workers.generate.weights import PackedWeights
from headway.workers.load import Loaded
from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")

NAMES = {
    "sdpa": attention.NAME,
    "eager": attention.EAGER_NAME,
    "flash_attention_2": attention.FLASH_NAME,
}
PROBE_TOKENS = 12  # read in three steps; long enough for a wrong mask or position to show
PROBE_PAGE = 4
EXACT_ERROR = 1e-3  # float32: of the largest logit; rounding stays 100x below, a wrong mask far above
HALF_LIKENESS = 0.95  # half precision: cosine of the logits; rounding in deep models reaches 0.99
WARM_ROWS, WARM_TOKENS = 8, 64  # the two larger steps that are timed beside a step of one token


class Runner:
    """Runs plans on `loaded.model`. `attention` is the kind that is active, as checked.

    `asked`: auto, or a key of NAMES. Auto takes FlashAttention-2 where it is installed, on CUDA and in half precision,
    and SDPA otherwise. Raises LoadError if the model cannot be run packed, saying why.
    """

    def __init__(self, loaded: Loaded, asked: str = "auto") -> None:
        self.model = loaded.model
        self.device = loaded.device
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        attention.register()
        ids = [(index * 7919 + 1) % loaded.vocab_size for index in range(PROBE_TOKENS)]
        ids = ids[: loaded.context_tokens or PROBE_TOKENS]
        expected = self._stock(ids, loaded.source)
        self.attention, self.pattern = self._first_that_works(_kinds(asked, loaded), ids, expected, loaded)
        self.weights = self._packed_weights(ids, expected)

    def __repr__(self) -> str:
        return f"<Runner {type(self.model).__name__}, packed {self.attention}>"

    @property
    def flash(self) -> bool:
        return self.attention == "flash_attention_2"

    def plan(self, decode: Sequence[Span], prefill: Sequence[Span], page_tokens: int) -> Plan:
        return Plan(decode, prefill, page_tokens, self.device, flash=self.flash)

    def run(self, plan: Plan, cache: PagedCache) -> Any:
        """One forward: logits [rows that end here, vocabulary], in the plan's order."""
        cache.plan = plan
        options: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "packed": plan}
        if self._keeps:
            options["logits_to_keep"] = plan.lasts if len(plan.lasts) else 1
        logits = self.model(plan.ids, position_ids=plan.positions, **options).logits[0]
        if not len(plan.lasts):
            return logits[:0]
        return logits if self._keeps else logits[plan.lasts]

    def timed(self, cache: PagedCache, page_tokens: int) -> tuple[float, float, float]:
        """A first guess of a step's cost: fixed, per token, per request (ns). Overwrites the cache's first pages."""
        pages = list(range(min(cache.slots // page_tokens, -(-WARM_TOKENS // page_tokens) + 1)))
        tokens = min(WARM_TOKENS, len(pages) * page_tokens - 1)
        prompt = Span([1] * tokens, 0, pages, last=True)
        row = Span([1], tokens, pages, last=True)
        whole, one, many = (
            self._fastest_ns(decode, prefill, cache, page_tokens)
            for decode, prefill in (([], [prompt]), ([row], []), ([row] * WARM_ROWS, []))
        )
        per_token = max(0.0, (whole - one) / max(1, tokens - 1))
        per_row = max(0.0, (many - one) / (WARM_ROWS - 1) - per_token)
        return max(0.0, one - per_token - per_row), per_token, per_row

    def _fastest_ns(self, decode: list[Span], prefill: list[Span], cache: PagedCache, page_tokens: int) -> int:
        times = []
        for _ in range(3):
            started = clock.now_ns()
            self.run(self.plan(decode, prefill, page_tokens), cache).argmax(-1).tolist()
            times.append(clock.now_ns() - started)
        return min(times)

    def _stock(self, ids: list[int], source: str) -> Any:
        """The logits [tokens, vocabulary] of the model as it came."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
        if not torch.isfinite(logits.amax(-1)).all():
            raise LoadError(f"{source} computes logits that are not finite on a plain probe; try another dtype")
        return logits

    def _first_that_works(
        self, kinds: Sequence[str], ids: list[int], expected: Any, loaded: Loaded
    ) -> tuple[str, PagedCache]:
        for kind in kinds:
            try:
                self.attention = kind
                self.model.set_attn_implementation(NAMES[kind])
                return kind, self._verify(ids, expected)
            except (attention.PackingError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
                if kind == kinds[-1]:
                    raise LoadError(f"{loaded.source} cannot be run packed: {error}") from error
                log.warning("packed %s does not work for this model (%s); trying %s", kind, error, kinds[-1])
        raise AssertionError("no kind of attention to try")

    def _packed_weights(self, ids: list[int], expected: Any) -> PackedWeights:
        """Weights packed for the CPU where that answers as before, else none."""
        weights = PackedWeights(self.model)
        if weights.bytes:
            try:
                self._verify(ids, expected)
            except (attention.PackingError, RuntimeError, TypeError) as error:
                log.warning("weights stay as they came, which is slower: %s", error)
                weights.restore()
        weights.release()
        return weights

    @torch.inference_mode()
    def _verify(self, ids: list[int], expected: Any) -> PagedCache:
        """Compute the probe in three steps, compare, and return the small cache they ran in."""
        if NAMES[self.attention] != self.model.config._attn_implementation:
            raise attention.PackingError("its class does not go through Transformers' attention interface")
        count = len(ids)
        pages = list(range(-(-count // PROBE_PAGE), 0, -1))  # backwards, and without page 0
        cache = PagedCache((len(pages) + 1) * PROBE_PAGE)
        for start, end in ((0, count // 2), (count // 2, count - 1), (count - 1, count)):
            span = Span(ids[start:end], start, pages, last=True)
            decode, prefill = ([span], []) if len(span.ids) == 1 else ([], [span])
            plan = self.plan(decode, prefill, PROBE_PAGE)
            logits = self.run(plan, cache).float()[-1]
            if plan.layers == 0:
                raise attention.PackingError("its layers do not call the attention that is set")
            _compare(logits, expected[end - 1], half=self.model.dtype != torch.float32)
        return cache


def _kinds(asked: str, loaded: Loaded) -> list[str]:
    """What to try, in order."""
    installed = importlib.util.find_spec("flash_attn") is not None
    possible = installed and loaded.device.type == "cuda" and loaded.dtype != torch.float32
    if asked == "auto":
        if loaded.device.type == "cuda" and not installed:
            log.warning("flash_attn is not installed (pip install 'headway[flash]'): attention runs on SDPA")
        return ["flash_attention_2", "sdpa"] if possible else ["sdpa"]
    if asked == "flash_attention_2" and not possible:
        raise LoadError(
            "attention: flash_attention_2 needs CUDA, half precision and the package flash_attn "
            "(pip install 'headway[flash]'); or set attention: sdpa"
        )
    return [asked]


def _compare(logits: Any, expected: Any, *, half: bool) -> None:
    if half:
        likeness = float(torch.nn.functional.cosine_similarity(logits, expected, dim=0))
        good, found = likeness >= HALF_LIKENESS, f"cosine {likeness:.3f}"
    else:
        error = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        good, found = error <= EXACT_ERROR, f"relative error {error:.1e}"
    if not good:
        raise attention.PackingError(f"its packed logits differ from its own ({found})")
