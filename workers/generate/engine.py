"""Iteration-level generation: requests join and leave between steps, all tokens of a step go through one forward.

A step gives pages to those who run, oldest first, then starts who waits, in order of arrival, then runs one token of
each decoding request and, in the room the `pace` leaves, chunks of prompts, short ones first. When pages run
out the youngest is preempted: its pages go to an older one, it waits at the head of the queue, and later reads its text
so far again. The oldest can therefore always go on, and a request that could not even alone is refused when it comes;
so nothing is ever lost or stuck. A fault in a forward ends only the requests that were in it; out of memory ends none
that fits alone, it makes the next steps smaller.
"""

import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from headway.scheduler import clock
from headway.scheduler.link import Card, Failed, Item, Row, Step
from headway.scheduler.spec import ModelSpec
from headway.workers.ceiling import STRIKES, Ceiling, free_caches
from headway.workers.engine import Report
from headway.workers.generate.canary import Canary
from headway.workers.generate.intake import Intake
from headway.workers.generate.pace import Pace, parts_of
from headway.workers.generate.page_use import PageUse
from headway.workers.generate.pages import PagedCache, Pages
from headway.workers.generate.plan import Span
from headway.workers.generate.prefix import SharedPages
from headway.workers.generate.request import Request
from headway.workers.generate.room import lower_dtype, room_of
from headway.workers.generate.runner import Runner
from headway.workers.generate.sampling import Pick, choose
from headway.workers.generate.shares import Portion, shares_of
from headway.workers.load import Loaded
from headway.workers.oneshot import code_of, text_of
from headway.workers.routing import Share, placement_of, routed, watch

log = logging.getLogger("headway.worker")

LOOK_STEPS = 64  # between two looks at free pages, where canaries are on


class GenerateEngine:
    """An Engine that generates with `loaded.model`. `rng` seeds requests that bring no seed of their own; `pace` says
    how much of prompts goes beside running answers (default: what is learned of the times of steps).

    Raises LoadError if the model cannot be run packed or `spec.kv_mib` cannot hold a page.
    """

    def __init__(
        self, spec: ModelSpec, loaded: Loaded, rng: random.Random | None = None, pace: Pace | None = None
    ) -> None:
        self._spec = spec
        rng = rng or random.Random()
        started = clock.now_ns()
        self._routing = watch(loaded.model, loaded.device, **placement_of(spec))  # of the model as it came
        self._runner = Runner(loaded, spec.attention, stored=lower_dtype(spec, loaded) is None)
        self._page_tokens = spec.page_tokens
        self._room = room_of(spec, loaded, self._runner)
        self._cache = self._room.cache
        self._pages = _pages_of(spec, self._room.plan.pages)
        self._context = loaded.context_tokens or self._pages.total * self._page_tokens
        with torch.inference_mode():
            prior = self._runner.timed(self._cache, self._page_tokens)
        self._card = self._describe(loaded, prior)
        self._intake = Intake.of(loaded, self._card, self._no_room, rng)
        self._pace = pace or Pace(prior)
        self._live: dict[tuple[int, int], Request] = {}
        self._running: list[Request] = []  # oldest first
        self._waiting: deque[Request] = deque()  # oldest first; everyone here is younger than all who run
        self._endings: list[Row] = []  # decided between steps, reported with the next
        self._ceiling = Ceiling(max(spec.step_tokens, spec.max_num_seqs + 1))  # tokens of a step
        self._steps = 0
        self._reused = 0  # tokens not read again, in this step
        self._use = PageUse(self._page_tokens)
        self._canary = Canary(self._cache, self._page_tokens, rng) if spec.canary else None
        self._pages.guard = self._canary
        log.info("warmed up in %.1f s: %r, %r", (clock.now_ns() - started) / clock.NS_PER_S, self._runner, self._pages)

    def __repr__(self) -> str:
        return f"<GenerateEngine {len(self._running)} running, {len(self._waiting)} waiting, {self._pages!r}>"

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
        """Drop these requests now: their pages are free before the next step."""
        for rid in rids:
            request = self._live.get((batch, rid))
            if request is not None:
                self._release(request)
                self._endings.append(Row(batch, rid, [], "dropped"))

    @torch.inference_mode()
    def step(self) -> list[Report]:
        """Run one step over everything that fits, and report it."""
        if not self.busy:
            return []
        started = clock.now_ns()
        self._steps += 1
        rows, self._endings = self._endings, []
        shortages, self._reused = self._ceiling.shortages, 0
        if self._canary is not None and self._steps % LOOK_STEPS == 0:
            self._canary.look()
        self._grow()
        self._start()
        shares = shares_of(self._running, self._pace, self._spec.step_tokens, self._ceiling.limit, self._steps)
        decoding, prompts, looked_back = parts_of((request.written, count) for request, count in shares)
        tokens = decoding + prompts
        failures: list[Failed] = []
        if shares:
            fault: tuple[str, str] | None = None
            try:
                chosen = self._forward(shares)
            except Exception as error:
                fault = _fault_of(error)
            if fault is None:
                failures = self._settle(shares, chosen, rows)
                if self._ceiling.held(tokens):
                    log.info("memory suffices again for a whole step of %d tokens", self._ceiling.most)
            else:
                failures = self._after(fault, shares, tokens, rows)
                tokens = 0
        spent = clock.now_ns() - started
        if tokens:
            self._pace.observe(decoding, prompts, spent, looked_back)
        step = Step(
            compute_ns=spent if tokens else 0,
            tokens=tokens,
            running=len(self._running),
            rows=rows,
            kv_used=self._pages.used * self._page_tokens,
            kv_total=self._pages.total * self._page_tokens,
            shortages=self._ceiling.shortages - shortages,
            reused=self._reused,
            **routed(self._routing, self._live),
        )
        return [step, *(Failed(one.batch, one.code, one.message, one.rids, spent) for one in failures)]

    def close(self) -> None:
        """Forget every request and give the cache's memory back."""
        self._live.clear()
        self._running.clear()
        self._waiting.clear()
        self._endings.clear()
        self._cache = PagedCache(0)
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ pages

    def _no_room(self, tokens: int) -> str:
        """Why a text of so many tokens can never be kept, or nothing."""
        if self._pages_for(tokens) <= self._pages.total:
            return ""
        room = self._pages.total * self._page_tokens
        return f"input and output need {tokens} tokens of KV cache; it has {room} (kv_mib)"

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _grow(self) -> None:
        """Give everyone who runs the pages of its next step, the oldest first; the youngest pays if there are none."""
        at = 0
        while at < len(self._running):
            request = self._running[at]
            missing = self._pages_for(len(request.tokens)) - len(request.pages)
            while missing > self._pages.free and self._running[-1] is not request:
                self._preempt()
            if missing > self._pages.free:
                self._preempt()  # itself: it is the youngest
                return
            request.pages += self._pages.take(missing)
            at += 1

    def _preempt(self) -> None:
        request = self._running.pop()
        self._give_back(request)
        self._waiting.appendleft(request)

    def _start(self) -> None:
        """Start who waits, in order, while pages for all its text are free and each who runs could take one more."""
        while self._waiting and len(self._running) < self._spec.max_num_seqs:
            request = self._waiting[0]
            shared = self._shared(request)
            needed = self._pages_for(len(request.tokens)) - len(shared)
            if needed + len(self._running) > self._pages.free:
                self._pages.give(shared)
                return
            request.pages = shared + self._pages.take(needed)
            request.written = len(shared) * self._page_tokens
            self._reused += request.written
            self._running.append(self._waiting.popleft())

    def _shared(self, request: Request) -> list[int]:
        """Pages that hold the beginning of its text already, now also its own."""
        if not isinstance(self._pages, SharedPages) or not request.tenant:
            return []
        return self._pages.reuse(request.tenant, request.tokens)

    def _share(self, request: Request) -> None:
        """What it has written may be read by others of its tenant. Only of a text whose logits were found good."""
        if isinstance(self._pages, SharedPages) and request.tenant:
            self._pages.learn(request.tenant, request.tokens[: request.written], request.pages)

    def _give_back(self, request: Request) -> None:
        self._pages.give(request.pages)
        request.pages, request.written = [], 0

    def _release(self, request: Request) -> None:
        """It is over: off all books."""
        self._give_back(request)
        del self._live[request.key]
        for where in (self._running, self._waiting):
            if request in where:
                where.remove(request)

    # ------------------------------------------------------------ a step

    def _forward(self, shares: Sequence[Portion]) -> list[Pick | None]:
        """The next token of each share that completes its request's text so far."""
        spans = [request.span(count) for request, count in shares]
        rows = next((at for at, (request, _) in enumerate(shares) if request.pending > 1), len(shares))
        logits = self._runner.run(self._runner.plan(spans[:rows], spans[rows:], self._page_tokens), self._cache)
        if self._routing is not None:
            self._routing.count([_part(request, span) for (request, _), span in zip(shares, spans, strict=True)])
        ready = _ready(shares, spans)
        if not ready:
            return []
        return choose(logits, ready)

    def _settle(self, shares: Sequence[Portion], chosen: Sequence[Pick | None], rows: list[Row]) -> list[Failed]:
        """Book a step that went well: `rows` gets what is new; requests whose logits are not finite fail."""
        broken, picks = [], iter(chosen)
        for request, count in shares:
            request.written += count
            request.strikes = 0
            if request.pending:
                continue
            pick = next(picks)
            if pick is None:
                broken.append(request)
                continue
            request.tokens.append(pick.token)
            ending = request.ending
            rows.append(Row(request.batch, request.rid, [pick.token], ending, logprobs=pick.logprobs))
            if ending or count > 1:
                self._share(request)
            if ending:
                if hint := self._use.observe(len(request.tokens)):
                    log.warning(hint)
                self._release(request)
        return self._fail(broken, "engine_error", "the model computed logits that are not finite")

    def _after(self, fault: tuple[str, str], shares: Sequence[Portion], tokens: int, rows: list[Row]) -> list[Failed]:
        """A forward raised `fault`. Out of memory costs no request anything but time: the next step is smaller. Only
        one that a step of a single token of its own does not fit, twice, ends with it."""
        code, message = fault
        if code != "out_of_memory":
            return self._fail([request for request, _ in shares], code, message)
        free_caches()
        limit = self._ceiling.short(tokens)
        log.warning("out of memory in a step of %d tokens; at most %d from now on (%s)", tokens, limit, message)
        if tokens == 1:
            request = shares[0][0]
            request.strikes += 1
            if request.strikes == STRIKES:
                self._release(request)
                rows.append(Row(request.batch, request.rid, [], "error", code, message))
        return []

    def _fail(self, requests: Iterable[Request], code: str, message: str) -> list[Failed]:
        rids: dict[int, list[int]] = {}
        for request in requests:
            rids.setdefault(request.batch, []).append(request.rid)
            self._release(request)
        if rids:
            log.warning("%s: %s (%d requests)", code, message, sum(map(len, rids.values())))
        return [Failed(batch, code, message, of_batch) for batch, of_batch in rids.items()]

    def _describe(self, loaded: Loaded, prior_ns: tuple[float, float, float]) -> Card:
        room = self._pages.total * self._page_tokens
        longest = min(self._context, room + 1) - 1  # one token must still be answered
        facts = (
            loaded.facts
            | self._room.facts
            | {
                "generation": "packed",
                "attention": f"packed {self._runner.attention}",
                "forward": "traced" if self._runner.traced else "the model's own",
            }
        )
        facts |= {"prefix_sharing": self._spec.prefix_sharing, "canary": "on" if self._spec.canary else "off"}
        if packed := self._runner.weights.bytes:
            facts["linear_layers"] = f"packed by oneDNN ({packed >> 20} MiB)"
        return Card(
            name=self._spec.name,
            kind="generate",
            mode="iteration",
            max_batch=self._spec.max_batch,
            max_num_seqs=self._spec.max_num_seqs,
            max_input_tokens=min(self._spec.max_input_tokens or longest, longest),
            context_tokens=self._context,
            vocab_size=loaded.vocab_size,
            kv_tokens=room,
            prior_ns=prior_ns,
            tokenizer=loaded.tokenizer,
            facts=facts,
            defaults=loaded.defaults,
            experts=self._routing.card if self._routing is not None else None,
        )


def _pages_of(spec: ModelSpec, total: int) -> Pages:
    return SharedPages(total, spec.page_tokens) if spec.prefix_sharing == "tenant" else Pages(total)


def _part(request: Request, span: Span) -> Share:
    return Share(request.key, span.start, len(span.ids), request.input_tokens)


def _ready(shares: Sequence[Portion], spans: Sequence[Span]) -> list[Request]:
    return [request for (request, _), span in zip(shares, spans, strict=True) if span.last]


def _fault_of(error: Exception) -> tuple[str, str]:
    """Code and message of what a forward raised. A broken accelerator is raised again: no later step can work."""
    code = code_of(error)
    if code != "out_of_memory" and isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise error
    return code, text_of(error)
