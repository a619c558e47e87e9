"""The laws, held after every step. The referee hears what the core hears and sees what it answers: no more.

    endings     each request gets exactly one, the one that it is owed, in the very step in which it is owed
    dispatch    only who waits, to a living worker of the same service, never beyond its room, never when it is too late
    order       a tenant's requests go by due time, equals in order of arrival; where batches are padded, its first
                with those of like lengths
    trial       a suspect goes alone, and nobody joins it
    long        long inputs go alone, under their bound
    shares      of two tenants that both wait, none gets more than a few batches ahead (fair.py)
    cache       nobody joins others where the cache has no room for the inputs
    tokens      those of a live request are forwarded, all others are not
    drop        who leaves a worker unasked is dropped there
    wake        what is due is never slept through; no wake-up is for nothing
    idle        nobody waits for a worker that could take it, longer than the window may be
    counters    they add up, by name

A breach raises BrokenLawError. `books.py` keeps what the referee knows.
"""

from collections.abc import Mapping

from headway.bench.storm.books import Books
from headway.bench.storm.entries import NEVER_NS, Asked, Key, Member, Owed
from headway.bench.storm.fair import Shares
from headway.policies.order import due_time
from headway.policies.windows.p95 import LITERAL_CAP_NS
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.errors import CODES
from headway.scheduler.spec import PolicySpec

NS_PER_MS = 1_000_000
COUNTED = ("received", "ended.", "refused.", "batches", "requeued", "workers_", "late_")
IDLE_TICKS_MAX = 3  # in a row that change nothing: a window may be asked again, but not for ever


class BrokenLawError(AssertionError):
    """`law`: which one, the same whatever the numbers."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law = law


def hold(true: bool, law: str, text: str) -> None:
    """Raise BrokenLawError unless it is so."""
    if not true:
        raise BrokenLawError(law, text)


def window_max_ns(policy: PolicySpec) -> int:
    """How long a request may wait beside a worker that could take it."""
    if policy.window == "fixed":
        return int(policy.fixed_wait_ms * NS_PER_MS)
    return {"greedy": 0, "p95": LITERAL_CAP_NS}.get(policy.window, int(policy.max_wait_cap_ms * NS_PER_MS))


class Referee:
    """`step` after each step of the core. Knows the settings, and nothing of the core."""

    def __init__(self, policy: PolicySpec, lost_after_ns: int, stuck_after_ns: int) -> None:
        self.books = Books(policy, lost_after_ns, stuck_after_ns)
        self.policy = policy
        self.now_ns = 0
        self.drained = False
        self.shares: dict[Key, Shares] = {}
        self._window_max_ns = window_max_ns(policy)
        self._batches = 0
        self._idle_ticks = 0
        self._asked_ns = NEVER_NS  # the last wake-up it asked for

    def __repr__(self) -> str:
        return f"<Referee {len(self.books.live)} live, {len(self.books.over)} over>"

    def step(
        self, event: ev.Event, now_ns: int, actions: list[act.Action], wakeup_ns: int, counters: Mapping[str, int]
    ) -> None:
        """What the core answered to `event`; its wake-up and counters after it. Raises BrokenLawError."""
        self.now_ns = now_ns = max(now_ns, self.now_ns)
        refused = frozenset([action.rid for action in actions if type(action) is act.Refuse])
        owed = self.books.hear(event, now_ns, refused)
        for key, tenant, tokens in owed.made:
            self._shares_of(key).serve(tenant, tokens)
        self._endings(owed, actions)
        self._words(owed, actions)
        for action in actions:
            if type(action) is act.Dispatch:
                self._dispatch(action, now_ns)
        self._drained(actions)
        for key in self.books.places:
            self._idle(key, now_ns, wakeup_ns)
            self._fair(key, owed)
        self._wake(event, now_ns, actions, wakeup_ns)
        self._counters(counters)

    # ------------------------------------------------------------ what is owed

    def _endings(self, owed: Owed, actions: list[act.Action]) -> None:
        ends: dict[int, tuple[str, str, int]] = {}
        refusals: dict[int, str] = {}
        for action in actions:
            if type(action) is act.End:
                hold(action.rid not in ends, "endings", f"request {action.rid} ended twice in one step")
                ends[action.rid] = (action.code, action.finish, action.batch)
            elif type(action) is act.Refuse:
                hold(action.rid not in refusals, "endings", f"request {action.rid} refused twice in one step")
                refusals[action.rid] = action.code
                if CODES[action.code].retryable:
                    hold((action.retry_after_ms or 0) > 0, "endings", f"no retry hint: {action}")
        for rid in sorted(ends.keys() | owed.endings.keys()):
            got, want = ends.get(rid), owed.endings.get(rid)
            hold(got == want, "endings", f"request {rid} is owed {want} (code, finish, batch), and got {got}")
        for rid in sorted(refusals.keys() | owed.refusals.keys()):
            refusal, due = refusals.get(rid), owed.refusals.get(rid)
            hold(refusal == due, "endings", f"request {rid} is owed the refusal {due}, and got {refusal}")

    def _words(self, owed: Owed, actions: list[act.Action]) -> None:
        """What goes to clients and workers beside endings and batches."""
        drops: list[tuple[int, int, int]] = []
        forwards: list[tuple[tuple[int, int], ...]] = []
        restarts: list[int] = []
        for action in actions:
            if type(action) is act.Drop:
                drops += [(action.worker, action.batch, rid) for rid in action.rids]
            elif type(action) is act.Forward:
                forwards.append(action.rows)
            elif type(action) is act.Restart:
                restarts.append(action.worker)
        hold(forwards == owed.forwards, "tokens", f"to be forwarded {owed.forwards}, was {forwards}")
        hold(sorted(drops) == sorted(owed.drops), "drop", f"to be dropped {owed.drops}, was {drops}")
        hold(sorted(restarts) == sorted(owed.restarts), "wake", f"to be given up {owed.restarts}, was {restarts}")

    def _drained(self, actions: list[act.Action]) -> None:
        said = sum(type(action) is act.Drained for action in actions)
        due = self.books.drain_ns is not None and not self.books.live and not self.drained
        hold(said == due, "endings", f"drained is to be said {int(due)} times, and was {said} times")
        self.drained = self.drained or due

    # ------------------------------------------------------------ batches

    def _dispatch(self, action: act.Dispatch, now_ns: int) -> None:
        books, rids = self.books, action.rids
        for rid in rids:
            hold(rid in books.live, "dispatch", f"{rid} is dispatched, and is over or was never asked for")
            asked = books.live[rid]
            hold(not asked.batch, "dispatch", f"{rid} is dispatched, and runs in batch {asked.batch}")
            hold(asked.key == (action.model, action.kind), "dispatch", f"{rid} is dispatched to another service")
            hold(asked.deadline_ns > now_ns, "dispatch", f"{rid} is dispatched after its deadline")
            right = asked.long in (None, action.lane == "long")
            hold(right, "dispatch", f"{rid} is dispatched from the wrong lane")
        hold(bool(rids) and len(set(rids)) == len(rids), "dispatch", f"a batch of {rids}")
        hold(action.batch > self._batches, "dispatch", f"batch id {action.batch} was given before")
        hold(not self.drained, "dispatch", "a batch after all was drained")
        member = books.workers.get(action.worker)
        hold(member is not None, "dispatch", f"worker {action.worker} is gone")
        assert member is not None
        hold(member.key == (action.model, action.kind), "dispatch", f"worker {action.worker} serves {member.key}")
        hold(not member.trial, "trial", f"batch {action.batch} joins the suspect {member.trial}")
        hold(len(rids) <= member.room, "dispatch", f"{len(rids)} requests for {member.room} places: {action}")
        running = len(member.seats) + len(rids)
        hold(action.running == running, "dispatch", f"{running} are running there, and it says {action.running}")
        self._batches = action.batch
        taken = [books.live[rid] for rid in rids]
        waiting = [asked for asked in books.waiting(member.key) if asked.long == taken[0].long]
        if self.policy.bypass_tokens != "auto":
            oldest_ns = min(asked.arrived_ns for asked in waiting)
            right = action.waited_ns == now_ns - oldest_ns
            hold(right, "dispatch", f"the oldest waited {now_ns - oldest_ns}: {action}")
        self._fits(taken, member)
        if any(asked.suspect for asked in taken):
            hold(len(rids) == 1, "trial", f"a suspect runs with others: {action}")
            hold(action.reason == "on_trial", "trial", f"a suspect runs as {action.reason}")
        bound = books.long_bound(member.key)
        if action.lane == "long":
            hold(len(rids) == 1, "long", f"a long input runs with others: {action}")
            hold(books.long_running(member.key) < bound, "long", f"more than {bound} long inputs run")
        shares = self._shares_of(member.key)
        shares.long = max(shares.long, bound if action.lane == "long" else 0)
        for asked in taken:
            shares.serve(asked.event.tenant, asked.tokens)
        shares.turn(sum(asked.kv_max for asked in taken))
        books.run(member, action.batch, rids, long=action.lane == "long", now_ns=now_ns)
        if self.policy.bypass_tokens != "auto":
            self._order(taken, [asked for asked in waiting if not asked.batch])

    def _fits(self, taken: list[Asked], member: Member) -> None:
        """Tokens and cache stay within their limits, for all but one who goes alone."""
        sizes = [asked.tokens for asked in taken]
        most = self.policy.batch_tokens_max
        tokens = max(sizes) * len(sizes) if taken[0].length_class else sum(sizes)
        hold(len(taken) == 1 or not most or tokens <= most, "dispatch", f"{tokens} tokens in a batch of at most {most}")
        free = member.kv_total - member.kv_taken(at_most=False)
        alone = len(taken) == 1 and not member.seats
        hold(alone or not member.kv_total or sum(sizes) <= free, "cache", f"{sum(sizes)} tokens, and {free} are free")

    def _order(self, taken: list[Asked], left: list[Asked]) -> None:
        """A batch has the first of some tenant. Nobody in it comes after an equal who stays; where nothing is padded,
        nor after anybody of its tenant who is due sooner."""
        classes = {asked.length_class for asked in taken}
        due: dict[str, tuple[int, int]] = {}
        first: dict[tuple[int, str, int], Asked] = {}
        for asked in left:
            due[asked.event.tenant] = min(due.get(asked.event.tenant, (NEVER_NS, 0)), _due(asked))
            if asked.event.deadline_ns is None and not asked.suspect:
                first.setdefault(_equals(asked), asked)
        for gone in taken:
            equal = first.get(_equals(gone))
            if equal is not None and gone.event.deadline_ns is None:
                hold(equal.order > gone.order, "order", f"{gone.rid} goes before its elder equal {equal.rid}")
        heads = [asked for asked in taken if _due(asked) < due.get(asked.event.tenant, (NEVER_NS, 0))]
        hold(bool(heads), "order", f"no tenant's first is among {[asked.rid for asked in taken]}")
        stay = [asked.rid for asked in left if asked.length_class == taken[0].length_class]
        hold(len(classes) == 1 or not stay, "lengths", f"other lengths are padded with {taken[0].rid} than {stay}")
        if classes == {0}:
            late = [asked.rid for asked in taken if asked not in heads and not _mixed(left)]
            hold(not late, "order", f"{late} go before one of their tenant who is due sooner")

    def _fair(self, key: Key, owed: Owed) -> None:
        """Of two tenants that both wait all the time neither gets more than a few batches ahead."""
        shares = self._shares_of(key)
        members = self.books.members(key)
        if owed.again:
            shares.again()
        waiting = self.books.waiting(key)
        short, long = ({asked.event.tenant for asked in waiting if asked.long is of} for of in (False, True))
        gap, one, other = shares.gap(short, long)
        seats = sum(member.cap for member in members if member.ready.iteration)
        bound = (2 + shares.long) * shares.largest + 2 * seats * self.books.most_new
        hold(gap <= bound, "shares", f"tenants {one!r} and {other!r} of {key} are {gap} tokens apart, past {bound}")

    def _shares_of(self, key: Key) -> Shares:
        return self.shares.setdefault(key, Shares(self.policy.tenant_weights))

    # ------------------------------------------------------------ time

    def _idle(self, key: Key, now_ns: int, wakeup_ns: int) -> None:
        """Where a worker has room, a short input waits for its window only, a long one for that or its bound."""
        books, waiting = self.books, self.books.waiting(key)
        free = [member for member in books.members(key) if member.room > 0]
        rooms = sum(all(member.surely_fits(asked) for asked in waiting) for member in free)
        if not rooms or self.policy.bypass_tokens == "auto":
            return
        short = [asked.arrived_ns for asked in waiting if not asked.long]
        if short:
            until_ns = min(short) + self._window_max_ns
            hold(now_ns < until_ns, "idle", f"{len(short)} wait for {key} beside a free worker past any window")
            hold(wakeup_ns <= until_ns, "wake", f"{len(short)} wait for {key} beside a free worker, nobody will wake")
        held = len(waiting) - len(short)
        if held and books.long_running(key) < books.long_bound(key):
            hold(bool(short) and len(free) == 1, "idle", f"{held} long inputs wait for {key} beside a free worker")

    def _wake(self, event: ev.Event, now_ns: int, actions: list[act.Action], wakeup_ns: int) -> None:
        due_ns = self.books.due_ns()
        hold(wakeup_ns > now_ns, "wake", f"at {now_ns} the core asks to be woken at {wakeup_ns}")
        hold(wakeup_ns <= due_ns, "wake", f"due at {due_ns}, and the core asks to be woken at {wakeup_ns}")
        if actions or type(event) is not ev.Tick:
            self._idle_ticks = 0
        elif now_ns >= self._asked_ns:  # a tick that it asked for
            self._idle_ticks += 1
        self._asked_ns = wakeup_ns
        hold(self._idle_ticks <= IDLE_TICKS_MAX, "wake", f"woken {self._idle_ticks} times for nothing")
        hold(due_ns < NEVER_NS or wakeup_ns < NEVER_NS or not self.books.live, "wake", "who is left will never end")

    def _counters(self, counters: Mapping[str, int]) -> None:
        counts = self.books.counts
        named = {name: n for name, n in counters.items() if n and name.startswith(COUNTED)}
        hold(named == {name: n for name, n in counts.items() if n}, "counters", f"{named} is to be {dict(counts)}")
        launched = sum(n for name, n in counters.items() if name.startswith("launched."))
        hold(launched == counts["batches"], "counters", f"{launched} launches of {counts['batches']} batches")


def _due(asked: Asked) -> tuple[int, int]:
    """When it is due, and its place among those due together."""
    return due_time(asked.event, asked.arrived_ns), asked.order


def _equals(asked: Asked) -> tuple[int, str, int]:
    """Requests with the same of these go in order of arrival."""
    return asked.event.priority, asked.event.tenant, asked.event.tokens if asked.length_class else 0


def _mixed(left: list[Asked]) -> bool:
    """Some came before the service was known to pad, and some after: they are classes of their own."""
    return any(asked.length_class for asked in left)
