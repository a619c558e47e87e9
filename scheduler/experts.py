"""The live side of expert-aware scheduling: what reaches the core as an opaque forecast is made here.

A request's token ids become a forecast at the door, before the core sees it; what workers report becomes an event for
the core at once, and teaches the predictor in a thread of its own, off every decision. When that thread falls behind,
reports are dropped and counted: one in ten teaches enough. Imports numpy: nothing imports this file before a worker
has said that its model routes tokens to experts.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np

from headway.policies.experts.arrays import Loads
from headway.policies.experts.predictor import Predictor
from headway.policies.forecast import ExpertFacts, LoadForecast, LoadReport
from headway.scheduler import clock, link
from headway.scheduler import events as ev
from headway.scheduler.spec import PolicySpec

log = logging.getLogger("headway.scheduler")

BEHIND_MAX = 1024  # reports that may wait for the predictor

Key = tuple[str, str]  # model, kind


class Model:
    """What is known of one service's experts. The predictor belongs to whoever holds `lock`."""

    def __init__(self, card: link.Card, slo_ms: int) -> None:
        assert card.experts is not None
        self.experts = card.experts
        self.lock = Lock()
        layers, groups = len(card.experts.sampled), card.experts.groups
        joining = card.mode == "iteration"
        self.predictor = Predictor(layers, groups)
        self.facts = ExpertFacts(
            layers,
            groups,
            card.max_num_seqs if joining else card.max_batch,
            top_k=card.experts.top_k,
            grouping=card.experts.devices == 1,
            joining=joining,
            slo_ns=slo_ms * clock.NS_PER_MS,
            placement=card.experts.placement,
        )

    def counts(self, report: link.Routed) -> Loads | None:
        """What was counted, [layers, groups]; None if it is of another placement, or not of this size."""
        layers, groups = self.predictor.layers, self.predictor.groups
        if report.placement != self.experts.placement or len(report.counts) != 2 * layers * groups:
            return None
        return np.frombuffer(report.counts, "<u2").astype("<f4").reshape(layers, groups)


class Desk:
    """`post` takes the events. One thread learns, for all models."""

    def __init__(self, spec: PolicySpec, post: Callable[[ev.Event], None]) -> None:
        self.models: dict[Key, Model] = {}
        self.dropped = 0  # reports that the predictor had no time for, or that could not be its own
        self._spec = spec
        self._post = post
        self._prompts: dict[int, tuple[bytes, str]] = {}  # ids of live requests, until their prompts are reported
        self._behind = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headway-experts")

    def __repr__(self) -> str:
        return f"<Desk {list(self.models)}, {len(self._prompts)} prompts, {self._behind} behind>"

    def close(self) -> None:
        """End the thread; what it has not learned is not needed."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def join(self, card: link.Card) -> ExpertFacts:
        """A worker registered whose model has experts. How its service is to be scheduled: the same for all of them.

        Other weights are learned anew on top of what is known; where experts lie otherwise, nothing known helps.
        """
        assert card.experts is not None
        key = (card.name, card.kind)
        model = self.models.get(key)
        if model is None or _moved(model.experts, card.experts):
            model = self.models[key] = Model(card, self._spec.expert_slo_ms)
            log.info("model %s routes to experts: %s", card.name, card.experts)
        elif model.experts.revision != card.experts.revision:
            with model.lock:
                model.predictor.renew()
        model.experts = card.experts
        return model.facts

    def forecast(self, key: Key, rid: int, ids: bytes, tenant: str, decode: float) -> LoadForecast | None:
        """What the input `ids` (packed) will ask for, if `decode` tokens follow; None for a model without experts."""
        model = self.models.get(key)
        if model is None or not ids:
            return None
        prompt = model.predictor.prompt(np.frombuffer(ids, "<u4"))
        self._prompts[rid] = ids, tenant
        with model.lock:
            load = model.predictor.predict(prompt, tenant)
        return LoadForecast(load.astype("<f4").tobytes(), prompt.tokens, decode)

    def forget(self, rid: int) -> None:
        """The request has its ending."""
        self._prompts.pop(rid, None)

    def hear(self, key: Key, message: link.Step | link.Done) -> None:
        """A step or a batch with what it says of experts: to the core now, to the predictor when there is time."""
        model = self.models.get(key)
        if model is None:
            return
        observed = []
        for report in message.routed:
            counts = model.counts(report)
            if counts is None:
                self.dropped += 1
                continue
            observed.append(LoadReport(report.batch, report.rid, report.prompt, report.tokens, counts.tobytes()))
            if report.prompt and not report.saturated:
                self._teach(model, report, counts)
        self._post(
            ev.Routed(
                *key,
                reports=tuple(observed),
                r2=model.predictor.r2,
                learned=model.predictor.reports,
                tokens=message.tokens,
                critical=message.critical,
                active=message.active,
                spent_ns=message.compute_ns,
            )
        )

    def _teach(self, model: Model, report: link.Routed, counts: Loads) -> None:
        """What was cached of a prompt is its beginning: it was not routed, and says nothing."""
        ids, tenant = self._prompts.pop(report.rid, (b"", ""))
        ids = ids[4 * report.cached :]
        if not ids or len(ids) != 4 * report.tokens:
            return  # not all of it is known here, as of a request that was begun elsewhere
        if self._behind >= BEHIND_MAX:
            self.dropped += 1
            return
        self._behind += 1
        self._thread.submit(self._learn, model, ids, tenant, counts)

    def _learn(self, model: Model, ids: bytes, tenant: str, counts: Loads) -> None:
        try:
            prompt = model.predictor.prompt(np.frombuffer(ids, "<u4"))
            with model.lock:
                model.predictor.learn(prompt, counts, tenant)
        except Exception:
            log.exception("a report of experts could not be learned from")
        finally:
            self._behind -= 1

    def report(self, key: Key) -> dict[str, Any]:
        """What there is to know of one service's predictor; empty if it has none."""
        model = self.models.get(key)
        if model is None:
            return {}
        predictor = model.predictor
        return {
            "devices": model.experts.devices,
            "experts": model.experts.experts,
            "sampled_layers": model.experts.sampled,
            "placement": model.experts.placement,
            "surprise": round(predictor.surprise, 4),
            "changes": predictor.changes,
            "rows_used": predictor.rows_used,
            "memory_bytes": predictor.memory_bytes,
            "reports_dropped": self.dropped,
        }


def _moved(one: link.Experts, other: link.Experts) -> bool:
    """Whether counts of the two do not compare."""
    return (one.sampled, one.experts, one.groups, one.devices, one.placement) != (
        other.sampled,
        other.experts,
        other.groups,
        other.devices,
        other.placement,
    )
