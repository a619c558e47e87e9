"""The live loop: events in from sockets, threads and processes; one step of the core; its actions out.

Shared by the ZeroMQ router and the embedded scheduler: both only add requests and take replies. Everything here runs in
one thread and never blocks; text longer than a little is tokenised in another thread. The core's actions are performed
after `step` has returned.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import zmq

from headway.scheduler import actions as act
from headway.scheduler import clock, link, wire
from headway.scheduler import events as ev
from headway.scheduler.blackbox import BlackBox
from headway.scheduler.chosen import policies_of
from headway.scheduler.core import STOPPED, Core
from headway.scheduler.crew import Crew
from headway.scheduler.door import Door
from headway.scheduler.errors import HeadwayError
from headway.scheduler.flight import Flight
from headway.scheduler.front import Front, Reply
from headway.scheduler.held import WINDOW_FAULT
from headway.scheduler.hub import Hub
from headway.scheduler.recorder import Recorder
from headway.scheduler.spec import ServerSpec
from headway.scheduler.waker import Waker

log = logging.getLogger("headway.scheduler")

INTAKE_NS = 5 * clock.NS_PER_MS  # time for clients' messages in one turn; the rest keep their place in the socket
GATHER_NS = 500_000  # how long new requests may lie in the socket while every worker is busy
BUSY_RETRY_MS = 200


class Runtime:
    """A scheduler without a front. Made inside a running event loop; `run` is its life, `close` its end."""

    def __init__(self, spec: ServerSpec, *, front: bool = False) -> None:
        self.spec = spec
        self.started_ns = clock.now_ns()
        self.core = Core(
            policies_of(spec.policy, spec.models),
            lost_after_ns=spec.lost_after_ms * clock.NS_PER_MS,
            stuck_after_ns=spec.stuck_after_ms * clock.NS_PER_MS,
        )
        self.counters: Counter[str] = Counter()
        self.drained = False
        self._flights: dict[int, Flight] = {}
        self._by_id: dict[int, dict[str, int]] = {}  # client -> its live ids
        self._bytes = 0  # of live payloads
        self._drain_until_ns: int | None = None
        self._core_drained = False
        self._pending: list[ev.Event] = []
        self._given = 0
        self._stopping = False
        self._gathering = False
        self._ended = False
        self._changed: list[Callable[[], None]] = []
        self._blamed: set[tuple[str, str]] = set()  # whose window was logged as faulty
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.waker = Waker()
        self.door = Door(self)
        self.front: Front | None = None
        self.recorder: Recorder | None = None
        self.black_box: BlackBox | None = None
        try:
            if spec.record:
                self.recorder = Recorder(spec.record, prompts=spec.record_prompts, names=spec.record_tenants == "names")
            if spec.flight_record:
                self.black_box = BlackBox(spec.flight_record, spec)
            self.front = Front(self._context, spec) if front else None
            hub = Hub(self._context, self._workers_bind(), curve=spec.curve, allow_public=spec.allow_public)
        except BaseException:
            self._release()
            raise
        self.crew = Crew(spec, hub, self.started_ns, self.post, self._tell)
        self._unwatch = hub.watch(self.waker) + (self.front.watch(self.waker) if self.front else [])

    def _workers_bind(self) -> str:
        if self.spec.workers_bind:
            return self.spec.workers_bind
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")  # private to this user
        return f"ipc://{Path(self._folder.name) / 'workers'}"

    # ------------------------------------------------------------ requests

    def submit(self, client: int, message: wire.Request, reply: Reply) -> None:
        """A request is at the door: from here on it is ours, and `reply` gets exactly one result or error."""
        now_ns = clock.now_ns()
        if message.id in self._by_id.get(client, ()) and self.front is not None:
            client, reply = self.front.renew(client)
        mine = self._by_id.setdefault(client, {})
        if message.id in mine:
            self.counters["refused.duplicate_id"] += 1
            text = f"a request with id {message.id!r} of this client is still live"
            reply(wire.error_message(message.id, HeadwayError("duplicate_id", text, field="id")))
            return
        self._given += 1
        flight = Flight(self._given, client, message, reply, now_ns)
        if self.recorder is not None:
            flight.on_end = self.recorder.went
        self._flights[flight.rid] = flight
        mine[message.id] = flight.rid
        self._bytes += flight.bytes
        full = self._full(flight)
        if full:
            self.refused(flight, HeadwayError("queue_full", full, retry_after_ms=BUSY_RETRY_MS))
        else:
            self.door.enter(flight)

    def _full(self, flight: Flight) -> str:
        """Why there is no room for it before the core, or empty."""
        policy = self.spec.policy
        if self.door.waiting >= policy.queue_max:
            return f"{self.door.waiting} texts wait to be tokenised; the limit is {policy.queue_max} (queue_max)"
        others, limit = self._bytes - flight.bytes, policy.queue_mib << 20
        if others and self._bytes > limit:
            return f"{others} bytes of payloads are live; the limit is {limit} (queue_mib)"
        return ""

    def entered(self, flight: Flight) -> None:
        """The door let the request in: the core decides from here on."""
        if flight.rid not in self._flights:
            return  # cancelled while its text was tokenised
        flight.entered = True
        if self.recorder is not None:
            self.recorder.came(flight)
        message = flight.message
        self.post(
            ev.Submit(
                rid=flight.rid,
                client=flight.client,
                model=flight.model,
                kind=flight.kind,
                tokens=flight.tokens,
                max_new=flight.params.max_new_tokens if flight.params else 0,
                deadline_ns=None if message.deadline_ms is None else flight.deadline_ns,
                priority=message.priority,
                tenant=message.tenant or "",
                forecast=self.door.forecast(flight),
            )
        )
        if message.accepted and not flight.deferred:
            flight.reply(wire.Accepted(id=message.id))

    def refused(self, flight: Flight, error: HeadwayError) -> None:
        """The door did not let it in."""
        if self._forget(flight.rid) is not None:
            self.counters[f"refused.{error.code}"] += 1
            flight.fail(error)

    def cancel(self, client: int, request_id: str) -> bool:
        """End the live request with this id of this client. Whether there is one."""
        rid = self._by_id.get(client, {}).get(request_id)
        if rid is None:
            return False
        flight = self._flights[rid]
        if flight.entered:
            flight.deferred = True  # if it is refused now, nobody wants it held
            self.post(ev.Cancel(rid))
        else:
            self.door.drop(flight, HeadwayError("cancelled", "cancelled by the client"))
        return True

    def client_gone(self, client: int) -> None:
        """A client will not read its replies: its work ends."""
        for rid in list(self._by_id.get(client, {}).values()):
            flight = self._flights[rid]
            flight.reply = _nobody
            flight.deferred = True
            if not flight.entered:
                self.door.drop(flight, HeadwayError("cancelled", "the client went away"))
        self.post(ev.ClientGone(client))

    def client_slow(self, client: int) -> None:
        """A client does not read its replies: its work ends, and it is told."""
        for rid in list(self._by_id.get(client, {}).values()):
            flight = self._flights[rid]
            if flight.entered:
                self.post(ev.Cancel(rid, "slow_reader", "the client does not read its answers"))
            else:
                self.door.drop(flight, HeadwayError("slow_reader", "the client does not read its answers"))

    def post(self, event: ev.Event) -> None:
        """Something happened; the loop takes it up in its next turn."""
        self._pending.append(event)
        self.waker.set()

    def drain(self, limit_ms: int) -> None:
        """Take no new work; let what is here finish for `limit_ms`."""
        self._drain_until_ns = clock.now_ns() + limit_ms * clock.NS_PER_MS
        self.post(ev.Drain(self._drain_until_ns))

    def stop(self) -> None:
        """Leave the loop at once."""
        self._stopping = True
        self.waker.set()

    def on_change(self, call: Callable[[], None]) -> None:
        """Call when a worker has joined or left, or the scheduler has drained."""
        self._changed.append(call)

    # ------------------------------------------------------------ the loop

    @property
    def over(self) -> bool:
        """Nothing will be done any more."""
        return self._ended or self.drained or self._stopping

    async def run(self) -> None:
        """Until drained or stopped."""
        try:
            while not self.over:
                self._turn()
                await self.waker.wait(self._wakeup_ns())
            self._turn()
        finally:
            self._ended = True

    def _wakeup_ns(self) -> int:
        if self._pending:
            return 0
        at = min(self.core.wakeup_ns, self.crew.supervisor.wakeup_ns, self.door.wakeup_ns)
        if self._drain_until_ns is not None and self.door.waiting:
            at = min(at, self._drain_until_ns)
        if self._gathering:
            at = min(at, clock.now_ns() + GATHER_NS)
        return min(at, self.front.wakeup_ns) if self.front else at

    def _turn(self) -> None:
        """Take in all that has happened, step once, perform."""
        now_ns = clock.now_ns()
        self.crew.watch_processes(now_ns)
        if self.front is not None:
            self._hear_clients(self.front)
        self.door.collect()
        self.crew.hear()
        now_ns = clock.now_ns()
        events, self._pending = self._pending, []
        if events:
            self._step(events[0] if len(events) == 1 else ev.Together(events), now_ns)
        elif now_ns >= self.core.wakeup_ns:
            self._step(ev.Tick(), now_ns)
        self.crew.clear()
        self.door.expire(now_ns)
        self._look_drained(now_ns)
        if self.front is not None:
            self.front.flush(now_ns)
        self._look_again()
        self._write_down()

    def _step(self, event: ev.Event, now_ns: int) -> None:
        actions = self.core.step(event, now_ns)
        if self.black_box is not None:
            self.black_box.note(event, now_ns, actions)
        self._perform(actions, now_ns)

    def _look_again(self) -> None:
        """A send, too, takes note of what has come, and then the descriptor says nothing more: so look before sleeping.

        While every worker is busy, new requests may gather for a moment: a turn costs more than a request.
        """
        self._gathering = False
        if self.crew.hub.pending:
            self.waker.set()
        elif self.front is not None and self.front.pending:
            if any(service.fleet.free for service in self.core.services.values()):
                self.waker.set()
            else:
                self._gathering = True

    def _write_down(self) -> None:
        """What this turn recorded goes to its files."""
        if self.recorder is not None:
            self.recorder.tape.flush()
        if self.black_box is not None:
            self.black_box.tape.flush()

    def _look_drained(self, now_ns: int) -> None:
        """Drained when the core says so and nobody is left at the door; at the limit, whoever is there is told."""
        if self._drain_until_ns is None:
            return
        if now_ns >= self._drain_until_ns:
            self.door.drop_all(HeadwayError("shutting_down", STOPPED))
        if self._core_drained and not self.door.waiting and not self.drained:
            self.drained = True
            self._tell()

    def _hear_clients(self, front: Front) -> None:
        for client in front.gone():
            self.client_gone(client)
        for client in front.slow():
            self.client_slow(client)
        stop_ns = clock.now_ns() + INTAKE_NS
        for client, message, reply in front.receive():
            self.door.answer(client, message, reply)
            if clock.now_ns() > stop_ns:
                break

    def _tell(self) -> None:
        for call in self._changed:
            call()

    # ------------------------------------------------------------ actions

    def _perform(self, actions: list[act.Action], now_ns: int) -> None:
        for action in actions:
            _PERFORM[type(action)](self, action, now_ns)

    def _dispatch(self, action: act.Dispatch, now_ns: int) -> None:
        if action.reason == WINDOW_FAULT.reason:
            self._blame_window(action.model, action.kind)
        flights = [self._flights[rid] for rid in action.rids]
        self.crew.hub.send(action.worker, link.Run(action.batch, [flight.item() for flight in flights]))
        for flight in flights:
            flight.started(now_ns, action.running)
        self.crew.records.start(action, self.crew.name(action.worker), flights, now_ns - self.started_ns)

    def _blame_window(self, model: str, kind: str) -> None:
        """Said once for each service; `status` counts on."""
        if (model, kind) not in self._blamed:
            self._blamed.add((model, kind))
            window = self.core.services[(model, kind)].window
            log.error("window %s of model %s (%s) counts as launch: %s", window.choice.name, model, kind, window.fault)

    def _forward(self, action: act.Forward, now_ns: int) -> None:
        for batch, rid in action.rows:
            flight = self._flights.get(rid)
            row = self.crew.rows[(batch, rid)].popleft()
            if flight is None:
                continue
            self.counters["first_tokens"] += not flight.out
            try:
                complete = flight.push(row, now_ns)
            except Exception as error:  # tokens that the tokenizer cannot read: this request's trouble only
                log.exception("the tokens of a request could not be read")
                self.post(ev.Cancel(rid, "internal", f"its tokens could not be read: {type(error).__name__}: {error}"))
                continue
            if complete:
                self.post(ev.Satisfied(rid))

    def _drop(self, action: act.Drop, now_ns: int) -> None:
        del now_ns
        self.crew.hub.send(action.worker, link.Drop(action.batch, list(action.rids)))

    def _refuse(self, action: act.Refuse, now_ns: int) -> None:
        waits_ms = action.retry_after_ms if action.code == "expert_saturated" else None
        if waits_ms and (refused := self._flights.get(action.rid)) and self.door.defer(refused, waits_ms, now_ns):
            self.counters["deferred"] += 1
            return
        flight = self._forget(action.rid)
        if flight is not None:
            flight.fail(HeadwayError(action.code, action.message, retry_after_ms=action.retry_after_ms))

    def _end(self, action: act.End, now_ns: int) -> None:
        flight = self._forget(action.rid)
        self.crew.records.ended(action.batch, now_ns - self.started_ns)
        if flight is None:
            return
        outcome = self.crew.outcomes.get((action.batch, action.rid))
        if action.code:
            flight.fail(HeadwayError(action.code, action.message, retry_after_ms=action.retry_after_ms))
        elif flight.kind == "generate" or outcome is not None:
            flight.finish(action.finish, outcome, now_ns)
        else:
            flight.fail(HeadwayError("engine_error", "the worker ended the batch without a result for this request"))

    def _restart(self, action: act.Restart, now_ns: int) -> None:
        del now_ns
        self.crew.give_up(action.worker, action.reason)

    def _drained(self, action: act.Drained, now_ns: int) -> None:
        del action, now_ns
        self._core_drained = True

    def _forget(self, rid: int) -> Flight | None:
        flight = self._flights.pop(rid, None)
        if flight is not None:
            self.crew.forget(rid)
            self._bytes -= flight.bytes
            mine = self._by_id[flight.client]
            del mine[flight.message.id]
            if not mine:
                del self._by_id[flight.client]
        return flight

    # ------------------------------------------------------------ the end

    async def close(self, *, at_once: bool = False) -> None:
        """End the workers, release sockets, threads and files. Takes at most a few seconds; cannot be cancelled."""
        with anyio.CancelScope(shield=True):
            for unwatch in self._unwatch:
                unwatch()
            for rid in list(self._flights):  # only if we were stopped rather than drained
                flight = self._forget(rid)
                if flight is not None:
                    flight.fail(HeadwayError("shutting_down", STOPPED))
            self.crew.hub.broadcast(link.Stop(drain=False))
            await self.crew.supervisor.stop(at_once=at_once)
            self.door.close()
            self.crew.close()
            self._release()

    def _release(self) -> None:
        if self.front is not None:
            self.front.close()
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()
        for record in (self.recorder, self.black_box):
            if record is not None:
                record.tape.close()


def _nobody(message: wire.ServerMessage) -> None:
    """The reply of a client that is gone."""


_PERFORM: dict[type, Callable[[Runtime, Any, int], None]] = {
    act.Dispatch: Runtime._dispatch,
    act.Forward: Runtime._forward,
    act.Hold: lambda _runtime, _action, _now_ns: None,  # for those who read the core's mind, not its hands
    act.Drop: Runtime._drop,
    act.Refuse: Runtime._refuse,
    act.End: Runtime._end,
    act.Restart: Runtime._restart,
    act.Drained: Runtime._drained,
}
