"""An engine without a model, of declared cost: for tests, demonstrations and the overhead benchmark.

Lives here: giving back what was sent (`call`), a small vector (`embed`), or the prompt's own bytes one per step
(`generate`), at a cost of `fixed_ms + per_token_ms * tokens + per_request_ms * requests`; and faults on request, so
that failure is tested against a real worker process. Never here: a tokenizer's or a model's library. Without faults a
`call` is handed back undecoded: this is the floor that the scheduler's overhead is measured against.
"""

import os
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import msgspec
from pydantic import Field, model_validator

from headway.scheduler.clock import NS_PER_MS, NS_PER_S, now_ns
from headway.scheduler.link import Card, Failed, Item, Outcome, Row, Step, Tokenizer, pack_logprobs, unpack_ids
from headway.scheduler.spec import Frozen, ModelSpec
from headway.scheduler.wire import INPUT_IDS_MAX, Params
from headway.workers.engine import Engine, Report
from headway.workers.oneshot import OneShot, input_tokens

EMBEDDING_SIZE = 8
CRASH_CODE = 86  # exit code of a worker that met `crash_on`, to tell it from other deaths

Ms = Annotated[float, Field(ge=0, le=3_600_000)]


class EchoOptions(Frozen):
    """What an echo engine costs and where it fails. Markers are searched in the text of an input or payload."""

    mode: Literal["oneshot", "iteration"] = "oneshot"
    kind: Annotated[Literal["call", "embed", "generate"] | None, Field(description="default: call, or generate")] = None
    fixed_ms: Ms = 0.0
    per_token_ms: Ms = 0.0
    per_request_ms: Ms = 0.0
    load_ms: Annotated[Ms, Field(description="time to start")] = 0.0
    script: Annotated[
        tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(description="ids to emit in place of the prompt")
    ] = ()
    fail_every: Annotated[int, Field(ge=0, description="each n-th request fails alone; 0: none")] = 0
    fail_on: Annotated[str, Field(description="a request with this text fails alone")] = ""
    fail_batch_on: Annotated[str, Field(description="a batch that holds this text fails as a whole")] = ""
    crash_on: Annotated[str, Field(description="this text ends the process at once")] = ""
    hang_on: Annotated[str, Field(description="this text makes the step last for ever")] = ""
    oom_above: Annotated[int, Field(ge=0, description="more requests at once run out of memory; 0: never")] = 0
    short_results: Annotated[bool, Field(description="return one result too few")] = False

    @model_validator(mode="after")
    def _related(self) -> Self:
        if (self.mode == "iteration") != (self.kind_served == "generate"):
            raise ValueError(
                f"kind {self.kind!r} does not go with mode {self.mode!r}: generate is iteration, and only it"
            )
        return self

    @property
    def kind_served(self) -> str:
        return self.kind or ("generate" if self.mode == "iteration" else "call")

    @property
    def faulty(self) -> bool:
        marked = self.fail_on or self.fail_batch_on or self.crash_on or self.hang_on
        return bool(marked or self.fail_every or self.oom_above or self.short_results)

    def cost_ns(self, tokens: int, requests: int) -> int:
        return round((self.fixed_ms + self.per_token_ms * tokens + self.per_request_ms * requests) * NS_PER_MS)


def make_engine(spec: ModelSpec) -> Engine:
    """The echo engine of `spec.options` (see EchoOptions). Raises pydantic's ValidationError for a wrong option."""
    options = EchoOptions.model_validate(spec.options)
    _spend(round(options.load_ms * NS_PER_MS))
    card = _card(spec, options)
    if options.mode == "iteration":
        return EchoStream(card, options)
    return OneShot(card, EchoBatch(options).run)


def _card(spec: ModelSpec, options: EchoOptions) -> Card:
    text = options.kind_served != "call"
    prior = (options.fixed_ms * NS_PER_MS, options.per_token_ms * NS_PER_MS, options.per_request_ms * NS_PER_MS)
    return Card(
        name=spec.name,
        kind=options.kind_served,
        mode=options.mode,
        max_batch=spec.max_batch,
        max_num_seqs=spec.max_num_seqs,
        max_input_tokens=spec.max_input_tokens or INPUT_IDS_MAX,
        vocab_size=256 if text else 0,
        prior_ns=prior if any(prior) else (),
        tokenizer=Tokenizer(kind="bytes") if text else None,
        facts={"engine": "echo"},
    )


def _spend(cost_ns: int) -> None:
    if cost_ns > 0:
        time.sleep(cost_ns / NS_PER_S)


# ---------------------------------------------------------------- faults


class _Faults:
    """Which requests fail, and how."""

    def __init__(self, options: EchoOptions) -> None:
        self._options = options
        self._seen = 0

    def strike(self, items: Sequence[Item], running: int) -> None:
        """What befalls a whole batch; `running` requests are in the engine. Raises, hangs or ends the process."""
        o = self._options
        for text in map(_text, items) if o.crash_on or o.hang_on or o.fail_batch_on else ():
            if o.crash_on and o.crash_on in text:
                os._exit(CRASH_CODE)
            if o.hang_on and o.hang_on in text:
                threading.Event().wait()
            if o.fail_batch_on and o.fail_batch_on in text:
                raise RuntimeError(f"a request of this batch holds {o.fail_batch_on!r}")
        if o.oom_above and running > o.oom_above:
            raise MemoryError(f"{running} requests at once; this engine has memory for {o.oom_above}")

    def of(self, item: Item) -> Exception | None:
        """What befalls this request alone."""
        o = self._options
        self._seen += 1
        if o.fail_every and self._seen % o.fail_every == 0:
            return RuntimeError(f"request {self._seen} of this worker fails, as each {o.fail_every}th does")
        if o.fail_on and o.fail_on in _text(item):
            return RuntimeError(f"the request holds {o.fail_on!r}")
        return None


def _text(item: Item) -> str:
    """The text of a request: of its ids, or of all strings in its payload."""
    if item.ids:
        return bytes(i for i in unpack_ids(item.ids) if i < 256).decode("utf-8", "replace")
    return repr(msgspec.msgpack.decode(item.payload))


# ---------------------------------------------------------------- one-shot: call, embed


class EchoBatch:
    """The function of the one-shot echo engine."""

    def __init__(self, options: EchoOptions) -> None:
        self._options = options
        self._answer = _embedded if options.kind_served == "embed" else _returned
        self._free = options.cost_ns(1, 1) == 0
        self._faults = _Faults(options) if options.faulty else None

    def run(self, items: Sequence[Item]) -> list[Outcome | BaseException]:
        if self._faults is not None:
            self._faults.strike(items, len(items))
        if not self._free:
            _spend(self._options.cost_ns(input_tokens(items), len(items)))
        answer = self._answer
        if self._faults is None:
            return [answer(item) for item in items]
        answers: list[Outcome | BaseException] = [self._faults.of(item) or answer(item) for item in items]
        return answers[:-1] if self._options.short_results else answers


def _returned(item: Item) -> Outcome:
    return Outcome(item.rid, item.payload)


def _embedded(item: Item) -> Outcome:
    return Outcome(item.rid, embedding=embedding_of(unpack_ids(item.ids)))


def embedding_of(ids: Sequence[int]) -> bytes:
    """A unit vector of EMBEDDING_SIZE float32 that depends on each id and its place, and on nothing else."""
    sums = [0] * EMBEDDING_SIZE
    for place, token in enumerate(ids):
        sums[(token + place) % EMBEDDING_SIZE] += 1 + token % 97
    norm = sum(x * x for x in sums) ** 0.5 or 1.0
    vector = array("f", (x / norm for x in sums))
    return vector.tobytes()


# ---------------------------------------------------------------- iteration: generate


class _Voice:
    """One request being echoed: `source[at]` is the next id to say, `end` where the new tokens end."""

    __slots__ = ("at", "batch", "end", "fresh", "item", "logprobs", "muted", "source", "stops")

    def __init__(self, batch: int, item: Item, script: Sequence[int]) -> None:
        params = item.params or Params()
        self.batch = batch
        self.item = item
        self.source = list(script) or unpack_ids(item.ids)
        self.at = len(item.done) // 4
        self.end = min(len(self.source), params.max_new_tokens)
        self.stops = frozenset(params.stop_token_ids)
        self.muted = params.min_tokens
        self.logprobs = params.logprobs
        self.fresh = True

    def speak(self) -> Row:
        """The next token. A stop token is the last of an answer; `max_new_tokens` and `min_tokens` count `done` too."""
        said = self.source[self.at : min(self.at + 1, self.end)]
        self.at += len(said)
        if said and said[0] in self.stops and self.at > self.muted:
            finish = "stop"
        elif self.at < self.end:
            finish = ""
        else:
            finish = "stop" if self.end == len(self.source) else "length"
        return Row(self.batch, self.item.rid, said, finish, logprobs=self._sure(said))

    def _sure(self, said: Sequence[int]) -> bytes | None:
        """What was said had probability 1, and nothing else had any."""
        if self.logprobs is None or not said:
            return None
        named = said if self.logprobs else ()
        return pack_logprobs([0.0], named, [0.0] * len(named))


class EchoStream:
    """Iteration-level echo: each step says one id for each running request; new ones join at the next step."""

    def __init__(self, card: Card, options: EchoOptions) -> None:
        self._card = card
        self._options = options
        self._faults = _Faults(options) if options.faulty else None
        self._voices: dict[tuple[int, int], _Voice] = {}
        self._dropped: dict[tuple[int, int], None] = {}

    def __repr__(self) -> str:
        return f"<EchoStream {self._card.name}, {len(self._voices)} running>"

    @property
    def card(self) -> Card:
        return self._card

    @property
    def busy(self) -> bool:
        return bool(self._voices)

    def add(self, batch: int, items: Sequence[Item]) -> None:
        for item in items:
            self._voices[batch, item.rid] = _Voice(batch, item, self._options.script)

    def cancel(self, batch: int, rids: Sequence[int]) -> None:
        self._dropped.update(dict.fromkeys((batch, rid) for rid in rids if (batch, rid) in self._voices))

    def step(self) -> list[Report]:
        if not self._voices:
            return []
        rows = [Row(batch, rid, [], "dropped") for batch, rid in self._dropped]
        self._end(rows)
        failed = self._struck() if self._faults is not None else []
        began_ns = now_ns()
        voices = list(self._voices.values())
        tokens = sum(self._computed(voice) for voice in voices)
        if voices:
            _spend(self._options.cost_ns(tokens, len(voices)))
        for voice in voices:
            rows.append(self._row(voice))
            voice.fresh = False
        self._end(rows)
        if not rows:
            return list(failed)
        return [*failed, Step(now_ns() - began_ns, tokens, len(voices), rows)]

    def close(self) -> None:
        self._voices.clear()
        self._dropped.clear()

    def _computed(self, voice: _Voice) -> int:
        """Tokens of this step: the whole prompt (and what was generated elsewhere) when it joins, one after that."""
        return max(1, (len(voice.item.ids) + len(voice.item.done)) // 4) if voice.fresh else 1

    def _row(self, voice: _Voice) -> Row:
        fault = self._faults.of(voice.item) if self._faults is not None and voice.fresh else None
        if fault is not None:
            return Row(voice.batch, voice.item.rid, [], "error", "engine_error", f"RuntimeError: {fault}")
        return voice.speak()

    def _struck(self) -> list[Failed]:
        """Failures of the rows that joined now: culprit unknown, as in a real prefill."""
        assert self._faults is not None
        fresh = [voice for voice in self._voices.values() if voice.fresh]
        try:
            if fresh:
                self._faults.strike([voice.item for voice in fresh], len(self._voices))
        except (MemoryError, RuntimeError) as error:
            code = "out_of_memory" if isinstance(error, MemoryError) else "engine_error"
            lost: dict[int, list[int]] = {}
            for voice in fresh:
                lost.setdefault(voice.batch, []).append(voice.item.rid)
                del self._voices[voice.batch, voice.item.rid]
            return [Failed(batch, code, f"{type(error).__name__}: {error}", rids) for batch, rids in lost.items()]
        return []

    def _end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.finish:
                self._voices.pop((row.batch, row.rid), None)
                self._dropped.pop((row.batch, row.rid), None)
