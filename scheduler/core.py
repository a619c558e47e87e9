"""The core: one method and one number. `step(event, now_ns)` returns what is owed, `wakeup_ns` says when to come back.

Only the core changes scheduling state. It has no socket, no clock, no lock and no task; it never sees a payload. The
live router, the embedded scheduler, the simulator and the tests are short loops over it:

    actions = core.step(event, now_ns)      # or Tick() when wakeup_ns has come
    for action in actions: perform(action)  # after step has returned, never from inside

Laws, checked by `audit`: a request that was submitted gets exactly one Refuse or End; until then it is in exactly one
place, a lane or a batch; a report that is not about something current changes nothing but a counter; a batch is closed
only when a worker is free to run it (late binding). The policies decide what to do next; the core keeps the books.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from headway.policies.views import Policies, Refusal, Wait
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.audit import audit
from headway.scheduler.book import NEVER_NS, Book, Request
from headway.scheduler.fleet import Batch, Worker
from headway.scheduler.queue import Lane
from headway.scheduler.roster import Roster
from headway.scheduler.service import Choice, Service

STOPPED = "the server stopped before the request was done"
LOSSES_IN_COMPANY = 2  # times poison_after: so often may a worker be lost under a request that was not alone


class Core:
    """Scheduling state and its only writer. `lost_after_ns`: silence after which a worker counts as lost;
    `stuck_after_ns`: a busy worker whose progress stands still for this long is given up."""

    def __init__(
        self, policies: Policies, *, lost_after_ns: int = 5_000_000_000, stuck_after_ns: int = 300_000_000_000
    ) -> None:
        self.policies = policies
        self.services: dict[tuple[str, str], Service] = {}
        self.book = Book()
        self.counters: Counter[str] = Counter()
        self.draining_until_ns: int | None = None
        self.roster = Roster(lost_after_ns, stuck_after_ns)
        self._now_ns = 0
        self._order = 0
        self._batches = 0
        self._drained = False
        self._out: list[act.Action] = []
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            ev.Submit: self._submit,
            ev.Cancel: self._cancel,
            ev.ClientGone: self._client_gone,
            ev.Satisfied: self._satisfied,
            ev.WorkerReady: self._worker_ready,
            ev.Beat: self._beat,
            ev.BatchDone: self._batch_done,
            ev.BatchFailed: self._batch_failed,
            ev.StepDone: self._step_done,
            ev.Routed: self._routed,
            ev.WorkerLost: self._worker_lost,
            ev.ServiceDown: self._service_down,
            ev.Drain: self._drain,
            ev.Tick: self._tick,
            ev.Together: self._together,
        }

    def __repr__(self) -> str:
        running = len(self.book.running)
        return f"<Core {len(self.book) - running} waiting, {running} running, {len(self.roster)} workers>"

    # ------------------------------------------------------------ the one method and the one number

    def step(self, event: ev.Event, now_ns: int) -> list[act.Action]:
        """Take in what happened, decide, and return what is to be done. Raises TypeError for an unknown event."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"not an event: {event!r}")
        self._out = out = list[act.Action]()
        self._now_ns = now_ns = max(now_ns, self._now_ns)  # a clock that steps back stands still here
        handler(event, now_ns)
        self._expire(now_ns)
        if self.draining_until_ns is not None:
            self._finish_drain(now_ns)  # before deciding: what ends here is not dispatched first
        self._decide(now_ns)
        return out

    @property
    def wakeup_ns(self) -> int:
        """When `step(Tick(), ...)` is due if nothing happens before; NEVER_NS if nothing is pending."""
        at = min(self.book.deadline_ns, self.roster.wakeup_ns)
        for service in self.services.values():
            at = min(at, service.wakeup_ns)
        if self.draining_until_ns is not None and not self._drained:
            at = min(at, self.draining_until_ns)
        return at

    # ------------------------------------------------------------ clients

    def _submit(self, event: ev.Submit, now_ns: int) -> None:
        self.counters["received"] += 1
        service = self._service(event.model, event.kind, now_ns)
        refusal = self._refusal(service, event, now_ns)
        if refusal is not None:
            self.counters[f"refused.{refusal.code}"] += 1
            self.counters[f"refusal.{refusal.reason}"] += 1
            self._out.append(act.Refuse(event.rid, *refusal))
            return
        self._order += 1
        request = service.request(event, self._order, self.policies, now_ns)
        self.book.enter(request)
        service.lane(request).arrive(request, now_ns)

    def _refusal(self, service: Service, arrival: ev.Submit, now_ns: int) -> Refusal | None:
        if self.draining_until_ns is not None:
            return Refusal("shutting_down", "the server is draining and takes no new work", 1000, "draining")
        return service.refusal(arrival, self.policies, now_ns)

    def _cancel(self, event: ev.Cancel, now_ns: int) -> None:
        del now_ns
        request = self.book.live.get(event.rid)
        if request is None:
            self.counters["late_cancels"] += 1
        else:
            self._leave(request, "cancel", event.code, event.message)

    def _client_gone(self, event: ev.ClientGone, now_ns: int) -> None:
        del now_ns
        for rid in list(self.book.clients.get(event.client, ())):
            self._leave(self.book.live[rid], "cancel", "cancelled", "the client went away")

    def _satisfied(self, event: ev.Satisfied, now_ns: int) -> None:
        del now_ns
        request = self.book.live.get(event.rid)
        if request is not None:
            self._leave(request, "finish", finish="stop")

    # ------------------------------------------------------------ workers

    def _worker_ready(self, event: ev.WorkerReady, now_ns: int) -> None:
        service = self._service(event.model, event.kind, now_ns)
        worker = Worker(
            worker=event.worker,
            name=event.name,
            iteration=event.iteration,
            max_batch=event.max_batch,
            cap=self.policies.in_flight_max(event.max_num_seqs) if event.iteration else event.max_num_seqs,
            seen_ns=now_ns,
            progress_ns=now_ns,
            kv_total=event.kv_tokens,
        )
        self.counters["workers_joined"] += 1
        service.join(worker, event.prior_ns, self.policies, padded=event.padded, experts=event.experts)
        self.roster.enter(service, worker)

    def _seen(self, worker_id: int, now_ns: int) -> tuple[Service, Worker] | None:
        """The worker of a report, marked as alive; None (and counted) if it is not one of ours any more."""
        found = self.roster.seen(worker_id, now_ns)
        self.counters["late_reports"] += found is None
        return found

    def _beat(self, event: ev.Beat, now_ns: int) -> None:
        found = self._seen(event.worker, now_ns)
        if found and event.progress != found[1].progress:
            found[1].progress = event.progress
            found[1].progress_ns = now_ns

    def _batch_done(self, event: ev.BatchDone, now_ns: int) -> None:
        current = self._current_batch(event.worker, event.batch, now_ns)
        if current is None:
            return
        service, worker, batch = current
        worker.failures = 0
        tokens = batch.tokens if service.kind == "call" else event.tokens  # a call's size is in its caller's measure
        service.batch_done(batch, tokens, event.compute_ns, now_ns)
        self.counters["tokens.input"] += batch.tokens
        self.counters["tokens.computed"] += tokens
        bad = {rid: (code, message) for rid, code, message in event.failed}
        for rid in service.fleet.clear(worker, batch):
            request = self.book.current(rid, batch.batch)
            if request is not None:
                code, message = bad.get(rid, ("", ""))
                self._end(request, "fail" if code else "finish", code, message)

    def _batch_failed(self, event: ev.BatchFailed, now_ns: int) -> None:
        current = self._current_batch(event.worker, event.batch, now_ns)
        if current is None:
            return
        service, worker, batch = current
        worker.failures += 1
        self.counters["batches_failed"] += 1
        rids = [rid for rid in event.rids if rid in batch.rids] if event.rids else list(batch.rids)
        alone = len(batch.rids) == 1
        for rid in rids:
            service.fleet.vacate(worker, batch, rid)
            request = self.book.current(rid, batch.batch)
            if request is None:
                continue
            if request.suspect or (alone and not worker.iteration):
                self._end(request, "fail", event.code, event.message)
            else:  # the culprit is unknown: each runs once more, alone or on trial
                self._requeue(request)

    def _step_done(self, event: ev.StepDone, now_ns: int) -> None:
        found = self._seen(event.worker, now_ns)
        if found is None:
            return
        service, worker = found
        worker.failures = 0
        worker.progress_ns = now_ns
        worker.kv_used, worker.kv_total = event.kv_used, event.kv_total or worker.kv_total
        service.learned.observe(event.running, event.tokens, event.compute_ns)
        current: list[tuple[Request, ev.RowDone]] = []
        for row in event.rows:
            batch = worker.batches.get(row.batch)
            if batch is None or row.rid not in batch.rids:
                self.counters["late_rows"] += 1
                continue
            if row.new and batch.long:
                service.fleet.prefilled(batch)
            if row.finish:
                service.fleet.vacate(worker, batch, row.rid)
            request = self.book.current(row.rid, row.batch)
            if request is not None:
                current.append((request, row))
        self._out.append(act.Forward(tuple([(row.batch, row.rid) for _, row in current if row.new])))
        for request, row in current:
            self._row(request, row, worker)

    def _row(self, request: Request, row: ev.RowDone, worker: Worker) -> None:
        request.new += row.new
        if row.new and request.suspect:  # it has shown itself harmless
            request.suspect = False
            if worker.trial == request.rid:
                worker.trial = 0
        if row.finish in ("stop", "length"):
            self._end(request, "finish", finish=row.finish)
        elif row.finish:
            self._end(request, "fail", row.code or "internal", row.message or f"the engine ended it: {row.finish}")

    def _routed(self, event: ev.Routed, _now_ns: int) -> None:
        if (service := self.services.get((event.model, event.kind))) is not None and service.experts is not None:
            service.experts.told(event)

    def _worker_lost(self, event: ev.WorkerLost, now_ns: int) -> None:
        found = self.roster.strike(event.worker)
        if found is None:
            self.counters["late_reports"] += 1
            return
        service, worker = found
        worker.moved("lose")
        self.counters["workers_lost"] += 1
        trial, alone = worker.trial, worker.running == 1
        for batch in list(worker.batches.values()):
            for rid in service.fleet.clear(worker, batch):
                request = self.book.current(rid, batch.batch)
                if request is None:
                    continue
                if event.orderly or (trial and trial != rid):
                    self._requeue(request, suspect=False)
                else:
                    self._survive(request, alone=alone or trial == rid, why=event.reason)
        service.part(worker, now_ns)

    def _survive(self, request: Request, *, alone: bool, why: str) -> None:
        """Its worker is lost: run it again on trial, or not at all if it must be the cause, or has cost too many."""
        request.losses += 1
        limit = self.policies.poison_after
        if request.losses >= limit * (1 if alone else LOSSES_IN_COMPANY):
            text = f"{request.losses} workers were lost while running this request (last: {why})"
            self._end(request, "fail", "poison_request", text)
        else:
            self._requeue(request)

    def _service_down(self, event: ev.ServiceDown, now_ns: int) -> None:
        service = self._service(event.model, event.kind, now_ns)
        service.down = event.reason
        self._abandon(service)

    # ------------------------------------------------------------ time

    def _tick(self, event: ev.Tick, now_ns: int) -> None:
        """Whatever is due is found by the checks that follow every event."""

    def _together(self, event: ev.Together, now_ns: int) -> None:
        for one in event.events:
            self._handlers[type(one)](one, now_ns)

    def _drain(self, event: ev.Drain, now_ns: int) -> None:
        del now_ns
        self.draining_until_ns = event.deadline_ns

    def _expire(self, now_ns: int) -> None:
        """End what is over: deadlines, waiting and running; workers that fell silent; services without workers."""
        while request := self.book.overdue(now_ns):
            self._leave(request, "expire", "deadline_exceeded", "deadline_ms passed while the request was running")
        for service in self.services.values():
            for lane in service.lanes:
                for late in lane.expired(now_ns):
                    self._end(late, "expire", "deadline_exceeded", "deadline_ms passed while the request waited")
            if service.waiting and now_ns >= service.abandoned_ns:
                self._abandon(service)
        for number, reason in self.roster.overdue(now_ns):
            self._out.append(act.Restart(number, reason))
            self._worker_lost(ev.WorkerLost(number, reason), now_ns)

    def _abandon(self, service: Service) -> None:
        why = service.down or "no worker has come"
        for lane in service.lanes:
            for request in list(lane.waiting.values()):
                text = f"no worker serves {service.kind} for model {service.model!r}: {why}"
                self._leave(request, "give_up", "no_worker", text, retry_after_ms=1000)

    def _finish_drain(self, now_ns: int) -> None:
        assert self.draining_until_ns is not None
        if now_ns >= self.draining_until_ns:
            for request in list(self.book.live.values()):
                self._leave(request, "give_up", "shutting_down", STOPPED, retry_after_ms=1000)
        if not self.book and not self._drained:
            self._drained = True
            self._out.append(act.Drained())

    # ------------------------------------------------------------ deciding

    def _decide(self, now_ns: int) -> None:
        """While a worker is free and a lane may launch: close a batch and dispatch it. Then say why the rest waits."""
        for service in self.services.values():
            if not service.waiting:
                continue
            service.short.decision = service.long.decision = None
            while (free := service.fleet.free) and (choice := service.choose(free, self.policies, now_ns)):
                self._dispatch(service, choice, now_ns)
            for lane in service.lanes:
                if lane.waiting:
                    self._hold(service, lane, service.held(lane, free=bool(free)))

    def _hold(self, service: Service, lane: Lane, reason: str) -> None:
        """Say once why a lane waits: when it begins to, and when the reason is another."""
        if reason != lane.held:
            lane.held = reason
            self.counters[f"held.{reason}"] += 1
            until_ns = lane.decision.until_ns if type(lane.decision) is Wait else NEVER_NS
            until = None if until_ns == NEVER_NS else until_ns
            self._out.append(act.Hold(service.model, service.kind, lane.name, reason, until))

    def _dispatch(self, service: Service, choice: Choice, now_ns: int) -> None:
        lane, reason, takers = choice
        lane.held = ""
        placed = self.policies.place(service.fleet.seats(takers), service.cost)
        worker = takers[placed.seat]
        oldest_ns = lane.oldest_arrival_ns()
        self._batches += 1
        taken, composed = service.take(lane, worker, self.policies, self._batches, now_ns)
        tokens, seats = 0, dict[int, int]()
        for request in taken:
            self.book.run(request, self._batches)
            seats[request.rid] = request.kv
            tokens += request.tokens
        if taken[0].suspect:
            reason = "on_trial"
        if not worker.running:
            worker.progress_ns = now_ns
        batch = Batch(self._batches, seats, tokens, len(taken) * taken[0].long, now_ns)
        service.fleet.start(worker, batch, taken[0].rid if taken[0].suspect else 0)
        self.counters["batches"] += 1
        self.counters[f"launched.{reason}"] += 1
        self.counters[f"placed.{placed.reason}"] += 1
        self._out.append(
            act.Dispatch(
                worker.worker,
                self._batches,
                tuple(seats),
                service.model,
                service.kind,
                lane.name,
                reason,
                placed.reason,
                now_ns - oldest_ns,
                worker.running,
                composed,
            )
        )

    # ------------------------------------------------------------ the books

    def _service(self, model: str, kind: str, now_ns: int) -> Service:
        service = self.services.get((model, kind))
        if service is None:
            window = self.policies.window_of(model, kind)
            service = self.services[(model, kind)] = Service(model, kind, window, self.policies, now_ns)
        return service

    def _current_batch(self, worker_id: int, batch_id: int, now_ns: int) -> tuple[Service, Worker, Batch] | None:
        found = self._seen(worker_id, now_ns)
        batch = found[1].batches.get(batch_id) if found else None
        if found is None or batch is None:
            self.counters["late_reports"] += found is not None
            return None
        return found[0], found[1], batch

    def _leave(self, request: Request, event: str, code: str = "", message: str = "", **more: Any) -> None:
        """End a request wherever it is, for a reason that is not its engine's."""
        if request.batch:
            self._drop_on_worker(request)
        else:
            request.service.lane(request).leave(request)
        self._end(request, event, code, message, **more)

    def _drop_on_worker(self, request: Request) -> None:
        for worker in request.service.fleet.workers.values():
            if request.batch in worker.batches:
                self._out.append(act.Drop(worker.worker, request.batch, (request.rid,)))

    def _requeue(self, request: Request, *, suspect: bool = True) -> None:
        request.service.returned(request)
        self.book.requeue(request)
        request.suspect = suspect or request.suspect
        self.counters["requeued"] += 1
        request.service.lane(request).restore(request)

    def _end(
        self,
        request: Request,
        event: str,
        code: str = "",
        message: str = "",
        *,
        finish: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        """The one ending of a request that is in no lane any more."""
        if request.batch:
            request.service.ended(request)
        self.book.end(request, event)
        self.counters[f"ended.{code}" if code else "ended.ok"] += 1
        self._out.append(act.End(request.rid, request.batch, code, message, finish, retry_after_ms))

    def audit(self) -> None:
        """Check the books; AssertionError names what does not add up. O(everything): for tests."""
        audit(self)
