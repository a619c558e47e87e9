"""What a scheduler says of itself: the `info` and `status` answers."""

from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.policies.views import Cost, Wait
from headway.policies.windows.p95 import MULTIPLIER
from headway.scheduler import clock, wire
from headway.scheduler.book import NEVER_NS
from headway.scheduler.queue import Lane
from headway.scheduler.routes import Route
from headway.scheduler.service import Service

BYPASS_NEVER = (1 << 31) - 1  # what `info` says where batching pays at any length


if TYPE_CHECKING:
    from headway.scheduler.runtime import Runtime


def state(runtime: "Runtime") -> str:
    """serving, draining, or failed (no model can be served)."""
    if runtime.core.draining_until_ns is not None:
        return "draining"
    return "failed" if runtime.crew.failed else "serving"


def concurrency(runtime: "Runtime", route: Route) -> int:
    """How many requests clients should keep in flight: in_flight_fraction x max_num_seqs, over the workers."""
    return sum(runtime.core.policies.in_flight_max(card.max_num_seqs) for card in route.workers.values())


def bypass_tokens(runtime: "Runtime", model: str, kind: str) -> int:
    """Where the long lane begins now; BYPASS_NEVER if it never does."""
    service = runtime.core.services.get((model, kind))
    return int(min(BYPASS_NEVER, runtime.core.policies.bypass(service.cost if service else Cost())))


def info(runtime: "Runtime", request_id: str | None) -> wire.InfoReply:
    """What is served here."""
    models = [
        wire.ModelInfo(
            name=name,
            kind=kind,
            workers=len(route.workers),
            concurrency=concurrency(runtime, route),
            max_batch=route.card.max_batch,
            max_input_tokens=route.card.max_input_tokens,
            context_tokens=route.card.context_tokens,
            bypass_tokens=bypass_tokens(runtime, name, kind),
            tokenizer=route.codec is not None,
            facts=route.card.facts,
            window=_window_of(runtime.core.services.get((name, kind))),
        )
        for (name, kind), route in runtime.crew.routes.routes.items()
    ]
    return wire.InfoReply(
        id=request_id,
        protocol=wire.PROTOCOL,
        server=f"headway {__version__}",
        models=models,
        limits=wire.LIMITS,
        state=state(runtime),
    )


def _window_of(service: Service | None) -> dict[str, Any]:
    """What a model's window does now; empty where its first worker is about to register."""
    if service is None:
        return {}
    return {"name": service.window.choice.name, **estimate(service, service.short, clock.now_ns())}


def estimate(service: Service, lane: Lane, now_ns: int) -> dict[str, Any]:
    """What is known of a lane's intervals, and the window that follows from them.

    `rule_ms`: 1.5 x P95 of them all. `window_ms`: how long a request that comes now would wait for others; inputs that
    go alone wait for none. `longest_ms`: C, the longest wait that can pay. `censored`: how many intervals are longer.
    """
    intervals, longest_ns = lane.intervals, service.window.choice.longest_ns(service.cost)
    censored = len(intervals) - intervals.count_upto(longest_ns)
    known: dict[str, Any] = {
        "window_ms": _ms(0 if lane is service.long else service.window_ns(now_ns)),
        "longest_ms": _ms(longest_ns),
        "intervals": len(intervals),
        "censored": censored,
    }
    p95_ns = intervals.p95_ns(None)
    if p95_ns is not None:
        known["censored_share"] = round(censored / len(intervals), 3)
        known["interval_p95_ms"] = _ms(p95_ns)
        known["rule_ms"] = _ms(MULTIPLIER * p95_ns)
    return known


def _ms(ns: float) -> float:
    return round(ns / clock.NS_PER_MS, 3)


def status(runtime: "Runtime", request_id: str | None, batches: int) -> wire.StatusReply:
    """How it is going."""
    now_ns = clock.now_ns()
    counters = dict(runtime.core.counters)
    for name, count in [
        *runtime.counters.items(),
        *runtime.crew.counters.items(),
        *(runtime.front.counters.items() if runtime.front else ()),
    ]:
        counters[name] = counters.get(name, 0) + count
    counters["bad_link_messages"] = runtime.crew.hub.bad_messages
    counters["window_faults"] = sum(service.window.faults for service in runtime.core.services.values())
    return wire.StatusReply(
        id=request_id,
        state=state(runtime),
        uptime_s=round((now_ns - runtime.started_ns) / clock.NS_PER_S, 3),
        counters=counters,
        lanes=[_lane(runtime, s, lane, now_ns) for s in runtime.core.services.values() for lane in s.lanes],
        workers=[row for s in runtime.core.services.values() for row in _workers(runtime, s)],
        batches=runtime.crew.records.last(batches),
    )


def _lane(runtime: "Runtime", service: Service, lane: Lane, now_ns: int) -> dict[str, Any]:
    """One lane: who waits, its intervals and window, what the window said last, and the learned cost."""
    cost = service.cost
    row: dict[str, Any] = {
        "model": service.model,
        "kind": service.kind,
        "lane": lane.name,
        "waiting": len(lane),
        "waiting_tokens": lane.tokens,
        "window": service.window.choice.name,
        **estimate(service, lane, now_ns),
        "cost_fixed_ms": round(cost.a_ns / clock.NS_PER_MS, 4),
        "cost_per_token_ms": round(cost.b_ns / clock.NS_PER_MS, 6),
        "cost_per_request_ms": round(cost.m_ns / clock.NS_PER_MS, 6),
        "cost_known": cost.known,
    }
    if lane is service.short and service.experts is not None and runtime.crew.desk is not None:
        row["experts"] = service.experts.report() | runtime.crew.desk.report((service.model, service.kind))
    if lane.waiting:
        row["oldest_ms"] = _ms(now_ns - lane.oldest_arrival_ns())
    if lane.held:
        row["held"] = lane.held
    if type(lane.decision) is Wait and lane.decision.until_ns < NEVER_NS:
        row["waits_ms"] = _ms(lane.decision.until_ns - now_ns)
    if service.window.fault:
        row["window_fault"] = service.window.fault
    return row


def _workers(runtime: "Runtime", service: Service) -> list[dict[str, Any]]:
    return [
        {
            "worker": worker.name,
            "pid": runtime.crew.pids.get(worker.worker, (0, ""))[0],
            "model": service.model,
            "kind": service.kind,
            "running": worker.running,
            "cap": worker.cap,
            "failures": worker.failures,
            "progress": worker.progress,
            "kv_used": worker.kv_used,
            "kv_total": worker.kv_total,
        }
        for worker in service.fleet.workers.values()
    ]
