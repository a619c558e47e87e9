"""Who comes when: a whole open-loop load as arrays, from wherever it came, and what may be done to it.

Every source ends here, so that a load can be cut, filtered and set to a speed in one way only. Times are integers in
nanoseconds, start at 0 and never fall. `max_new` is how long the answer was; an answer of no tokens is kept as 0, and
an engine that generates still needs its one step for it. Nothing here reads a file, a clock or a random number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from headway.scheduler.config import ConfigError

Ints = npt.NDArray[np.int64]
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
SPAN_MAX_NS = 1 << 60  # 36 years: past it a time is a fault, and the sums would leave 64 bits


class TraceError(ConfigError):
    """A trace that cannot be used. The message says which file, where in it, and what would do."""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """One request in each position. `deadline_ns`: after its arrival, 0 for none. `tenant`: index into `tenants`.
    `row`: which record of its recording it was, where there is more to be known of it there."""

    name: str
    at_ns: Ints
    tokens: Ints
    max_new: Ints
    deadline_ns: Ints
    priority: Ints
    tenant: Ints
    tenants: tuple[str, ...] = ("",)
    notes: tuple[str, ...] = field(default=())
    row: Ints | None = None

    def __len__(self) -> int:
        return len(self.at_ns)

    def __repr__(self) -> str:
        return f"<Arrivals {self.name}: {len(self):,} in {self.span_ns / NS_PER_S:,.1f} s>"

    @property
    def span_ns(self) -> int:
        """From the first arrival to the last."""
        return int(self.at_ns[-1]) if len(self) else 0

    @property
    def rate_rps(self) -> float | None:
        """Requests a second over the whole span; None where that means nothing."""
        return (len(self) - 1) * NS_PER_S / self.span_ns if self.span_ns else None

    def noted(self, *notes: str) -> "Arrivals":
        """The same, with more to say about it."""
        return replace(self, notes=self.notes + notes)

    def where(self, keep: npt.NDArray[np.bool_], what: str) -> "Arrivals":
        """Those that are kept, from 0 again. Raises TraceError if none is left."""
        kept = int(keep.sum())
        if not kept:
            raise TraceError(f"{self.name}: nothing is left of {len(self):,} requests after keeping only {what}")
        at = self.at_ns[keep]
        return replace(
            self,
            at_ns=at - at[0],
            tokens=self.tokens[keep],
            max_new=self.max_new[keep],
            deadline_ns=self.deadline_ns[keep],
            priority=self.priority[keep],
            tenant=self.tenant[keep],
            row=None if self.row is None else self.row[keep],
        )

    def cut(self, *, start_s: float = 0.0, span_s: float = 0.0, limit: int = 0) -> "Arrivals":
        """Those from `start_s` on, for `span_s` seconds and at most `limit` of them; 0: all."""
        first, last = self.at_ns >= start_s * NS_PER_S, self.at_ns < (start_s + span_s) * NS_PER_S
        keep = first & (last | (span_s <= 0))
        if limit:
            keep &= np.cumsum(keep) <= limit
        if bool(keep.all()):
            return self
        return self.where(keep, f"{span_s or 'all'} s from {start_s} s on")

    def shorter(self, tokens_max: int) -> "Arrivals":
        """Those with at most so many input tokens."""
        return self.where(self.tokens <= tokens_max, f"inputs of at most {tokens_max} tokens")

    def divided(self, by: int) -> "Arrivals":
        """Inputs shorter by a factor."""
        return replace(self, tokens=np.maximum(1, self.tokens // by))

    def at_rate(self, rps: float) -> "Arrivals":
        """Faster or slower as a whole, so that the mean rate is `rps`; what was a burst stays one."""
        native = self.rate_rps
        if native is None:
            raise TraceError(f"{self.name}: {len(self)} requests at one time have no rate that could be set")
        if not rps > 0:
            raise TraceError(f"a rate must be more than 0, not {rps}")
        at = np.rint(self.at_ns * (native / rps))
        if at[-1] > SPAN_MAX_NS:
            raise TraceError(f"{self.name}: at {rps} requests a second this would last more than 36 years")
        return replace(self, at_ns=at.astype(np.int64))

    def with_deadline(self, deadline_ms: float) -> "Arrivals":
        """All with this deadline."""
        return replace(self, deadline_ns=np.full(len(self), int(deadline_ms * NS_PER_MS), np.int64))


def ints(values: Sequence[int] | npt.NDArray[np.generic]) -> Ints:
    """As the arrays here are."""
    return np.asarray(values, np.int64)


def plain(name: str, at_ns: Ints, tokens: Ints, max_new: Ints, *notes: str) -> Arrivals:
    """Arrivals without deadlines, priorities and tenants."""
    none = np.zeros(len(at_ns), np.int64)
    return Arrivals(name, at_ns, tokens, max_new, none, none, none, notes=notes)


def ordered(arrivals: Arrivals, *, absolute: bool = False) -> Arrivals:
    """As read from a file: sorted (stably) and shifted to start at 0, each with a note if it had to be done.

    `absolute`: the times are dates, so that not to start at 0 is nothing to speak of.
    """
    at = arrivals.at_ns
    if not len(at):
        raise TraceError(f"{arrivals.name}: there is no request in it")
    unsorted = int((np.diff(at) < 0).sum())
    if unsorted:
        order = np.argsort(at, kind="stable")
        columns = {key: getattr(arrivals, key)[order] for key in ("tokens", "max_new", "deadline_ns", "priority")}
        arrivals = replace(arrivals, at_ns=at[order], tenant=arrivals.tenant[order], **columns).noted(
            f"{unsorted:,} rows were earlier than the row before; sorted by time"
        )
    start = int(arrivals.at_ns[0])
    if start:
        arrivals = replace(arrivals, at_ns=arrivals.at_ns - start)
        if not absolute:
            arrivals = arrivals.noted(f"times began at {start / NS_PER_S:,.3f} s; shifted to 0")
    if arrivals.span_ns > SPAN_MAX_NS:
        raise TraceError(f"{arrivals.name}: the times span more than 36 years; are they in another unit?")
    empty = int((arrivals.max_new == 0).sum())
    if empty and empty < len(arrivals):
        arrivals = arrivals.noted(f"{empty:,} answers have no tokens; an engine that generates needs one step for each")
    return arrivals
