"""The engine for models that cannot be run packed: the same protocol, step by step, with the model's own cache.

A step gives one token to everyone who decodes, then reads prompts, each alone and without padding, as far as the budget
reaches. A request starts when the state of all who run, each grown to its limit, fits into the memory for caches
together with its own: nobody is ever preempted, and one that could not fit alone is refused when it comes. A fault in
a forward ends only the requests that were in it; their neighbours' states are other tensors (`rows`).
"""

import dataclasses
import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headway.scheduler import clock
from headway.scheduler.link import Card, Failed, Item, Row, Step
from headway.scheduler.spec import ModelSpec
from headway.workers import memory
from headway.workers.ceiling import STRIKES, Ceiling, free_caches
from headway.workers.device import free_bytes
from headway.workers.engine import Report
from headway.workers.generate.intake import Intake
from headway.workers.generate.pace import Pace
from headway.workers.generate.request import Request
from headway.workers.generate.rows import Afresh, Together, Way
from headway.workers.generate.sampling import choose
from headway.workers.generate.shares import OLDEST_SHARE, Portion
from headway.workers.generate.trial import cost_of, way_of
from headway.workers.load import Loaded
from headway.workers.oneshot import code_of, text_of
from headway.workers.packaged import LoadError
from headway.workers.routing import Share, placement_of, routed, watch

log = logging.getLogger("headway.worker")

WARM_ROWS, WARM_TOKENS = 8, 17  # the steps that are timed beside a step of one token
PIECE = 64  # tokens of a prompt that are read at once, or the rest of it
PACKED_ONLY = ("kv_dtype", "prefix_sharing", "canary")  # settings of pages
UNBOUNDED = 1 << 20  # tokens of a text where neither positions nor memory bound it


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Memory for the state of requests. A request takes `fixed` bytes and `per_token` for each of its tokens; where
    rows share a rectangle (`square`), each takes as much as the longest."""

    total_bytes: int
    fixed: int
    per_token: int
    square: bool

    def bytes_of(self, limits: Sequence[int]) -> int:
        """What requests that may grow to `limits` tokens can take."""
        tokens = len(limits) * max(limits, default=0) if self.square else sum(limits)
        return len(limits) * self.fixed + tokens * self.per_token

    @property
    def tokens(self) -> int:
        """Of one text alone; 0: there is no such bound."""
        return (self.total_bytes - self.fixed) // self.per_token if self.per_token else 0


class PaddedEngine:
    """An Engine that generates with `loaded.model` in the first of the ways of `rows` that is right for it. `why`: what
    keeps it from being packed. `rng` seeds requests that bring no seed; `pace` as in GenerateEngine.

    Raises LoadError if the model answers otherwise in company than alone whatever is tried, or memory holds no state.
    """

    def __init__(
        self, spec: ModelSpec, loaded: Loaded, why: str, rng: random.Random | None = None, pace: Pace | None = None
    ) -> None:
        started = clock.now_ns()
        self._spec = spec
        self._device = loaded.device
        _set_attention(spec, loaded)
        self._routing = watch(loaded.model, loaded.device, **placement_of(spec))
        self._way, self._weights = way_of(loaded)
        log.warning("%s is not run packed (%s): generation runs %s", loaded.source, why, self._way.name)
        if unused := [key for key in PACKED_ONLY if getattr(spec, key) != ModelSpec.model_fields[key].default]:
            log.warning("%s: only for models that are packed; not used", ", ".join(unused))
        self._budget = _budget_of(spec, loaded, self._way, loaded.weight_bytes + self._weights.more_bytes)
        bounds = [bound for bound in (loaded.context_tokens, self._budget.tokens + 1) if bound > 1]
        self._context = min(bounds, default=UNBOUNDED)
        with torch.inference_mode():
            prior = _timed(self._way)
        self._card = self._describe(loaded, why, prior)
        self._pace = pace or Pace(prior)
        self._intake = Intake.of(loaded, self._card, self._no_room, rng or random.Random())
        self._live: dict[tuple[int, int], Request] = {}
        self._running: list[Request] = []  # oldest first
        self._waiting: deque[Request] = deque()  # oldest first
        self._endings: list[Row] = []  # decided between steps, reported with the next
        self._ceiling = Ceiling(spec.max_num_seqs)  # rows at once
        self._steps = 0
        self._way.forward.ran = self._count
        log.info("warmed up in %.1f s: %r", (clock.now_ns() - started) / clock.NS_PER_S, self._way)

    def __repr__(self) -> str:
        return f"<PaddedEngine {self._way.name}, {len(self._running)} running, {len(self._waiting)} waiting>"

    @property
    def card(self) -> Card:
        return self._card

    @property
    def busy(self) -> bool:
        return bool(self._live or self._endings)

    def add(self, batch: int, items: Sequence[Item]) -> None:
        """Take over `items`; they join at the next step. One that cannot be run gets its ending there."""
        for item in items:
            taken = self._intake.take(batch, item)
            if isinstance(taken, Row):
                self._endings.append(taken)
            else:
                self._live[taken.key] = taken
                self._waiting.append(taken)

    def cancel(self, batch: int, rids: Sequence[int]) -> None:
        """Drop these requests now: their state is gone before the next step."""
        for rid in rids:
            request = self._live.get((batch, rid))
            if request is not None:
                self._release([request])
                self._endings.append(Row(batch, rid, [], "dropped"))

    @torch.inference_mode()
    def step(self) -> list[Report]:
        """Run one step over everyone who runs, and report it."""
        if not self.busy:
            return []
        started = clock.now_ns()
        self._steps += 1
        rows, self._endings = self._endings, []
        shortages = self._ceiling.shortages
        self._start()
        decoding, reading = self._shares()
        failures: list[Failed] = []
        tokens = self._decode(decoding, rows, failures) if decoding else 0
        prompts = sum(self._read(request, count, rows, failures) for request, count in reading)
        spent = clock.now_ns() - started
        if tokens + prompts:
            self._pace.observe(len(decoding), prompts, spent)
            self._ceiling.held(len(decoding) + len(reading))
        step = Step(
            compute_ns=spent if tokens + prompts else 0,
            tokens=tokens + prompts,
            running=len(self._running),
            rows=rows,
            kv_used=self._kv_used,
            kv_total=self._card.kv_tokens,
            shortages=self._ceiling.shortages - shortages,
            **routed(self._routing, self._live),
        )
        return [step, *(Failed(one.batch, one.code, one.message, one.rids, spent) for one in failures)]

    def close(self) -> None:
        """Forget every request and its state."""
        self._way.drop([request.key for request in self._running])
        self._live.clear()
        self._running.clear()
        self._waiting.clear()
        self._endings.clear()
        free_caches()

    # ------------------------------------------------------------ room

    def _no_room(self, tokens: int) -> str:
        if self._budget.bytes_of([tokens]) <= self._budget.total_bytes:
            return ""
        return f"input and output need {tokens} tokens of cache; it has {self._budget.tokens} (kv_mib)"

    def _start(self) -> None:
        """Start who waits, in order of arrival, while all who run fit at their full length."""
        while self._waiting and len(self._running) < self._ceiling.limit:
            limits = [request.limit - 1 for request in (*self._running, self._waiting[0])]
            if self._budget.bytes_of(limits) > self._budget.total_bytes:
                return
            self._running.append(self._waiting.popleft())

    @property
    def _kv_used(self) -> int:
        """Tokens' worth of memory that is taken."""
        if not self._budget.per_token:
            return 0
        return self._budget.bytes_of([one.written for one in self._running if one.written]) // self._budget.per_token

    def _release(self, requests: Sequence[Request]) -> None:
        """They are over: off all books."""
        self._way.drop([request.key for request in requests])
        for request in requests:
            del self._live[request.key]
            for where in (self._running, self._waiting):
                if request in where:
                    where.remove(request)

    # ------------------------------------------------------------ a step

    def _shares(self) -> tuple[list[Request], list[Portion]]:
        """Who decodes, and who reads how many tokens of its prompt.

        A forward of its own costs each prompt the same again as all who decode, so pieces are PIECE or more, and as few
        as the budget allows. The prompt with the least left goes first, in one step of OLDEST_SHARE the oldest.
        """
        decoding = [request for request in self._running if request.pending == 1 and request.written]
        reading = [request for request in self._running if request not in decoding]
        if self._steps % OLDEST_SHARE:
            reading.sort(key=lambda request: request.pending)
        left = max(1, self._spec.step_tokens - len(decoding))
        budget = max(min(PIECE, left), self._pace.room(len(decoding), self._spec.step_tokens, len(reading)))
        portions: list[Portion] = []
        for request in reading:
            count = request.pending if self._way.whole else min(request.pending, budget)
            if portions and count > budget:
                break
            portions.append((request, count))
            budget -= count
            if budget <= 0:
                break
        return decoding, portions

    def _decode(self, requests: list[Request], rows: list[Row], failures: list[Failed]) -> int:
        """A token for each of these: how many tokens were computed."""
        try:
            logits = self._way.decode([(request.key, request.tokens) for request in requests])
        except Exception as error:
            failures += self._after(error, requests, rows)
            return 0
        computed = sum(len(request.tokens) if isinstance(self._way, Afresh) else 1 for request in requests)
        failures += self._settle(requests, logits, rows)
        return computed

    def _read(self, request: Request, count: int, rows: list[Row], failures: list[Failed]) -> int:
        """The next `count` tokens of a prompt: how many were computed."""
        if request.key not in self._live or request not in self._running:  # a fault of this step moved it
            return 0
        end = request.written + count
        try:
            logits = self._way.read(request.key, request.tokens[:end], request.written)
        except Exception as error:
            failures += self._after(error, [request], rows)
            return 0
        request.written = end - 1
        if end == len(request.tokens):
            failures += self._settle([request], logits[None], rows)
        else:
            request.written = end
        return count

    def _count(self, parts: Sequence[tuple[tuple[int, int], int, int]]) -> None:
        """A forward ran: whose tokens went to which experts."""
        if self._routing is not None:
            self._routing.count([Share(*part, self._live[part[0]].input_tokens) for part in parts])

    def _settle(self, requests: Sequence[Request], logits: Any, rows: list[Row]) -> list[Failed]:
        """Book tokens of a forward that went well; requests whose logits are not finite fail."""
        broken = []
        for request, pick in zip(requests, choose(logits, requests), strict=True):
            request.written += 1
            request.strikes = 0
            if pick is None:
                broken.append(request)
                continue
            request.tokens.append(pick.token)
            rows.append(Row(request.batch, request.rid, [pick.token], request.ending, logprobs=pick.logprobs))
            if request.ending:
                self._release([request])
        return self._fail(broken, "engine_error", "the model computed logits that are not finite")

    def _after(self, error: Exception, requests: Sequence[Request], rows: list[Row]) -> list[Failed]:
        """A forward over `requests` raised. Out of memory costs them time only: they begin again, fewer at once."""
        code, message = code_of(error), text_of(error)
        if code != "out_of_memory":
            if isinstance(error, getattr(torch, "AcceleratorError", ())):
                raise error  # no later step can work
            return self._fail(requests, code, message)
        self._forget(requests)
        free_caches()
        limit = self._ceiling.short(len(self._running))
        log.warning("out of memory with %d rows; at most %d from now on (%s)", len(self._running), limit, message)
        if len(self._running) == 1:
            request = self._running[0]
            request.strikes += 1
            if request.strikes == STRIKES:
                self._release([request])
                rows.append(Row(request.batch, request.rid, [], "error", code, message))
        while len(self._running) > limit:
            self._forget(self._running[-1:])
            self._waiting.appendleft(self._running.pop())
        return []

    def _forget(self, requests: Sequence[Request]) -> None:
        """Their state is gone; their text so far will be read again."""
        self._way.drop([request.key for request in requests])
        for request in requests:
            request.written = 0

    def _fail(self, requests: Iterable[Request], code: str, message: str) -> list[Failed]:
        rids: dict[int, list[int]] = {}
        for request in requests:
            rids.setdefault(request.batch, []).append(request.rid)
        self._release(list(requests))
        if rids:
            log.warning("%s: %s (%d requests)", code, message, sum(map(len, rids.values())))
        return [Failed(batch, code, message, of_batch) for batch, of_batch in rids.items()]

    def _describe(self, loaded: Loaded, why: str, prior_ns: tuple[float, float, float]) -> Card:
        longest = self._context - 1  # one token must still be answered
        size = memory.size
        facts = loaded.facts | {
            "attention": str(loaded.model.config._attn_implementation),
            "generation": f"{self._way.name}, not packed: {why}",
            "prompts": "read whole" if self._way.whole else "read in pieces",
            "memory": f"{size(self._budget.total_bytes)} for caches; a request takes {size(self._budget.fixed)} and "
            f"{size(self._budget.per_token)} for each token",
        }
        if self._weights.bytes:
            facts["linear_layers"] = f"packed by oneDNN ({size(self._weights.bytes)})"
        return Card(
            name=self._spec.name,
            kind="generate",
            mode="iteration",
            max_batch=self._spec.max_batch,
            max_num_seqs=self._spec.max_num_seqs,
            max_input_tokens=min(self._spec.max_input_tokens or longest, longest),
            context_tokens=loaded.context_tokens,
            vocab_size=loaded.vocab_size,
            kv_tokens=self._budget.tokens,
            prior_ns=prior_ns,
            tokenizer=loaded.tokenizer,
            facts=facts,
            defaults=loaded.defaults,
            experts=self._routing.card if self._routing is not None else None,
        )


def _set_attention(spec: ModelSpec, loaded: Loaded) -> None:
    if spec.attention == "paged":
        raise LoadError("attention: paged needs pages, and this model runs without; set attention: auto")
    if spec.attention == "auto":
        return
    try:
        loaded.model.set_attn_implementation(spec.attention)
    except (ValueError, ImportError) as error:
        raise LoadError(f"attention: {spec.attention} cannot be used with this model: {error}") from error


def _budget_of(spec: ModelSpec, loaded: Loaded, way: Way, weight_bytes: int) -> Budget:
    """What memory there is for states. Twice a state counts: rows are copied when one joins or leaves."""
    fixed, per_token = cost_of(way)
    work = memory.work_of(loaded.model.config.get_text_config(decoder=True))
    try:
        plan = memory.divide(
            free_bytes=loaded.free_bytes or free_bytes(loaded.device),
            weight_bytes=weight_bytes,
            work_bytes=work.step_bytes(str(loaded.dtype).removeprefix("torch."), spec.step_tokens, spec.max_num_seqs),
            token_bytes=1,
            gather_bytes=1,
            kv_bytes=spec.kv_mib * memory.MIB,
            kv_bytes_max=memory.KV_BYTES_CPU if loaded.device.type == "cpu" else 0,
            page_tokens=1,
            sharers=max(1, spec.workers),
        )
    except memory.DoesNotFitError as error:
        raise LoadError(str(error)) from error
    budget = Budget(plan.kv_bytes, fixed, per_token, square=isinstance(way, Together))
    if budget.bytes_of([2]) > budget.total_bytes:
        raise LoadError(
            f"the state of one request takes {memory.size(fixed)} and {memory.size(per_token)} for each token; "
            f"{memory.size(budget.total_bytes)} are there for it (kv_mib)"
        )
    return budget


def _timed(way: Way) -> tuple[float, float, float]:
    """A first guess of a step's cost: fixed, per token, per request (ns)."""
    texts = [((0, row), [1] * (WARM_TOKENS + 1)) for row in range(WARM_ROWS)]

    def spent(run: Any, *arguments: Any) -> int:
        started = clock.now_ns()
        run(*arguments).argmax(-1).tolist()
        return clock.now_ns() - started

    whole = min(spent(way.read, key, tokens[:-1], 0) for key, tokens in texts)
    many = spent(way.decode, texts)
    way.drop([key for key, _ in texts[1:]])
    again = [(key, [*tokens, 1]) for key, tokens in texts[:1]]
    one = spent(way.decode, again)
    way.drop([key for key, _ in again])
    per_token = max(0.0, (whole - one) / (WARM_TOKENS - 1))
    per_row = max(0.0, (many - one) / (WARM_ROWS - 1) - per_token)
    return max(0.0, one - per_token - per_row), per_token, per_row
