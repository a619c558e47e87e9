"""The workers as the runtime sees them: the hub they talk to, the processes started here, what they serve.

What workers say becomes events for the core; what belongs to payloads (new tokens, results) is kept beside, keyed by
batch and request, until the core has said whether it is current.
"""

import importlib.util
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.policies.forecast import ExpertFacts
from headway.scheduler import clock, link
from headway.scheduler import events as ev
from headway.scheduler.errors import known
from headway.scheduler.hub import Hub
from headway.scheduler.record import Records
from headway.scheduler.routes import Routes
from headway.scheduler.spec import ServerSpec
from headway.scheduler.supervisor import Supervisor

if TYPE_CHECKING:
    from headway.scheduler.experts import Desk

log = logging.getLogger("headway.scheduler")


class Crew:
    """`post` takes the events, `changed` is called when a worker has come or gone.

    `rows` and `outcomes`: what this turn's messages brought, by (batch, rid); `clear` forgets them.
    """

    def __init__(
        self, spec: ServerSpec, hub: Hub, started_ns: int, post: Callable[[ev.Event], None], changed: Callable[[], None]
    ) -> None:
        self.hub = hub
        self.supervisor = Supervisor(spec, hub.address)
        self.routes = Routes(spec.models)
        self.records = Records()
        self.counters: Counter[str] = Counter()  # what workers say that decides nothing
        self.desk: Desk | None = None  # once a worker's model has experts
        self.pids: dict[int, tuple[int, str]] = {}  # worker -> (process, name)
        self.rows: dict[tuple[int, int], deque[link.Row]] = {}
        self.outcomes: dict[tuple[int, int], link.Outcome] = {}
        self._models = spec.models
        self._policy = spec.policy
        self._started_ns = started_ns
        self._post = post
        self._changed = changed

    def __repr__(self) -> str:
        return f"<Crew {len(self.pids)} workers, {self.supervisor!r}>"

    def clear(self) -> None:
        """The turn is over."""
        self.rows.clear()
        self.outcomes.clear()

    def forget(self, rid: int) -> None:
        """A request has its ending."""
        if self.desk is not None:
            self.desk.forget(rid)

    def close(self) -> None:
        """Release the address, and what learns."""
        if self.desk is not None:
            self.desk.close()
        self.hub.close()

    def name(self, worker: int) -> str:
        """What people call it."""
        return self.pids.get(worker, (0, "?"))[1]

    def give_up(self, worker: int, reason: str) -> None:
        """The core takes this worker for lost: end its process if it is ours."""
        pid, name = self.pids.get(worker, (0, "?"))
        log.error("worker %s is given up: %s", name, reason)
        self.supervisor.kill(pid)
        self.lose(worker, reason)

    def _age_ns(self) -> int:
        return clock.now_ns() - self._started_ns

    def hear(self) -> None:
        """Take in what workers have sent, and whose connection has ended."""
        for worker, message in self.hub.receive():
            handler = _FROM_WORKER[type(message)]
            handler(self, worker, message)
        for worker in self.hub.lost():  # after its last words
            self.lose(worker, "its connection ended")

    def watch_processes(self, now_ns: int) -> None:
        for ended in self.supervisor.poll(now_ns):
            for worker, (pid, _) in list(self.pids.items()):
                if pid == ended.pid:
                    self.lose(worker, ended.reason)
            why = self.supervisor.hopeless(ended.slot.spec)
            if why:
                self._hopeless(ended.slot.spec.name, why)

    def _hopeless(self, name: str, why: str) -> None:
        """No process of ours will serve this model any more."""
        self.routes.hopeless[name] = why
        for (model, kind), route in self.routes.routes.items():
            if model == name and not route.workers:
                self._post(ev.ServiceDown(model, kind, why))
        self._changed()

    @property
    def failed(self) -> str:
        """Why nothing is served and nothing will be, or empty."""
        if self.pids:
            return ""
        reasons = [self.supervisor.hopeless(model) for model in self._models]
        return reasons[0] if all(reasons) else ""

    def lose(self, worker: int, reason: str, *, orderly: bool = False) -> None:
        if worker not in self.pids:
            return
        say = log.info if orderly else log.warning
        say("worker %s is %s: %s", self.name(worker), "gone" if orderly else "lost", reason)
        del self.pids[worker]
        self.hub.forget(worker)
        self.routes.part(worker)
        self.records.lost(worker, self._age_ns())
        self._post(ev.WorkerLost(worker, reason, orderly))
        self._changed()

    def _ready(self, worker: int, message: link.Ready) -> None:
        card = message.card
        try:
            self.routes.join(worker, card)
        except Exception as error:  # a tokenizer that this release cannot read, say
            log.error("worker %s cannot be used: %s: %s", message.name, type(error).__name__, error)
            self.hub.send(worker, link.Stop(drain=False))
            self.hub.forget(worker)
            return
        local = message.host == link.hostname()
        self.pids[worker] = (message.pid if local else 0, message.name)
        if local:
            self.supervisor.ready(message.pid, clock.now_ns())
        self._post(
            ev.WorkerReady(
                worker=worker,
                name=message.name,
                model=card.name,
                kind=card.kind,
                iteration=card.mode == "iteration",
                max_batch=card.max_batch,
                max_num_seqs=card.max_num_seqs,
                prior_ns=card.prior_ns,
                padded=card.padded,
                kv_tokens=card.kv_tokens,
                experts=self._experts(card),
            )
        )
        facts = ", ".join(f"{name} {value}" for name, value in card.facts.items())
        log.info("worker %s serves %s of model %s (%s)", message.name, card.kind, card.name, facts)
        self._changed()

    def _experts(self, card: link.Card) -> ExpertFacts | None:
        """How its service is to be scheduled by the load of experts; None where there are none, or no numpy."""
        if card.experts is None or self._policy.expert_aware == "off":
            return None
        if importlib.util.find_spec("numpy") is None:
            log.warning(
                "model %s has experts, and numpy is not installed: they are not looked at "
                "(pip install 'headway[experts]')",
                card.name,
            )
            return None
        if self.desk is None:
            from headway.scheduler.experts import Desk  # needs numpy, which only this needs

            self.desk = Desk(self._policy, self._post)
        return self.desk.join(card)

    def _routed(self, worker: int, message: link.Step | link.Done) -> None:
        if self.desk is not None and (message.routed or message.critical):
            key = self.routes.key_of(worker)
            if key is not None:
                self.desk.hear(key, message)

    def _beat(self, worker: int, message: link.Beat) -> None:
        self._post(ev.Beat(worker, message.progress, message.busy))

    def _done(self, worker: int, message: link.Done) -> None:
        self._routed(worker, message)
        batch = message.batch
        self.counters["memory_shortages"] += message.shortages
        failed = []
        for outcome in message.outcomes:
            self.outcomes[(batch, outcome.rid)] = outcome
            if outcome.code:
                failed.append((outcome.rid, known(outcome.code), outcome.message))
        self.counters["compute_us"] += message.compute_ns // 1000
        self.records.done(batch, message.compute_ns, self._age_ns(), message.tokens)
        self._post(ev.BatchDone(worker, batch, message.compute_ns, message.tokens, tuple(failed)))

    def _failed(self, worker: int, message: link.Failed) -> None:
        self.counters["compute_us"] += message.compute_ns // 1000
        self.records.done(message.batch, message.compute_ns, self._age_ns())
        self._post(ev.BatchFailed(worker, message.batch, known(message.code), message.message, tuple(message.rids)))

    def _step(self, worker: int, message: link.Step) -> None:
        self.counters["memory_shortages"] += message.shortages
        self.counters["prefix_tokens"] += message.reused
        self._routed(worker, message)
        rows = []
        self.counters["compute_us"] += message.compute_ns // 1000
        age_ns = self._age_ns()
        for row in message.rows:
            if row.tokens:
                self.rows.setdefault((row.batch, row.rid), deque()).append(row)
                self.records.tokens(row.batch, len(row.tokens), age_ns)
            code = known(row.code) if row.code else ""
            rows.append(ev.RowDone(row.batch, row.rid, len(row.tokens), row.finish, code, row.message))
        self._post(
            ev.StepDone(
                worker=worker,
                compute_ns=message.compute_ns,
                tokens=message.tokens,
                running=message.running,
                rows=tuple(rows),
                kv_used=message.kv_used,
                kv_total=message.kv_total,
            )
        )

    def _bye(self, worker: int, message: link.Bye) -> None:
        self.lose(worker, f"it left: {message.reason}", orderly=True)


_FROM_WORKER: dict[type, Callable[[Crew, int, Any], None]] = {
    link.Ready: Crew._ready,
    link.Beat: Crew._beat,
    link.Done: Crew._done,
    link.Failed: Crew._failed,
    link.Step: Crew._step,
    link.Bye: Crew._bye,
}
