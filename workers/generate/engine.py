"""Iteration-level generation: requests join and leave between steps, all tokens of a step go through one forward.

A step gives pages to those who run, oldest first, then starts who waits, in order of arrival, then runs one token of
each decoding request and, in the room the `pace` leaves, chunks of prompts, short ones first. When pages run
out the youngest is preempted: its pages go to an older one, it waits at the head of the queue, and later reads its text
so far again. The oldest can therefore always go on, and a request that could not even alone is refused when it comes;
so nothing is ever lost or stuck. A fault in a forward ends only the requests that were in it.
"""

import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headway.scheduler import clock, link
from headway.scheduler.errors import HeadwayError
from headway.scheduler.link import Card, Failed, Item, Row, Step
from headway.scheduler.params import check_vocabulary
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params
from headway.workers.engine import Report
from headway.workers.generate.pace import Pace
from headway.workers.generate.pages import PagedCache, Pages
from headway.workers.generate.plan import Span
from headway.workers.generate.request import Request
from headway.workers.generate.room import room_of
from headway.workers.generate.routing import Share, placement_of, watch
from headway.workers.generate.runner import Runner
from headway.workers.generate.sampling import Pick, choice_of, choose
from headway.workers.load import Loaded
from headway.workers.oneshot import code_of, text_of

log = logging.getLogger("headway.worker")

OLDEST_SHARE = 4  # the oldest prompt gets at least one part in so many of a step's token budget


class GenerateEngine:
    """An Engine that generates with `loaded.model`. `rng` seeds requests that bring no seed of their own; `pace` says
    how much of prompts goes beside running answers (default: what is learned of the times of steps).

    Raises LoadError if the model cannot be run packed or `spec.kv_mib` cannot hold a page.
    """

    def __init__(
        self, spec: ModelSpec, loaded: Loaded, rng: random.Random | None = None, pace: Pace | None = None
    ) -> None:
        self._spec = spec
        self._rng = rng or random.Random()
        started = clock.now_ns()
        self._routing = watch(loaded.model, loaded.device, **placement_of(spec))  # of the model as it came
        self._runner = Runner(loaded, spec.attention)
        self._page_tokens = spec.page_tokens
        self._room = room_of(spec, loaded, self._runner)
        self._pages = Pages(self._room.plan.pages)
        self._cache = self._room.cache
        self._context = loaded.context_tokens or self._pages.total * self._page_tokens
        self._vocab_size = loaded.vocab_size
        self._eos = frozenset(token for token in loaded.eos if token < loaded.vocab_size)
        with torch.inference_mode():
            prior = self._runner.timed(self._cache, self._page_tokens)
        self._card = self._describe(loaded, prior)
        self._pace = pace or Pace(prior)
        self._live: dict[tuple[int, int], Request] = {}
        self._running: list[Request] = []  # oldest first
        self._waiting: deque[Request] = deque()  # oldest first; everyone here is younger than all who run
        self._endings: list[Row] = []  # decided between steps, reported with the next
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
            params = item.params or Params()
            try:
                tokens = link.unpack_ids(item.ids)
                done = link.unpack_ids(item.done)
            except ValueError:
                self._refuse(batch, item.rid, "invalid_request", "token ids are not whole 32-bit integers")
                continue
            if fault := self._fault(tokens, done, params):
                self._refuse(batch, item.rid, *fault)
                continue
            stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
            request = Request(
                batch=batch,
                rid=item.rid,
                tokens=tokens + done,
                input_tokens=len(tokens),
                limit=self._limit(tokens, params),
                choice=choice_of(params, self._rng.getrandbits(63), stops),
                stops=stops,
            )
            if request.ending:  # it came complete: all that was missing is this report
                self._endings.append(Row(batch, item.rid, [], request.ending))
                continue
            self._live[request.key] = request
            self._waiting.append(request)

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
        rows, self._endings = self._endings, []
        self._grow()
        self._start()
        shares = self._shares()
        tokens = sum(count for _, count in shares)
        failures: list[Failed] = []
        if shares:
            try:
                chosen = self._forward(shares)
            except Exception as error:
                tokens = 0
                failures = self._fail([request for request, _ in shares], *_fault_of(error))
            else:
                failures = self._settle(shares, chosen, rows)
        spent = clock.now_ns() - started
        if tokens:
            rows_run = sum(1 for _, count in shares if count == 1)
            self._pace.observe(rows_run, tokens - rows_run, spent)
        step = Step(
            compute_ns=spent if tokens else 0,
            tokens=tokens,
            running=len(self._running),
            rows=rows,
            kv_used=self._pages.used * self._page_tokens,
            kv_total=self._pages.total * self._page_tokens,
            **self._routed(),
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

    # ------------------------------------------------------------ arrival

    def _fault(self, tokens: list[int], done: list[int], params: Params) -> tuple[str, str] | None:
        """Why this request cannot be run (code and message), or None."""
        if not tokens:
            return "invalid_request", "the input is empty"
        if max(tokens) >= self._vocab_size or max(done, default=0) >= self._vocab_size:
            return "invalid_request", f"token id {max(tokens + done)} is outside the vocabulary of {self._vocab_size}"
        try:
            check_vocabulary(params, self._vocab_size)
        except HeadwayError as error:
            return error.code, str(error)
        if len(tokens) > self._card.max_input_tokens:
            return "too_long", f"the input has {len(tokens)} tokens; the limit is {self._card.max_input_tokens}"
        needed = self._limit(tokens, params) - 1  # the last token is answered, never read
        if self._pages_for(needed) > self._pages.total:
            room = self._pages.total * self._page_tokens
            return "too_long", f"input and output need {needed} tokens of KV cache; it has {room} (kv_mib)"
        return None

    def _limit(self, tokens: list[int], params: Params) -> int:
        return min(len(tokens) + params.max_new_tokens, self._context)

    def _refuse(self, batch: int, rid: int, code: str, message: str) -> None:
        self._endings.append(Row(batch, rid, [], "error", code, message))

    # ------------------------------------------------------------ pages

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
            needed = self._pages_for(len(request.tokens))
            if needed + len(self._running) > self._pages.free:
                return
            request.pages = self._pages.take(needed)
            self._running.append(self._waiting.popleft())

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

    def _shares(self) -> list[tuple[Request, int]]:
        """Who runs how many tokens: every decoding request one, long ones first, then prompts while the budget lasts.

        The prompt with the least left to read goes first, so that a long one does not hold up the short ones behind it;
        the oldest has OLDEST_SHARE of the budget for its own, so that they do not hold it up for ever.
        """
        decoding = [(request, 1) for request in self._running if request.pending == 1]
        decoding.sort(key=lambda share: -len(share[0].tokens))  # equal lengths side by side read alike
        reading = [request for request in self._running if request.pending > 1]
        if not reading:
            return decoding
        budget = self._pace.room(len(decoding), self._spec.step_tokens)  # a prompt always goes on
        shares = {id(request): 0 for request in reading}
        for request, most in [(reading[0], max(1, budget // OLDEST_SHARE)), *_shortest_first(reading, budget)]:
            taken = min(most, budget, request.pending - shares[id(request)])
            shares[id(request)] += taken
            budget -= taken
        return decoding + [(request, shares[id(request)]) for request in reading if shares[id(request)]]

    def _forward(self, shares: Sequence[tuple[Request, int]]) -> list[Pick | None]:
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

    def _settle(
        self, shares: Sequence[tuple[Request, int]], chosen: Sequence[Pick | None], rows: list[Row]
    ) -> list[Failed]:
        """Book a step that went well: `rows` gets what is new; requests whose logits are not finite fail."""
        broken, picks = [], iter(chosen)
        for request, count in shares:
            request.written += count
            if request.pending:
                continue
            pick = next(picks)
            if pick is None:
                broken.append(request)
                continue
            request.tokens.append(pick.token)
            ending = request.ending
            rows.append(Row(request.batch, request.rid, [pick.token], ending, logprobs=pick.logprobs))
            if ending:
                self._release(request)
        return self._fail(broken, "engine_error", "the model computed logits that are not finite")

    def _routed(self) -> dict[str, Any]:
        """What the step's report says of experts; nothing for a model without any."""
        routing = self._routing
        if routing is None:
            return {}
        return {"routed": routing.take(self._live), "critical": routing.critical, "active": routing.active}

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
        facts = loaded.facts | self._room.facts | {"attention": f"packed {self._runner.attention}"}
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


def _shortest_first(reading: Sequence[Request], budget: int) -> list[tuple[Request, int]]:
    return [(request, budget) for request in sorted(reading, key=lambda request: request.pending)]


def _part(request: Request, span: Span) -> Share:
    return Share(request.key, span.start, len(span.ids), request.input_tokens)


def _ready(shares: Sequence[tuple[Request, int]], spans: Sequence[Span]) -> list[Request]:
    return [request for (request, _), span in zip(shares, spans, strict=True) if span.last]


def _fault_of(error: Exception) -> tuple[str, str]:
    """Code and message of what a forward raised. A broken accelerator is raised again: no later step can work."""
    code = code_of(error)
    if code == "out_of_memory" and torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise error
    return code, text_of(error)
