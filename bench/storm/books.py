"""The referee's own books: what anybody can know who hears all events and sees all actions. Plain, and slow on purpose.

Nothing is shared with the core but the words of events and actions, the settings, and two constants of its contract.
`hear` takes in an event and collects what the core owes for it (`Owed`); the referee compares.
"""

from collections import Counter

from headway.bench.storm.entries import NEVER_NS, Asked, Key, Member, Owed, Place
from headway.scheduler import events as ev
from headway.scheduler.core import LOSSES_IN_COMPANY
from headway.scheduler.service import ORPHAN_NS
from headway.scheduler.spec import PolicySpec


class Books:
    """The state of everything. `counts` is what the core's counters must say."""

    def __init__(self, policy: PolicySpec, lost_after_ns: int, stuck_after_ns: int) -> None:
        self.policy = policy
        self.live: dict[int, Asked] = {}
        self.over: set[int] = set()
        self.workers: dict[int, Member] = {}
        self.places: dict[Key, Place] = {}
        self.counts: Counter[str] = Counter()
        self.drain_ns: int | None = None
        self.most_new = 0  # the longest answer that anybody asked for
        self.owed = Owed()
        self._lost_after_ns = lost_after_ns
        self._stuck_after_ns = stuck_after_ns
        self._order = 0
        self._refused: frozenset[int] = frozenset()
        self._hear = {
            ev.Submit: self._submit,
            ev.Cancel: self._cancel,
            ev.ClientGone: self._client_gone,
            ev.Satisfied: self._satisfied,
            ev.WorkerReady: self._worker_ready,
            ev.Beat: self._beat,
            ev.BatchDone: self._batch_done,
            ev.BatchFailed: self._batch_failed,
            ev.StepDone: self._step_done,
            ev.WorkerLost: self._worker_lost,
            ev.ServiceDown: self._service_down,
            ev.Drain: self._drain,
            ev.Tick: lambda _event, _now_ns: None,
            ev.Together: self._together,
        }

    def waiting(self, key: Key) -> list[Asked]:
        """Who waits for this service, in order of arrival."""
        return [asked for asked in self.live.values() if not asked.batch and asked.key == key]

    def members(self, key: Key) -> list[Member]:
        """Its workers."""
        return [member for member in self.workers.values() if member.key == key]

    def long_running(self, key: Key) -> int:
        """Its long inputs without a first result."""
        return sum(sum(member.seats.values()) for member in self.members(key))

    def long_bound(self, key: Key) -> int:
        """How many of those there may be."""
        return self.policy.long_concurrency or max(1, len(self.members(key)) // 2)

    def hear(self, event: ev.Event, now_ns: int, refused: frozenset[int]) -> Owed:
        """Take in one step's event. `refused`: whom the core has refused, where the policy may decide either way."""
        self.owed = Owed()
        self._refused = refused
        self._hear[type(event)](event, now_ns)  # type: ignore[operator]
        self._time(now_ns)
        return self.owed

    # ------------------------------------------------------------ requests

    def _submit(self, event: ev.Submit, now_ns: int) -> None:
        self.counts["received"] += 1
        place = self._place((event.model, event.kind), now_ns)
        if self.drain_ns is not None:
            code = "shutting_down"
        elif place.down or now_ns >= place.abandoned_ns:
            code = "no_worker"
        else:
            code = self._admission(event, now_ns)
        if code:
            self.counts[f"refused.{code}"] += 1
            self.owed.refusals[event.rid] = code
            self.over.add(event.rid)
            return
        self._order += 1
        self.most_new = max(self.most_new, event.max_new)
        bypass = self.policy.bypass_tokens
        long = None if bypass == "auto" else event.tokens > bypass
        length_class = event.tokens.bit_length() if place.padded else 0
        self.live[event.rid] = Asked(event, self._order, now_ns, long, length_class)

    def _admission(self, event: ev.Submit, now_ns: int) -> str:
        waiting = self.waiting((event.model, event.kind))
        tokens = sum(asked.event.tokens for asked in waiting) + event.tokens
        if len(waiting) >= self.policy.queue_max or (waiting and tokens > self.policy.queue_tokens_max):
            return "queue_full"
        if event.deadline_ns is not None and event.deadline_ns <= now_ns:
            return "deadline_exceeded"
        if event.deadline_ns is not None and event.rid in self._refused:
            return "deadline_unreachable"  # a matter of prediction
        return ""

    def _cancel(self, event: ev.Cancel, now_ns: int) -> None:
        del now_ns
        if event.rid in self.live:
            self._leave(self.live[event.rid], event.code)
        else:
            self.counts["late_cancels"] += 1

    def _client_gone(self, event: ev.ClientGone, now_ns: int) -> None:
        del now_ns
        for asked in [asked for asked in self.live.values() if asked.event.client == event.client]:
            self._leave(asked, "cancelled")

    def _satisfied(self, event: ev.Satisfied, now_ns: int) -> None:
        del now_ns
        if event.rid in self.live:
            self._leave(self.live[event.rid], "", "stop")

    def _leave(self, asked: Asked, code: str, finish: str = "") -> None:
        """It ends, and if it runs, its worker is told."""
        if asked.batch:
            self.owed.drops.append((asked.worker, asked.batch, asked.rid))
        self._end(asked, code, finish)

    def _end(self, asked: Asked, code: str, finish: str = "") -> None:
        self.owed.endings[asked.rid] = (code, finish, asked.batch)
        self.counts[f"ended.{code or 'ok'}"] += 1
        self.over.add(asked.rid)
        del self.live[asked.rid]

    def _again(self, asked: Asked, *, suspect: bool) -> None:
        self.counts["requeued"] += 1
        self.owed.again = True
        asked.batch = asked.worker = 0
        asked.suspect = asked.suspect or suspect

    def run(self, member: Member, batch: int, rids: tuple[int, ...], *, long: bool, now_ns: int) -> None:
        """These are now in flight."""
        self.counts["batches"] += 1
        if not member.seats:
            member.progress_ns = now_ns
        for rid in rids:
            asked = self.live[rid]
            asked.batch, asked.worker = batch, member.ready.worker
            asked.long = long
            member.seats[(batch, rid)] = long
            member.holds[rid] = asked
            if asked.suspect:
                member.trial = rid

    # ------------------------------------------------------------ workers

    def _worker_ready(self, event: ev.WorkerReady, now_ns: int) -> None:
        self.counts["workers_joined"] += 1
        cap = max(1, int(self.policy.in_flight_fraction * event.max_num_seqs))
        self.workers[event.worker] = Member(event, cap, now_ns, now_ns, kv_total=event.kv_tokens)
        place = self._place((event.model, event.kind), now_ns)
        place.abandoned_ns = NEVER_NS
        place.down = False
        place.padded = place.padded or event.padded

    def _seen(self, number: int, now_ns: int) -> Member | None:
        member = self.workers.get(number)
        if member is None:
            self.counts["late_reports"] += 1
        else:
            member.seen_ns = now_ns
        return member

    def _beat(self, event: ev.Beat, now_ns: int) -> None:
        member = self._seen(event.worker, now_ns)
        if member is not None and member.progress != event.progress:
            member.progress, member.progress_ns = event.progress, now_ns

    def _mine(self, rid: int, batch: int) -> Asked | None:
        """The request, if it still runs in this batch."""
        asked = self.live.get(rid)
        return asked if asked is not None and asked.batch == batch else None

    def _batch_done(self, event: ev.BatchDone, now_ns: int) -> None:
        member = self._seen(event.worker, now_ns)
        if member is None:
            return
        rids = member.of(event.batch)
        self.counts["late_reports"] += not rids
        codes = {rid: code for rid, code, _ in event.failed}
        for rid in rids:
            member.vacate(event.batch, rid)
            asked = self._mine(rid, event.batch)
            if asked is not None:
                self._end(asked, codes.get(rid, ""))

    def _batch_failed(self, event: ev.BatchFailed, now_ns: int) -> None:
        member = self._seen(event.worker, now_ns)
        if member is None:
            return
        rids = member.of(event.batch)
        if not rids:
            self.counts["late_reports"] += 1
            return
        self.counts["batches_failed"] += 1
        known_culprit = len(rids) == 1 and not member.ready.iteration
        for rid in [rid for rid in event.rids if rid in rids] if event.rids else rids:
            member.vacate(event.batch, rid)
            asked = self._mine(rid, event.batch)
            if asked is None:
                continue
            if asked.suspect or known_culprit:
                self._end(asked, event.code)
            else:
                self._again(asked, suspect=True)

    def _step_done(self, event: ev.StepDone, now_ns: int) -> None:
        member = self._seen(event.worker, now_ns)
        if member is None:
            return
        member.progress_ns = now_ns
        member.kv_used, member.kv_total = event.kv_used, event.kv_total or member.kv_total
        new: list[tuple[int, int]] = []
        for row in event.rows:
            seat = (row.batch, row.rid)
            if seat not in member.seats:
                self.counts["late_rows"] += 1
                continue
            if row.new:
                member.seats[seat] = False  # a long input has been read
            asked = self._mine(row.rid, row.batch)
            if asked is not None and row.new:
                new.append(seat)
                self.owed.made.append((asked.key, asked.event.tenant, row.new))
                if asked.suspect and member.trial == row.rid:
                    member.trial = 0
                asked.suspect = False
            if row.finish:
                member.vacate(row.batch, row.rid)
                if asked is not None:
                    well = row.finish in ("stop", "length")
                    self._end(asked, "" if well else row.code or "internal", row.finish if well else "")
        self.owed.forwards.append(tuple(new))

    def _worker_lost(self, event: ev.WorkerLost, now_ns: int) -> None:
        member = self.workers.pop(event.worker, None)
        if member is None:
            self.counts["late_reports"] += 1
            return
        self.counts["workers_lost"] += 1
        alone = len(member.seats) == 1
        for batch, rid in member.seats:
            asked = self._mine(rid, batch)
            if asked is None:
                continue
            if event.orderly or member.trial not in (0, rid):
                self._again(asked, suspect=False)
                continue
            asked.losses += 1
            blamed = alone or member.trial == rid
            if asked.losses >= self.policy.poison_after * (1 if blamed else LOSSES_IN_COMPANY):
                self._end(asked, "poison_request")
            else:
                self._again(asked, suspect=True)
        if not self.members(member.key):
            self.places[member.key].abandoned_ns = now_ns + ORPHAN_NS

    def _service_down(self, event: ev.ServiceDown, now_ns: int) -> None:
        key = (event.model, event.kind)
        self._place(key, now_ns).down = True
        for asked in self.waiting(key):
            self._leave(asked, "no_worker")

    def _place(self, key: Key, now_ns: int) -> Place:
        return self.places.setdefault(key, Place(now_ns + ORPHAN_NS))

    # ------------------------------------------------------------ time

    def _drain(self, event: ev.Drain, now_ns: int) -> None:
        del now_ns
        self.drain_ns = event.deadline_ns

    def _together(self, event: ev.Together, now_ns: int) -> None:
        for one in event.events:
            self._hear[type(one)](one, now_ns)  # type: ignore[operator]

    def _time(self, now_ns: int) -> None:
        for asked in [asked for asked in self.live.values() if asked.deadline_ns <= now_ns]:
            self._leave(asked, "deadline_exceeded")
        for key, place in self.places.items():
            if now_ns >= place.abandoned_ns:
                for asked in self.waiting(key):
                    self._leave(asked, "no_worker")
        for number, member in list(self.workers.items()):
            if now_ns >= self.gives_up_ns(member):
                self.owed.restarts.append(number)
                self._worker_lost(ev.WorkerLost(number, "given up"), now_ns)
        if self.drain_ns is not None and now_ns >= self.drain_ns:
            for asked in list(self.live.values()):
                self._leave(asked, "shutting_down")

    def gives_up_ns(self, member: Member) -> int:
        """When a worker counts as lost if it says nothing more."""
        silent_ns = member.seen_ns + self._lost_after_ns
        return min(silent_ns, member.progress_ns + self._stuck_after_ns) if member.seats else silent_ns

    def due_ns(self) -> int:
        """The next moment at which something must be done if nothing happens before; windows apart."""
        due = [asked.deadline_ns for asked in self.live.values()]
        due += [self.gives_up_ns(member) for member in self.workers.values()]
        due += [place.abandoned_ns for key, place in self.places.items() if self.waiting(key)]
        if self.drain_ns is not None and self.live:
            due.append(self.drain_ns)
        return min(due, default=NEVER_NS)
