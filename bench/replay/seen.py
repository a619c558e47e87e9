"""What was seen of one request: when it should have gone, when it went, what came back when.

Times are nanoseconds from the start of the replay; 0 for what did not happen. The clock is read here when something
happens, and nowhere in the reports.
"""

import msgspec

from headway.scheduler import clock

OK = "ok"


class Seen(msgspec.Struct, omit_defaults=True):
    """`due_ns`: when it should have gone. `woke_ns`: when the replayer came to it; `sent_ns`: when it went, after
    waiting for one of the replayer's own places if it has a limit. `gaps`: between messages that bring tokens.
    `server_ms`: from arrival to ending, as the server saw it. `code`: ok, an error's code, or `cancelled` for one that
    the replay itself gave up."""

    index: int
    due_ns: int
    woke_ns: int = 0
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    done_ns: int = 0
    code: str = ""
    message: str = ""
    input: int = 0
    output: int = 0
    gaps: list[int] = msgspec.field(default_factory=list)
    queue_ms: float | None = None
    server_ms: float | None = None
    batch_size: int | None = None
    slow: bool = False
    tenant: str = ""


class Note:
    """Fills in a Seen while a request runs. `at_ns`, where it is known: when a message came, on the steady clock, which
    is before it was looked at."""

    __slots__ = ("_start_ns", "seen")

    def __init__(self, seen: Seen, start_ns: int) -> None:
        self.seen = seen
        self._start_ns = start_ns

    def now_ns(self) -> int:
        """Since the start of the replay; never 0, which would mean that it did not happen."""
        return max(1, clock.now_ns() - self._start_ns)

    def tokens(self, count: int, at_ns: int = 0) -> None:
        """A message came with so many tokens. One without any is no first token."""
        if count <= 0:
            return
        seen, now_ns = self.seen, self._at_ns(at_ns)
        if seen.first_ns:
            seen.gaps.append(now_ns - seen.last_ns)
        else:
            seen.first_ns = now_ns
        seen.last_ns = now_ns
        seen.output += count

    def over(self, code: str, message: str = "", at_ns: int = 0) -> None:
        """The one ending; the first counts."""
        if not self.seen.code:
            self.seen.done_ns = self._at_ns(at_ns)
            self.seen.code = code
            self.seen.message = message

    def _at_ns(self, at_ns: int) -> int:
        return max(1, at_ns - self._start_ns) if at_ns else self.now_ns()
