"""A window as the core asks it: whatever it says is held to its bound, to the deadlines, and to sense.

A window may be an operator's own code. What it raises, and an answer that is none, count as "launch" and as a fault;
the last fault is kept as a sentence for `status`. So no window breaks the core, holds a request for ever or makes it
late.
"""

from headway.policies.views import LaneView, Launch, Wait, WindowChoice

SAFETY, SAFETY_NS = 1.5, 1_000_000  # a window ends this many predicted batches, and this long, before a deadline
REASONS_MAX = 64  # each is a counter for as long as the server lives
REASON_CHARS_MAX = 64
FAULT_CHARS_MAX = 200

WINDOW_FAULT = Launch("window_fault")


class HeldWindow:
    """One service's window. `faults`: how often it raised or said nothing that makes sense; `fault`: the last of it."""

    __slots__ = ("_observe", "_reasons", "_window", "choice", "fault", "faults")

    def __init__(self, choice: WindowChoice) -> None:
        self.choice = choice
        self.faults = 0
        self.fault = ""
        self._window = choice.window
        self._observe = getattr(choice.window, "observe", None)
        self._reasons: set[str] = set()

    def __repr__(self) -> str:
        return f"<HeldWindow {self.choice.name}, {self.faults} faults>"

    def ask(self, view: LaneView, tokens: int, now_ns: int) -> Launch | Wait:
        """Launch or wait? `tokens`: of all that wait in the lane."""
        try:
            answer = self._window(view, now_ns)
            wrong = self._wrong(answer, now_ns)
        except Exception as error:
            wrong = _sentence(error)
        if wrong:
            return self._faulty(wrong)
        return self._hold(answer, view, tokens, now_ns) if type(answer) is Wait else answer

    def observe(self, requests: int, compute_ns: int) -> None:
        """A batch of so many ended after so long; for the windows that learn from it."""
        if self._observe is not None:
            try:
                self._observe(requests, compute_ns)
            except Exception as error:
                self._faulty(_sentence(error))

    def effective_ns(self, view: LaneView, now_ns: int) -> int:
        """How long it would wait now; for people. Nothing is counted."""
        try:
            answer = self._window(view, now_ns)
            if type(answer) is not Wait or self._wrong(answer, now_ns):
                return 0
        except Exception:
            return 0
        return max(0, min(answer.until_ns, view.oldest_arrival_ns + self.choice.bound_ns) - now_ns)

    def _wrong(self, answer: object, now_ns: int) -> str:
        """What is wrong with an answer, or empty."""
        if type(answer) is Launch:
            if type(answer.most) is not int or answer.most < 0:
                return f"Launch.most is {answer.most!r}; it is a number of requests, 0 for all"
            return "" if answer.reason in self._reasons else self._wrong_reason(answer.reason)
        if type(answer) is not Wait:
            return f"it said {type(answer).__name__}, which is neither Launch nor Wait"
        if type(answer.until_ns) is not int:
            return f"Wait.until_ns is {answer.until_ns!r}; it is an int, nanoseconds"
        if answer.until_ns <= now_ns:
            return f"Wait.until_ns is {now_ns - answer.until_ns} ns in the past; it lies after now_ns"
        return "" if answer.reason in self._reasons else self._wrong_reason(answer.reason)

    def _wrong_reason(self, reason: object) -> str:
        """A reason that is new: it becomes a counter's name, so there may not be any number of them."""
        if type(reason) is not str or not 0 < len(reason) <= REASON_CHARS_MAX:
            return f"its reason is no text of 1 to {REASON_CHARS_MAX} characters"
        if len(self._reasons) >= REASONS_MAX:
            return f"it gave more than {REASONS_MAX} different reasons; a reason is a fixed word, without numbers"
        self._reasons.add(reason)
        return ""

    def _faulty(self, wrong: str) -> Launch:
        self.faults += 1
        self.fault = wrong[:FAULT_CHARS_MAX]
        return WINDOW_FAULT

    def _hold(self, wait: Wait, view: LaneView, tokens: int, now_ns: int) -> Launch | Wait:
        """The window ends at its bound, and before the tightest deadline is in danger."""
        until_ns = min(wait.until_ns, view.oldest_arrival_ns + self.choice.bound_ns)
        if until_ns <= now_ns:
            return Launch("window_over")
        if view.tightest_deadline_ns is not None:
            if not view.cost.known:
                return Launch("cost_unknown")  # no telling how long a batch takes: better not to wait
            latest_ns = view.tightest_deadline_ns - int(SAFETY * view.cost.batch_ns(view.waiting, tokens)) - SAFETY_NS
            if latest_ns <= now_ns:
                return Launch("deadline_near")
            until_ns = min(until_ns, latest_ns)
        return wait if until_ns == wait.until_ns else Wait(until_ns, wait.reason)


def _sentence(error: Exception) -> str:
    """An exception of somebody else's code, whose text may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
