"""A Transformers model made to run plans, after it has shown that it answers as before.

The model's own forward is the reference (`probe`): two short texts are computed as the model came, and again packed,
side by side, in pieces, through pages. If the two disagree, or the model does not go through the registered attention
at all, it is refused here, at start, rather than served wrongly. The same runs teach the size of a token in the cache
and the first cost estimate.
"""

import importlib.util
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch

from headway.scheduler import clock
from headway.workers.generate import attention, kernels
from headway.workers.generate.flat import Flat
from headway.workers.generate.pages import PagedCache
from headway.workers.generate.plan import Plan, Span
from headway.workers.generate.probe import Probe, check_kept, probes, reason
from headway.workers.generate.weights import packed_if_right
from headway.workers.load import Loaded
from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")

NAMES = {
    "sdpa": attention.NAME,
    "eager": attention.EAGER_NAME,
    "flash_attention_2": attention.FLASH_NAME,
    "paged": attention.PAGED_NAME,
}
PROBE_PAGE = 4
WARM_ROWS, WARM_TOKENS = 8, 64  # the two larger steps that are timed beside a step of one token


class NotPackableError(LoadError):
    """The model at `source` cannot be run packed, because of `why`; another way of running may still serve it."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"{source} cannot be run packed: {why}")
        self.why = why


class Runner:
    """Runs plans on `loaded.model`. `attention` is the kind that is active, as checked.

    `asked`: auto, or a key of NAMES. Auto takes FlashAttention-2 where it is installed, on CUDA and in half precision;
    the kernel that reads pages in place where a compiler is, on a CPU in float32, if keys and values are `stored` as
    they are computed; and SDPA otherwise. Raises NotPackableError if the model cannot be run packed; it is then as it
    was.
    """

    def __init__(self, loaded: Loaded, asked: str = "auto", *, stored: bool = True) -> None:
        self.model = loaded.model
        self.device = loaded.device
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        self.flat: Flat | None = None
        attention.register()
        check_kept(loaded)
        checks = probes(loaded)
        self.attention, self.pattern = self._first_that_works(_kinds(asked, loaded, stored), checks, loaded)
        self.weights = packed_if_right(self.model, lambda: self._verify(checks[0]))
        if self.attention == "paged" and self.weights.bytes:
            self._flatten(checks)

    def __repr__(self) -> str:
        return f"<Runner {type(self.model).__name__}, packed {self.attention}{', traced' if self.traced else ''}>"

    @property
    def traced(self) -> bool:
        """Whether the model runs as a list of operations."""
        return self.flat is not None

    def plan(self, decode: Sequence[Span], prefill: Sequence[Span], page_tokens: int) -> Plan:
        exact, in_place = self.attention == "flash_attention_2", self.attention == "paged"
        return Plan(decode, prefill, page_tokens, self.device, exact=exact, in_place=in_place)

    def run(self, plan: Plan, cache: PagedCache) -> Any:
        """One forward: logits [rows that end here, vocabulary], in the plan's order."""
        cache.plan, plan.cache = plan, cache
        token = attention.planned.set(plan)
        try:
            return self._own(plan, cache) if self.flat is None else self.flat(plan)
        finally:
            attention.planned.reset(token)

    def _own(self, plan: Plan, cache: PagedCache) -> Any:
        """The same by the model's own forward."""
        options: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
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

    def _first_that_works(
        self, kinds: Sequence[str], checks: Sequence[Probe], loaded: Loaded
    ) -> tuple[str, PagedCache]:
        came_with = self.model.config._attn_implementation
        for kind in kinds:
            try:
                self.attention = kind
                self.model.set_attn_implementation(NAMES[kind])
                caches = [self._verify(probe) for probe in checks]
                return kind, caches[0]
            except Exception as error:  # a model's own code may raise anything about a cache that it did not expect
                self.model.set_attn_implementation(came_with)
                if kind == kinds[-1]:
                    raise NotPackableError(loaded.source, reason(error)) from error
                log.warning("packed %s does not work for this model (%s); trying %s", kind, reason(error), kinds[-1])
        raise AssertionError("no kind of attention to try")

    def _flatten(self, checks: Sequence[Probe]) -> None:
        """Run the model as a list of operations from here on, if it then answers as before."""
        try:
            for probe in reversed(checks):  # the plain one comes last, and stays
                with probe.applied():
                    self.flat = Flat(self.model, self._cache_name, keeps=self._keeps)
                    self._verify(probe)
        except Exception as error:  # tracing runs the model's own code, which may do what it likes
            log.info("each operation is called by itself, which is slower: %s", reason(error))
            self.flat = None

    @torch.inference_mode()
    def _verify(self, probe: Probe) -> PagedCache:
        """Compute both texts side by side in three steps, then a token alone; compare, and return the small cache they
        ran in."""
        if NAMES[self.attention] != self.model.config._attn_implementation:
            raise attention.PackingError("its class does not go through Transformers' attention interface")
        held = [-(-len(ids) // PROBE_PAGE) for ids in probe.texts]
        free = list(range(1, sum(held) + 1))  # handed out backwards, and without page 0
        pages = [[free.pop() for _ in range(count)] for count in held]
        cache = PagedCache((sum(held) + 1) * PROBE_PAGE)
        with probe.applied():
            alone = {0: (len(probe.texts[0]) - 1, probe.texts[0][-1:])}
            for pieces in (*map(probe.pieces, range(3)), alone):
                spans = [(text, Span(ids, start, pages[text], last=True)) for text, (start, ids) in pieces.items()]
                spans.sort(key=lambda one: len(one[1].ids) > 1)  # one token is a decode row, and rows come first
                rows = sum(len(span.ids) == 1 for _, span in spans)
                ordered = [span for _, span in spans]
                plan = self.plan(ordered[:rows], ordered[rows:], PROBE_PAGE)
                plan.lasts = torch.arange(plan.tokens, device=self.device)  # every token is compared, not each last one
                logits = self.run(plan, cache)
                if plan.layers == 0:
                    raise attention.PackingError("its layers do not call the attention that is set")
                for (text, span), made in zip(spans, logits.split([len(span.ids) for _, span in spans]), strict=True):
                    probe.compare(text, span.start, made)
        return cache


def _kinds(asked: str, loaded: Loaded, stored: bool) -> list[str]:
    """What to try, in order."""
    cuda, cpu, full = loaded.device.type == "cuda", loaded.device.type == "cpu", loaded.dtype == torch.float32
    installed = importlib.util.find_spec("flash_attn") is not None
    flash = cuda and installed and not full
    suited = cpu and full and stored
    missing = kernels.missing() if suited and asked in ("auto", "paged") else ""
    if asked == "auto":
        if cuda and not installed:
            log.warning("flash_attn is not installed (pip install 'headway[flash]'): attention runs on SDPA")
        if missing:
            log.warning("attention runs on SDPA, which is slower than reading pages in place: %s", missing)
        first = ["flash_attention_2"] if flash else ["paged"] if suited and not missing else []
        return [*first, "sdpa"]
    if asked == "flash_attention_2" and not flash:
        raise LoadError(
            "attention: flash_attention_2 needs CUDA, half precision and the package flash_attn "
            "(pip install 'headway[flash]'); or set attention: sdpa"
        )
    if asked == "paged" and (missing or not suited):
        needs = missing or "it needs a CPU, dtype: float32 and a kv_dtype of the same"
        raise LoadError(f"attention: paged cannot be had: {needs}; or set attention: auto")
    return [asked]
