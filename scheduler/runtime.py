"""The live loop: events in from sockets, threads and processes; one step of the core; its actions out.

Shared by the ZeroMQ router and the embedded scheduler: both only add requests and take replies. Everything here runs in
one thread and never blocks; text longer than a little is tokenised in another thread. The core's actions are performed
after `step` has returned.
"""

import logging
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import zmq

from headway.scheduler import actions as act
from headway.scheduler import clock, link, wire
from headway.scheduler import events as ev
from headway.scheduler.chosen import policies_of
from headway.scheduler.core import Core
from headway.scheduler.door import Door
from headway.scheduler.errors import HeadwayError
from headway.scheduler.flight import Flight
from headway.scheduler.front import Front, Reply
from headway.scheduler.hub import Hub
from headway.scheduler.record import Records
from headway.scheduler.routes import Routes
from headway.scheduler.spec import ServerSpec
from headway.scheduler.supervisor import Supervisor
from headway.scheduler.waker import Waker

log = logging.getLogger("headway.scheduler")


class Runtime:
    """A scheduler without a front. Made inside a running event loop; `run` is its life, `close` its end."""

    def __init__(self, spec: ServerSpec, *, front: bool = False) -> None:
        self.spec = spec
        self.started_ns = clock.now_ns()
        self.core = Core(
            policies_of(spec.policy),
            lost_after_ns=spec.lost_after_ms * clock.NS_PER_MS,
            stuck_after_ns=spec.stuck_after_ms * clock.NS_PER_MS,
        )
        self.counters: Counter[str] = Counter()
        self.records = Records()
        self.routes = Routes(spec.models)
        self.drained = False
        self.failed = ""  # why nothing can ever be served, once that is so
        self.pids: dict[int, tuple[int, str]] = {}  # worker -> (process, name)
        self._flights: dict[int, Flight] = {}
        self._by_id: dict[tuple[int, str], int] = {}
        self._pending: list[ev.Event] = []
        self._rows: dict[tuple[int, int], deque[list[int]]] = {}
        self._outcomes: dict[tuple[int, int], link.Outcome] = {}
        self._given = 0
        self._stopping = False
        self._changed: list[Callable[[], None]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.waker = Waker()
        self.door = Door(self)
        self.front: Front | None = None
        try:
            self.front = Front(self._context, spec) if front else None
            self.hub = Hub(self._context, self._workers_bind(), curve=spec.curve, allow_public=spec.allow_public)
        except BaseException:
            self._release()
            raise
        self.supervisor = Supervisor(spec, self.hub.address)
        self._unwatch = self.hub.watch(self.waker) + (self.front.watch(self.waker) if self.front else [])

    def _workers_bind(self) -> str:
        if self.spec.workers_bind:
            return self.spec.workers_bind
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")  # private to this user
        return f"ipc://{Path(self._folder.name) / 'workers'}"

    # ------------------------------------------------------------ requests

    def submit(self, client: int, message: wire.Request, reply: Reply) -> None:
        """A request is at the door: from here on it is ours, and `reply` gets exactly one result or error."""
        now_ns = clock.now_ns()
        key = (client, message.id)
        if key in self._by_id and self.front is not None:
            client, reply = self.front.renew(client)
            key = (client, message.id)
        if key in self._by_id:
            self.counters["refused.duplicate_id"] += 1
            text = f"a request with id {message.id!r} of this client is still live"
            reply(wire.error_message(message.id, HeadwayError("duplicate_id", text, field="id")))
            return
        self._given += 1
        flight = Flight(self._given, client, message, reply, now_ns)
        self._flights[flight.rid] = flight
        self._by_id[key] = flight.rid
        self.door.enter(flight)

    def entered(self, flight: Flight) -> None:
        """The door let the request in: the core decides from here on."""
        if flight.rid not in self._flights:
            return  # cancelled while its text was tokenised
        flight.entered = True
        message = flight.message
        left_ms = message.deadline_ms
        self.post(
            ev.Submit(
                rid=flight.rid,
                client=flight.client,
                model=flight.model,
                kind=flight.kind,
                tokens=flight.tokens,
                max_new=flight.params.max_new_tokens if flight.params else 0,
                deadline_ns=None if left_ms is None else flight.arrived_ns + left_ms * clock.NS_PER_MS,
                priority=message.priority,
                tenant=message.tenant or "",
            )
        )
        if message.accepted:
            flight.reply(wire.Accepted(id=message.id))

    def refused(self, flight: Flight, error: HeadwayError) -> None:
        """The door did not let it in."""
        if self._forget(flight.rid) is not None:
            self.counters[f"refused.{error.code}"] += 1
            flight.fail(error)

    def cancel(self, client: int, request_id: str) -> bool:
        """End the live request with this id of this client. Whether there is one."""
        rid = self._by_id.get((client, request_id))
        if rid is None:
            return False
        flight = self._flights[rid]
        if flight.entered:
            self.post(ev.Cancel(rid))
        else:
            self.refused(flight, HeadwayError("cancelled", "cancelled by the client"))
        return True

    def client_gone(self, client: int) -> None:
        """A client will not read its replies: its work ends."""
        for (owner, _), rid in list(self._by_id.items()):
            if owner == client:
                flight = self._flights[rid]
                flight.reply = _nobody
                if not flight.entered:
                    self.refused(flight, HeadwayError("cancelled", "the client went away"))
        self.post(ev.ClientGone(client))

    def post(self, event: ev.Event) -> None:
        """Something happened; the loop takes it up in its next turn."""
        self._pending.append(event)
        self.waker.set()

    def drain(self, limit_ms: int) -> None:
        """Take no new work; let what is here finish for `limit_ms`."""
        self.post(ev.Drain(clock.now_ns() + limit_ms * clock.NS_PER_MS))

    def stop(self) -> None:
        """Leave the loop at once."""
        self._stopping = True
        self.waker.set()

    def on_change(self, call: Callable[[], None]) -> None:
        """Call when a worker has joined or left, or the scheduler has drained."""
        self._changed.append(call)

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until drained or stopped."""
        while not self._stopping and not self.drained:
            self._turn()
            await self.waker.wait(self._wakeup_ns())
        self._turn()

    @property
    def _age_ns(self) -> int:
        return clock.now_ns() - self.started_ns

    def _wakeup_ns(self) -> int:
        if self._pending:
            return 0
        at = min(self.core.wakeup_ns, self.supervisor.wakeup_ns)
        return min(at, self.front.wakeup_ns) if self.front else at

    def _turn(self) -> None:
        """Take in all that has happened, step once, perform."""
        now_ns = clock.now_ns()
        self._hear_workers()
        self._watch_processes(now_ns)
        if self.front is not None:
            self._hear_clients(self.front)
        self.door.collect()
        now_ns = clock.now_ns()
        events, self._pending = self._pending, []
        if events:
            self._perform(self.core.step(events[0] if len(events) == 1 else ev.Together(events), now_ns), now_ns)
        elif now_ns >= self.core.wakeup_ns:
            self._perform(self.core.step(ev.Tick(), now_ns), now_ns)
        self._rows.clear()
        self._outcomes.clear()
        if self.front is not None:
            self.front.flush(now_ns)

    def _hear_clients(self, front: Front) -> None:
        for client in front.gone():
            self.client_gone(client)
        for client in front.slow():
            for (owner, _), rid in list(self._by_id.items()):
                if owner == client:
                    self.post(ev.Cancel(rid, "slow_reader", "the client does not read its answers"))
        for client, message, reply in front.receive():
            self.door.answer(client, message, reply)

    def _hear_workers(self) -> None:
        for worker in self.hub.lost():
            self._lose(worker, "its connection ended")
        for worker, message in self.hub.receive():
            handler = _FROM_WORKER[type(message)]
            handler(self, worker, message)

    def _watch_processes(self, now_ns: int) -> None:
        for ended in self.supervisor.poll(now_ns):
            for worker, (pid, _) in list(self.pids.items()):
                if pid == ended.pid:
                    self._lose(worker, ended.reason)
            why = self.supervisor.hopeless(ended.slot.spec)
            if why:
                self._hopeless(ended.slot.spec.name, why)

    def _hopeless(self, name: str, why: str) -> None:
        """No process of ours will serve this model any more."""
        self.routes.hopeless[name] = why
        for (model, kind), route in self.routes.routes.items():
            if model == name and not route.workers:
                self.post(ev.ServiceDown(model, kind, why))
        if all(self.supervisor.hopeless(model) for model in self.spec.models):
            self.failed = why
        self._tell()

    def _lose(self, worker: int, reason: str) -> None:
        if self.pids.pop(worker, None) is None:
            return
        log.warning("worker %d is lost: %s", worker, reason)
        self.hub.forget(worker)
        self.routes.part(worker)
        self.records.lost(worker, self._age_ns)
        self.post(ev.WorkerLost(worker, reason))
        self._tell()

    def _tell(self) -> None:
        for call in self._changed:
            call()

    # ------------------------------------------------------------ from workers

    def _ready(self, worker: int, message: link.Ready) -> None:
        card = message.card
        local = message.host == link.hostname()
        self.pids[worker] = (message.pid if local else 0, message.name)
        if local:
            self.supervisor.ready(message.pid, clock.now_ns())
        self.routes.join(worker, card)
        self.post(
            ev.WorkerReady(
                worker=worker,
                name=message.name,
                model=card.name,
                kind=card.kind,
                iteration=card.mode == "iteration",
                max_batch=card.max_batch,
                max_num_seqs=card.max_num_seqs,
                prior_ns=card.prior_ns,
            )
        )
        facts = ", ".join(f"{name} {value}" for name, value in card.facts.items())
        log.info("worker %s serves %s of model %s (%s)", message.name, card.kind, card.name, facts)
        self._tell()

    def _beat(self, worker: int, message: link.Beat) -> None:
        self.post(ev.Beat(worker, message.progress, message.busy))

    def _done(self, worker: int, message: link.Done) -> None:
        batch = message.batch
        failed = []
        for outcome in message.outcomes:
            self._outcomes[(batch, outcome.rid)] = outcome
            if outcome.code:
                failed.append((outcome.rid, outcome.code, outcome.message))
        self.records.done(batch, message.compute_ns, self._age_ns)
        self.post(ev.BatchDone(worker, batch, message.compute_ns, message.tokens, tuple(failed)))

    def _failed(self, worker: int, message: link.Failed) -> None:
        if not message.rids:
            self.records.done(message.batch, message.compute_ns, self._age_ns)
        self.post(ev.BatchFailed(worker, message.batch, message.code, message.message, tuple(message.rids)))

    def _step(self, worker: int, message: link.Step) -> None:
        rows = []
        age_ns = self._age_ns
        for row in message.rows:
            if row.tokens:
                self._rows.setdefault((row.batch, row.rid), deque()).append(row.tokens)
                self.records.tokens(row.batch, len(row.tokens), age_ns)
            rows.append(ev.RowDone(row.batch, row.rid, len(row.tokens), row.finish, row.code, row.message))
        self.post(ev.StepDone(worker, message.compute_ns, message.tokens, message.running, tuple(rows)))

    def _bye(self, worker: int, message: link.Bye) -> None:
        self._lose(worker, f"it left: {message.reason}")

    # ------------------------------------------------------------ actions

    def _perform(self, actions: list[act.Action], now_ns: int) -> None:
        for action in actions:
            _PERFORM[type(action)](self, action, now_ns)

    def _dispatch(self, action: act.Dispatch, now_ns: int) -> None:
        flights = [self._flights[rid] for rid in action.rids]
        self.hub.send(action.worker, link.Run(action.batch, [flight.item() for flight in flights]))
        for flight in flights:
            flight.started(now_ns, action.running)
        name = self.pids.get(action.worker, (0, "?"))[1]
        self.records.start(action, name, flights, now_ns - self.started_ns)

    def _forward(self, action: act.Forward, now_ns: int) -> None:
        for batch, rid in action.rows:
            flight = self._flights.get(rid)
            tokens = self._rows[(batch, rid)].popleft()
            if flight is not None and flight.push(tokens, now_ns):
                self.post(ev.Satisfied(rid))

    def _drop(self, action: act.Drop, now_ns: int) -> None:
        del now_ns
        self.hub.send(action.worker, link.Drop(action.batch, list(action.rids)))

    def _refuse(self, action: act.Refuse, now_ns: int) -> None:
        del now_ns
        flight = self._forget(action.rid)
        if flight is not None:
            flight.fail(HeadwayError(action.code, action.message, retry_after_ms=action.retry_after_ms))

    def _end(self, action: act.End, now_ns: int) -> None:
        flight = self._forget(action.rid)
        self.records.ended(action.batch, now_ns - self.started_ns)
        if flight is None:
            return
        if action.code:
            flight.fail(HeadwayError(action.code, action.message, retry_after_ms=action.retry_after_ms))
        else:
            flight.finish(action.finish, self._outcomes.get((action.batch, action.rid)), now_ns)

    def _restart(self, action: act.Restart, now_ns: int) -> None:
        del now_ns
        pid, name = self.pids.get(action.worker, (0, "?"))
        log.error("worker %s is given up: %s", name, action.reason)
        self.supervisor.kill(pid)
        self._lose(action.worker, action.reason)

    def _drained(self, action: act.Drained, now_ns: int) -> None:
        del action, now_ns
        self.drained = True
        self._tell()

    def _forget(self, rid: int) -> Flight | None:
        flight = self._flights.pop(rid, None)
        if flight is not None:
            del self._by_id[(flight.client, flight.message.id)]
        return flight

    # ------------------------------------------------------------ the end

    async def close(self, *, at_once: bool = False) -> None:
        """End the workers, release sockets, threads and files. Takes at most a few seconds; cannot be cancelled."""
        with anyio.CancelScope(shield=True):
            for unwatch in self._unwatch:
                unwatch()
            self.hub.broadcast(link.Stop(drain=False))
            await self.supervisor.stop(at_once=at_once)
            self.door.close()
            self.hub.close()
            self._release()

    def _release(self) -> None:
        if self.front is not None:
            self.front.close()
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()


def _nobody(message: wire.ServerMessage) -> None:
    """The reply of a client that is gone."""


_FROM_WORKER: dict[type, Callable[[Runtime, int, Any], None]] = {
    link.Ready: Runtime._ready,
    link.Beat: Runtime._beat,
    link.Done: Runtime._done,
    link.Failed: Runtime._failed,
    link.Step: Runtime._step,
    link.Bye: Runtime._bye,
}
_PERFORM: dict[type, Callable[[Runtime, Any, int], None]] = {
    act.Dispatch: Runtime._dispatch,
    act.Forward: Runtime._forward,
    act.Drop: Runtime._drop,
    act.Refuse: Runtime._refuse,
    act.End: Runtime._end,
    act.Restart: Runtime._restart,
    act.Drained: Runtime._drained,
}
