"""The core agrees with the dumb oracle, action for action: who runs when, where, with whom and why; who is refused; how
each request ends. Storms without failures, drawn by seeds; a disagreement is made short and told."""

import os
from typing import Any

import pytest

from headway.bench.storm.plan import Join, Plan, draw, peaceful
from headway.bench.storm.referee import hold
from headway.bench.storm.shrink import play, report, shrink
from headway.bench.storm.world import Storm
from headway.policies.views import Seat
from headway.scheduler import actions as act
from headway.scheduler import events as ev
from headway.scheduler.chosen import policies_of
from headway.scheduler.fleet import Fleet
from headway.scheduler.service import Service
from tests.oracle import Oracle

FIRST = int(os.environ.get("ORACLE_SEED", "0"))
SEEDS = 60
CHUNK = 20


class Compared(Storm):
    """A storm whose every step the oracle must have said, too."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.oracle = Oracle(policies_of(plan.policy))

    @property
    def command(self) -> str:
        return f"ORACLE_SEED={self.plan.seed} python -m pytest -x tests/test_oracle.py"

    def judge(self, event: ev.Event, now_ns: int, actions: list[act.Action]) -> None:
        super().judge(event, now_ns, actions)
        said, expected = _said(actions), self.oracle.step(event, now_ns)
        hold(said == expected, "oracle", f"{said}, and the oracle says {expected}")


def _said(actions: list[act.Action]) -> list[tuple[Any, ...]]:
    """The actions as the oracle says them."""
    words: list[tuple[Any, ...]] = []
    batches: list[tuple[Any, ...]] = []
    for action in actions:
        if type(action) is act.Refuse:
            words.append(("refuse", action.rid, action.code))
        elif type(action) is act.End:
            words.append(("end", action.rid, action.code, action.finish))
        elif type(action) is act.Dispatch:
            batches.append(("dispatch", action.worker, action.rids, action.lane, action.reason, action.placed))
    return sorted(words) + batches


def plan_of(seed: int) -> Plan:
    """The plan of a seed without failures, and with a worker for each service from the beginning."""
    plan = peaceful(draw(seed))
    begin = [Join(0, index, max_batch=4) for index in range(len(plan.services))]
    return plan._replace(happenings=(*begin, *plan.happenings))


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_the_core_agrees_with_the_oracle(first: int) -> None:
    for seed in range(first, first + CHUNK):
        plan = plan_of(seed)
        failure = play(Compared(plan))
        if failure is not None:
            pytest.fail(report(shrink(failure), len(plan.happenings)), pytrace=False)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Service, "batch_size", lambda _service, lane, worker, _policies: 1 if lane.name == "long" else worker.room),
        (Service, "padding_worth", 0.0),
        (Service, "ended", lambda _service, _request: None),
        (Fleet, "seats", lambda workers: [Seat(worker.worker, worker.running, 0, 0) for worker in workers]),
    ],
    ids=["size", "padding", "shares", "place"],
)
def test_another_decision_is_seen(owner: type, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions that break no law of the referee, and are not those that the policies asked for."""
    monkeypatch.setattr(owner, name, staticmethod(value) if name == "seats" else value)  # type: ignore[arg-type]
    for seed in range(300):
        failure = play(Compared(plan_of(seed)))
        if failure is not None:
            assert failure.law == "oracle", failure.text
            return
    pytest.fail("300 storms with other decisions, and the oracle agrees")
