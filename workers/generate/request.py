"""One request inside the generate engine.

Its whole state is its tokens, how many of them have their keys and values written, and the pages that hold those. What
is left to compute is the difference: one token means it decodes, more mean it still reads its prompt. A request whose
pages are taken away (preempted) goes back to nothing written, and reads its own answer again as part of its prompt.
"""

import dataclasses

from headway.workers.generate.history import History
from headway.workers.generate.plan import Span
from headway.workers.generate.sampling import Choice


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """`tokens`: input, then what was generated here or elsewhere. `limit`: how many `tokens` it may grow to.
    `served`: the last step it got while memory was too short for all; `strikes`: steps of its own that did not fit."""

    batch: int
    rid: int
    tokens: list[int]
    input_tokens: int
    limit: int
    choice: Choice
    stops: frozenset[int]
    tenant: str = ""
    pages: list[int] = dataclasses.field(default_factory=list)
    written: int = 0
    served: int = 0
    strikes: int = 0
    history: History = dataclasses.field(default_factory=History)

    def __repr__(self) -> str:
        return f"<Request {self.rid} {self.written}/{len(self.tokens)} of {self.limit}, {len(self.pages)} pages>"

    @property
    def key(self) -> tuple[int, int]:
        return self.batch, self.rid

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed; at least one while it lives."""
        return len(self.tokens) - self.written

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.input_tokens

    @property
    def ending(self) -> str:
        """Why it is complete, or empty: "stop" after one of its stop tokens, "length" at its limit."""
        if self.generated and self.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else ""

    def span(self, count: int) -> Span:
        """Its next `count` pending tokens."""
        end = self.written + count
        return Span(self.tokens[self.written : end], self.written, self.pages, end == len(self.tokens))
