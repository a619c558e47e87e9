"""The door: what a client's message asks for, and everything that is checked or computed before the core decides.

Text up to INLINE_CHARS is tokenised at once, since that costs less than a change of thread; longer text in a thread of
its own (the tokenizer library releases the interpreter lock), so that the loop never waits for it.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headway.policies.forecast import LoadForecast
from headway.scheduler import clock, wire
from headway.scheduler.book import NEVER_NS
from headway.scheduler.errors import HeadwayError
from headway.scheduler.flight import Flight
from headway.scheduler.front import Reply
from headway.scheduler.params import check_vocabulary, filled
from headway.scheduler.report import info, status
from headway.scheduler.routes import Route, accept, check_text, cut_to_fit, fit_output
from headway.scheduler.text import Encoded, TextPlane

if TYPE_CHECKING:
    from headway.scheduler.runtime import Runtime

log = logging.getLogger("headway.scheduler")

INLINE_CHARS = 512  # about 0.1 ms of tokenising
TURN_CHARS = 32  # what a chat template adds to each turn, about
THREADS = 2
BYTES_PER_TOKEN = 4  # a guess for payloads whose size in tokens the caller does not state

Work = Callable[[], Encoded]


class Door:
    """Takes requests in for one runtime."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headway-tokenise")
        self._pending: dict[int, Flight] = {}
        self._deferred: list[tuple[int, int]] = []  # (when, rid): refused once, and tried again
        self._encoded: SimpleQueue[tuple[Flight, Route, Encoded | HeadwayError]] = SimpleQueue()

    def close(self) -> None:
        """End the threads; what they still compute is not needed."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------ messages

    def answer(self, client: int, message: wire.ClientMessage, reply: Reply) -> None:
        """Do what a client's message asks for."""
        kind = type(message)
        if kind is wire.Cancel:
            found = self._runtime.cancel(client, message.id or "")
            reply(wire.CancelAck(id=message.id, found=found))
        elif kind is wire.Ping:
            reply(wire.Pong(id=message.id))
        elif kind is wire.Info:
            reply(info(self._runtime, message.id))
        elif isinstance(message, wire.Status):
            reply(status(self._runtime, message.id, message.batches))
        else:
            assert isinstance(message, (wire.Generate, wire.Embed, wire.Classify, wire.Score, wire.Call))
            self._runtime.submit(client, message, reply)

    def enter(self, flight: Flight) -> None:
        """Look at a request; sooner or later it is `entered` or `refused`."""
        message = flight.message
        try:
            if message.deadline_ms is not None and message.deadline_ms <= 0:
                raise HeadwayError("deadline_exceeded", f"deadline_ms is {message.deadline_ms}", field="deadline_ms")
            flight.kind = _KINDS[type(message)]
            route = self._runtime.crew.routes.find(message.model, flight.kind)
            flight.model = route.card.name
            _ENTER[type(message)](self, flight, message, route)
        except Exception as error:
            self._runtime.refused(flight, _told(error))

    # ------------------------------------------------------------ one kind of request each

    def _call(self, flight: Flight, message: wire.Call, route: Route) -> None:
        flight.payload = message.payload
        size = memoryview(message.payload).nbytes
        flight.tokens = message.tokens if message.tokens is not None else max(1, size // BYTES_PER_TOKEN)
        limit = route.card.max_input_tokens
        if limit and flight.tokens > limit:
            text = f"the payload counts {flight.tokens} tokens; the limit of {flight.model!r} is {limit}"
            raise HeadwayError("too_long", text, field="payload" if message.tokens is None else "tokens")
        self._runtime.entered(flight)

    def _generate(self, flight: Flight, message: wire.Generate, route: Route) -> None:
        if message.input_ids is not None:
            self._take(flight, route, Encoded(message.input_ids))
        elif message.prompt is not None:
            self._text(flight, route, message.prompt, "prompt")
        else:
            assert message.messages is not None
            messages = [{"role": turn.role, "content": turn.content} for turn in message.messages]
            codec = _codec(route, "messages")
            for index, turn in enumerate(messages):
                check_text(turn["content"], f"messages[{index}].content", route.card)
            size = sum(len(turn["content"]) + TURN_CHARS for turn in messages)
            self._encode(flight, route, lambda: Encoded(codec.encode_chat(messages)), size)

    def _one_text(self, flight: Flight, message: wire.Embed | wire.Classify, route: Route) -> None:
        prompt = _prompt(message, route)
        if message.input_ids is not None:
            self._take(flight, route, Encoded(message.input_ids))
        else:
            assert message.text is not None
            self._text(flight, route, prompt + message.text, "text", cut=_cuts(message, route))

    def _pair(self, flight: Flight, message: wire.Score, route: Route) -> None:
        codec = _codec(route, "text")
        text, pair = message.text, message.text_pair
        if _cuts(message, route):
            self._encode(flight, route, lambda: cut_to_fit(codec, text, pair, route.card), len(text) + len(pair))
            return
        check_text(text, "text", route.card)
        check_text(pair, "text_pair", route.card)
        self._encode(flight, route, lambda: codec.encode_pair(text, pair), len(text) + len(pair))

    def _text(self, flight: Flight, route: Route, text: str, field: str, *, cut: bool = False) -> None:
        codec = _codec(route, field)
        if cut:
            self._encode(flight, route, lambda: cut_to_fit(codec, text, None, route.card), len(text))
            return
        check_text(text, field, route.card)
        self._encode(flight, route, lambda: Encoded(codec.encode(text, special=True)), len(text))

    # ------------------------------------------------------------ tokens

    def _encode(self, flight: Flight, route: Route, work: Work, chars: int) -> None:
        if chars <= INLINE_CHARS:
            self._take(flight, route, work())
        else:
            self._pending[flight.rid] = flight
            self._threads.submit(self._in_thread, flight, route, work)

    def _in_thread(self, flight: Flight, route: Route, work: Work) -> None:
        try:
            result: Encoded | HeadwayError = work()
        except BaseException as error:  # whatever it is, the request gets its ending
            result = _told(error)
        self._encoded.put((flight, route, result))
        self._runtime.waker.set_from_thread()

    def forecast(self, flight: Flight) -> LoadForecast | None:
        """What it will ask of the devices of a mixture of experts; None of any other model."""
        desk, key = self._runtime.crew.desk, (flight.model, flight.kind)
        if desk is None or key not in desk.models:
            return None
        most = flight.params.max_new_tokens if flight.params else 0
        decode = min(most, self._runtime.core.services[key].answer_mean or most)
        return desk.forecast(key, flight.rid, flight.ids + flight.ids_pair, flight.message.tenant or "", float(decode))

    def defer(self, flight: Flight, waits_ms: int, now_ns: int) -> bool:
        """Hold a refused request, once, until it may be let in; whether its deadline leaves time for that."""
        until_ns = now_ns + waits_ms * clock.NS_PER_MS
        if (
            flight.deferred
            or flight.deadline_ns >= NEVER_NS
            or until_ns + waits_ms * clock.NS_PER_MS > flight.deadline_ns
        ):
            return False
        flight.deferred, flight.entered = True, False
        self._pending[flight.rid] = flight
        heappush(self._deferred, (until_ns, flight.rid))
        return True

    def _try_again(self) -> None:
        now_ns = clock.now_ns()
        while self._deferred and self._deferred[0][0] <= now_ns:
            flight = self._pending.pop(heappop(self._deferred)[1], None)
            if flight is not None:
                self._runtime.entered(flight)

    def collect(self) -> None:
        """Take in what the threads have tokenised, and who may try again."""
        if self._deferred:
            self._try_again()
        while True:
            try:
                flight, route, result = self._encoded.get_nowait()
            except Empty:
                return
            if self._pending.pop(flight.rid, None) is None:
                continue  # it has had its ending meanwhile
            try:
                if isinstance(result, HeadwayError):
                    raise result
                self._take(flight, route, result)
            except Exception as error:
                self._runtime.refused(flight, _told(error))

    @property
    def waiting(self) -> int:
        """Requests whose text is being tokenised, or waits for it."""
        return len(self._pending)

    @property
    def wakeup_ns(self) -> int:
        """The first deadline among them, or when one may try again."""
        at = min((flight.deadline_ns for flight in self._pending.values()), default=NEVER_NS)
        return min(at, self._deferred[0][0]) if self._deferred else at

    def expire(self, now_ns: int) -> None:
        """End those whose deadline has come."""
        for flight in [flight for flight in self._pending.values() if flight.deadline_ns <= now_ns]:
            self.drop(flight, HeadwayError("deadline_exceeded", "deadline_ms passed while the text was tokenised"))

    def drop(self, flight: Flight, error: HeadwayError) -> None:
        """End a request that has not entered."""
        self._pending.pop(flight.rid, None)
        self._runtime.refused(flight, error)

    def drop_all(self, error: HeadwayError) -> None:
        """End all that have not entered."""
        for flight in list(self._pending.values()):
            self.drop(flight, error)

    def _take(self, flight: Flight, route: Route, encoded: Encoded) -> None:
        """The input is token ids now: does it fit, and how much may come out?"""
        message = flight.message
        accept(flight, encoded.first, _field(message), route, encoded.second)
        flight.truncated = encoded.cut
        if isinstance(message, wire.Generate):
            if message.params.stop and route.codec is None:
                text = f"model {route.card.name!r} has no tokenizer here, to find strings: send stop_token_ids"
                raise HeadwayError("invalid_request", text, field="params.stop")
            if route.card.vocab_size:
                check_vocabulary(message.params, route.card.vocab_size)
            params = filled(message.params, route.card.defaults)
            most = fit_output(params, flight.tokens, route.card)
            flight.speak(route.codec, params if most == params.max_new_tokens else replace(params, max_new_tokens=most))
        self._runtime.entered(flight)


def _told(error: BaseException) -> HeadwayError:
    """The error a client is told; one that is not its own fault is logged."""
    if isinstance(error, HeadwayError):
        return error
    log.error("a request could not be taken in", exc_info=error)
    return HeadwayError("internal", f"the request could not be taken in: {type(error).__name__}: {error}")


def _field(message: wire.Request) -> str:
    for name in ("input_ids", "prompt", "messages", "text"):
        if getattr(message, name, None) is not None:
            return name
    return "payload"


def _codec(route: Route, field: str) -> TextPlane:
    if route.codec is None:
        text = f"model {route.card.name!r} has no tokenizer here: send input_ids instead of {field}"
        raise HeadwayError("invalid_request", text, field=field)
    return route.codec


def _cuts(message: wire.Embed | wire.Classify | wire.Score, route: Route) -> bool:
    """Whether a text that is too long is cut: as its request says, else as the model's operator does."""
    return route.card.truncate if message.truncate is None else message.truncate


def _prompt(message: wire.Embed | wire.Classify, route: Route) -> str:
    """What goes before the text."""
    name = message.prompt_name if isinstance(message, wire.Embed) else None
    prompts = route.card.prompts
    if not name:
        return prompts.get("", "") if name is None else ""
    if message.input_ids is not None:
        text = "prompt_name goes with text: what is put before token ids is their sender's affair"
        raise HeadwayError("invalid_request", text, field="prompt_name")
    if name not in prompts:
        there = ", ".join(sorted(filter(None, prompts))) or "none"
        text = f"model {route.card.name!r} has no prompt {name[: wire.QUOTE_CHARS_MAX]!r}; there: {there}"
        raise HeadwayError("invalid_request", text, field="prompt_name")
    return prompts[name]


_KINDS: dict[type, str] = {
    wire.Generate: "generate",
    wire.Embed: "embed",
    wire.Classify: "classify",
    wire.Score: "score",
    wire.Call: "call",
}
_ENTER: dict[type, Callable[[Door, Flight, Any, Route], None]] = {
    wire.Generate: Door._generate,
    wire.Embed: Door._one_text,
    wire.Classify: Door._one_text,
    wire.Score: Door._pair,
    wire.Call: Door._call,
}
