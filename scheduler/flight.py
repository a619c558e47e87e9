"""One request's payload side, from the door to its ending: what the core never sees.

A flight is made when a request is taken from a front and dropped when its one ending has been replied. It turns token
ids into text and deltas, holds back what may still become a stop string, and remembers the tokens made so far, so that
another worker can continue after them.
"""

from collections.abc import Callable

from headway.scheduler import clock, link, wire
from headway.scheduler.book import NEVER_NS
from headway.scheduler.errors import HeadwayError
from headway.scheduler.front import Reply
from headway.scheduler.stops import StopMatcher
from headway.scheduler.text import TextPlane, TextStream


class Odds:
    """The logprobs of an answer's tokens so far; made only for a request that asks for them.

    Rows come whole, tokens may be cut off at a stop string: what is read is what lies between two tokens.
    """

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._chosen: list[float] = []
        self._top_ids: list[list[int]] = []
        self._top: list[list[float]] = []

    def take(self, row: link.Row) -> None:
        """Those of a row's tokens. Raises ValueError if its engine sent none, or not of so many tokens."""
        if row.logprobs is None:
            raise ValueError("the engine sent no logprobs")
        chosen, top_ids, top = link.unpack_logprobs(row.logprobs, len(row.tokens))
        self._chosen += chosen
        self._top_ids += top_ids
        self._top += top

    def between(self, start: int, end: int) -> wire.Logprobs:
        """Those of the tokens from `start` up to `end`."""
        if not self._alternatives:
            return wire.Logprobs(self._chosen[start:end])
        return wire.Logprobs(self._chosen[start:end], self._top_ids[start:end], self._top[start:end])


class Flight:
    """The payload of one request. `reply` takes its messages; after `finish` or `fail` nothing more is sent.

    `on_end`, if set, is told of the ending: "ok", or the error's code.
    """

    __slots__ = (
        "_odds",
        "_parts",
        "_seq",
        "_stops",
        "_text",
        "_unsent",
        "arrived_ns",
        "batch_size",
        "client",
        "deferred",
        "dispatched_ns",
        "entered",
        "first_token_ns",
        "ids",
        "ids_pair",
        "kind",
        "message",
        "model",
        "on_end",
        "out",
        "params",
        "payload",
        "reply",
        "rid",
        "stopped",
        "tokens",
        "truncated",
        "written",
    )

    def __init__(self, rid: int, client: int, message: wire.Request, reply: Reply, now_ns: int) -> None:
        self.rid = rid
        self.client = client
        self.message = message
        self.reply = reply
        self.arrived_ns = now_ns
        self.model = ""
        self.kind = ""
        self.ids = b""
        self.ids_pair = b""
        self.tokens = 0
        self.truncated = False
        self.params: wire.Params | None = None
        self.payload = link.NOTHING
        self.dispatched_ns = 0
        self.first_token_ns = 0
        self.batch_size = 0
        self.out: list[int] = []
        self.stopped = False
        self.entered = False  # the core has it
        self.written = False  # its arrival is in the record of traffic
        self.on_end: Callable[[Flight, str], None] | None = None
        self.deferred = False  # it was refused once, and has been held at the door, or must not be
        self._text: TextStream | None = None
        self._stops: StopMatcher | None = None
        self._odds: Odds | None = None
        self._parts: list[str] = []
        self._unsent: list[int] = []
        self._seq = 0

    def __repr__(self) -> str:
        return f"<Flight {self.rid} {self.kind} {self.message.id!r} {len(self.out)} tokens out>"

    @property
    def bytes(self) -> int:
        """Size of its payload, for the bound on memory; token ids are bounded elsewhere."""
        message = self.message
        return memoryview(message.payload).nbytes if isinstance(message, wire.Call) else 0

    @property
    def deadline_ns(self) -> int:
        """When its time is over, or never."""
        left_ms = self.message.deadline_ms
        return NEVER_NS if left_ms is None else self.arrived_ns + left_ms * clock.NS_PER_MS

    def item(self) -> link.Item:
        """What a worker needs of it, the tokens already made included."""
        done = link.pack_ids(self.out) if self.out else b""
        tenant = self.message.tenant or ""
        return link.Item(self.rid, self.ids, self.ids_pair, done, self.params, self.payload, tenant)

    def speak(self, codec: TextPlane | None, params: wire.Params) -> None:
        """It generates, and `codec` (if there is one) turns its tokens into text."""
        self.params = params
        self._text = codec.stream() if codec is not None else None
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._odds = Odds(params.logprobs) if params.logprobs is not None else None

    def started(self, now_ns: int, batch_size: int) -> None:
        """It was dispatched; only the first time counts as waiting."""
        if not self.dispatched_ns:
            self.dispatched_ns = now_ns
        self.batch_size = batch_size

    # ------------------------------------------------------------ tokens

    def push(self, row: link.Row, now_ns: int) -> bool:
        """New tokens from the engine. Whether the answer is complete now, by a stop string."""
        if self.stopped:
            return False
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        tokens = row.tokens
        if self._odds is not None:
            self._odds.take(row)
        if self._text is None or self._stops is None:
            self.out += tokens
            self._unsent += tokens
            self._emit(self._text.push(tokens) if self._text is not None else "")
            return False
        for token in tokens:  # one by one, so that the answer ends at the token that completed the stop string
            self.out.append(token)
            self._unsent.append(token)
            text, self.stopped = self._until_stop(self._text.push([token]))
            self._emit(text)
            if self.stopped:
                return True
        return False

    def _until_stop(self, text: str) -> tuple[str, bool]:
        """What can be shown of new text, and whether a stop string ended it.

        The text of the first `min_tokens` tokens is not searched, nor is it a part of a stop string found later.
        """
        if self._stops is None or self.params is None or len(self.out) <= self.params.min_tokens:
            return text, False
        return self._stops.push(text)

    def _odds_from(self, start: int) -> wire.Logprobs | None:
        return self._odds.between(start, len(self.out)) if self._odds is not None else None

    def _emit(self, text: str, *, last: bool = False) -> None:
        """Keep the text; stream it, with the tokens since the last delta, if it is a stream."""
        self._parts.append(text)
        if not getattr(self.message, "stream", False):
            return
        if text or (self._text is None and self._unsent) or (last and self._unsent):
            odds = self._odds_from(len(self.out) - len(self._unsent))
            self.reply(wire.Delta(id=self.message.id, seq=self._seq, token_ids=self._unsent, text=text, logprobs=odds))
            self._seq += 1
            self._unsent = []

    def _flush(self) -> str:
        """The whole text, everything held back included."""
        rest = ""
        if self._text is not None and not self.stopped:
            rest = self._text.finish()
            rest, self.stopped = self._until_stop(rest)
            if self._stops is not None and not self.stopped:
                rest += self._stops.finish()
        self._emit(rest, last=True)
        return "".join(self._parts)

    # ------------------------------------------------------------ the one ending

    def timing(self, now_ns: int) -> wire.Timing:
        """Milliseconds, as the server saw them."""
        first = self.first_token_ns
        return wire.Timing(
            queue_ms=_ms((self.dispatched_ns or now_ns) - self.arrived_ns),
            total_ms=_ms(now_ns - self.arrived_ns),
            ttft_ms=_ms(first - self.arrived_ns) if first else None,
            batch_size=self.batch_size or 1,
        )

    def finish(self, finish: str, outcome: link.Outcome | None, now_ns: int) -> None:
        """The good ending."""
        text = finish_reason = token_ids = None
        if self.kind == "generate":
            text = self._flush()
            finish_reason = "stop" if self.stopped else finish
            token_ids = self.out
        self.reply(
            wire.Result(
                id=self.message.id,
                text=text,
                token_ids=token_ids,
                finish_reason=finish_reason,
                logprobs=self._odds_from(0),
                embedding=link.unpack_floats(outcome.embedding) if outcome and outcome.embedding is not None else None,
                scores=outcome.scores if outcome else None,
                value=outcome.value if outcome and self.kind == "call" else None,
                usage=wire.Usage(self.tokens, len(self.out), self.truncated),
                timing=self.timing(now_ns),
                model=self.model,
            )
        )
        self._over("ok")

    def fail(self, error: HeadwayError) -> None:
        """The bad ending; what had been made so far goes with it, unless the client does not read anyway."""
        if self.out and error.code != "slow_reader":
            error.partial = {"text": self._flush(), "token_ids": self.out}
        self.reply(wire.error_message(self.message.id, error))
        self._over(error.code)

    def _over(self, outcome: str) -> None:
        if self.on_end is not None:
            self.on_end(self, outcome)


def _ms(ns: int) -> float:
    return ns // 1000 / 1000  # whole microseconds
