"""A real mixture-of-experts model behind the router: its worker reports, the scheduler learns, composes, explains."""

import dataclasses
import functools
import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
np = pytest.importorskip("numpy")

from headway.policies.views import Refusal  # noqa: E402
from headway.scheduler import events as ev  # noqa: E402
from headway.scheduler import link  # noqa: E402
from headway.scheduler.crew import Crew  # noqa: E402
from headway.scheduler.experts import BEHIND_MAX, Desk  # noqa: E402
from headway.scheduler.spec import ModelSpec, PolicySpec  # noqa: E402
from tests.live import Live, Raw, live  # noqa: E402

DEVICES = 8
REQUESTS = 110
LONG = 100  # tokens of a request that is told to come back in a minute


@functools.cache
def documents() -> list[list[int]]:
    from headway.bench.experts.planted import documents as planted

    return [ids[:60].tolist() for ids, _ in planted(REQUESTS, seed=5, vocabulary=1024)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headway.bench.experts.planted import planted_model

    path = tmp_path_factory.mktemp("moe")
    small = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "vocab_size": 1024, "num_experts": 16}
    planted_model("qwen3_moe", **small).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    spec = ModelSpec(name="moe", model=str(folder), expert_devices=DEVICES, max_num_seqs=6, kv_mib=16, max_batch=4)
    with live(spec, policy=PolicySpec(expert_slo_ms=600_000)) as running:
        yield running


def experts_of(client: Raw) -> dict[str, Any]:
    [lane] = [lane for lane in client.status()["lanes"] if lane["lane"] == "short"]
    found: dict[str, Any] = lane["experts"]
    return found


@pytest.mark.models
def test_it_learns_composes_and_explains(server: Live) -> None:
    client = server.client()
    for at, ids in enumerate(documents()):
        client.send(type="generate", id=str(at), input_ids=ids, params={"max_new_tokens": 3}, tenant=f"t{at % 3}")
    for at in range(REQUESTS):
        answer = client.ending(str(at), 60_000)
        assert answer["type"] == "result", answer
        assert len(answer["token_ids"]) == 3
    experts = experts_of(client)
    assert (experts["devices"], experts["groups"], experts["layers"]) == (DEVICES, DEVICES, 2)
    assert experts["reports"] + experts["reports_dropped"] >= REQUESTS - 8  # the last are perhaps being learned from
    assert experts["r2"] > 0.7
    assert experts["imbalance_fifo"] > 1.05
    counted = experts["counters"]
    assert counted["batches.unpredictable"] > 0  # at first nothing was known
    assert counted["batches.composed"] > 10
    whys = {batch["composed"] for batch in client.status()["batches"]}
    assert {"unpredictable", "composed"} <= whys <= {"unpredictable", "unmeasured", "shallow", "composed", "explored"}
    assert sum(experts["device_backlog_s"]) == 0.0


def crew_with(policy: PolicySpec) -> Crew:
    """As much of a crew as looks at a card."""
    crew = Crew.__new__(Crew)
    crew.desk, crew._policy = None, policy
    return crew


def test_it_can_be_switched_off() -> None:
    crew = crew_with(PolicySpec(expert_aware="off"))
    assert crew._experts(card()) is None
    assert crew.desk is None


def test_without_numpy_it_is_said_and_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "numpy" else find(name))
    assert crew_with(PolicySpec())._experts(card()) is None
    assert "pip install 'headway[experts]'" in caplog.text


# ---------------------------------------------------------------- the desk alone


def card(*, placement: int = 0, revision: str = "a", mode: str = "iteration") -> link.Card:
    experts = link.Experts(4, [0, 2], 16, 2, DEVICES, DEVICES, revision, placement)
    return link.Card("m", "generate", mode, 8, 8, 0, experts=experts)


def step(rid: int, counts: Any, *, placement: int = 0, prompt: bool = True, **more: Any) -> link.Step:
    packed = link.pack_counts(np.asarray(counts, int).ravel().tolist())
    return link.Step(
        1_000, 10, 1, [], routed=[link.Routed(1, rid, prompt, 10, packed, placement=placement, **more)], critical=9
    )


class Posted(list[ev.Event]):
    """What the desk tells the core."""


def taught(desk: Desk, reports: int) -> None:
    rng = random.Random(0)
    for rid in range(reports):
        ids = [rng.randrange(1000) for _ in range(10)]
        desk.forecast(("m", "generate"), rid, link.pack_ids(ids), "t", 5.0)
        desk.hear(("m", "generate"), step(rid, np.bincount(np.array(ids * 2) % DEVICES, minlength=2 * DEVICES)))


def test_the_desk_learns_in_its_thread_and_tells_the_core_at_once() -> None:
    posted = Posted()
    desk = Desk(PolicySpec(), posted.append)
    facts = desk.join(card())
    assert desk.join(card()) == facts
    assert (facts.layers, facts.groups, facts.slots, facts.joining, facts.grouping) == (2, DEVICES, 8, True, False)
    taught(desk, 60)
    desk._thread.submit(int).result()  # it has learned all that came before
    desk.close()
    model = desk.models[("m", "generate")]
    assert model.predictor.reports == 60
    assert len(posted) == 60
    assert all(isinstance(one, ev.Routed) for one in posted)
    told = posted[-1]
    assert isinstance(told, ev.Routed)
    assert (told.tokens, told.critical, told.spent_ns) == (10, 9, 1_000)
    assert len(told.reports) == 1
    assert desk._prompts == {}


def test_what_was_counted_elsewhere_or_in_part_teaches_nothing() -> None:
    posted = Posted()
    desk = Desk(PolicySpec(), posted.append)
    desk.join(card())
    key = ("m", "generate")
    counts = np.ones((2, DEVICES))
    desk.forecast(key, 1, link.pack_ids([1, 2, 3]), "t", 0.0)
    desk.hear(key, step(1, counts, placement=3))
    desk.hear(key, step(1, np.ones((3, DEVICES))))
    assert desk.dropped == 2
    desk.hear(key, step(1, counts, prompt=False))
    desk.hear(key, step(1, counts, saturated=True))
    desk.hear(("other", "generate"), step(1, counts))
    desk.hear(key, step(1, counts))  # of ten tokens, and three are known here
    desk.forecast(key, 2, link.pack_ids(range(10)), "t", 0.0)
    desk._behind = BEHIND_MAX
    desk.hear(key, step(2, counts))
    assert desk.dropped == 3
    desk.forget(1)
    desk.close()
    assert desk.models[key].predictor.reports == 0


def test_of_a_prompt_whose_beginning_was_cached_the_rest_teaches() -> None:
    desk = Desk(PolicySpec(), Posted().append)
    desk.join(card())
    key = ("m", "generate")
    desk.forecast(key, 1, link.pack_ids([*range(100, 120), *range(10)]), "t", 0.0)
    desk.hear(key, step(1, np.ones((2, DEVICES)), cached=20))
    desk._thread.submit(int).result()
    desk.close()
    predictor = desk.models[key].predictor
    assert predictor.reports == 1
    assert predictor._variance[predictor.prompt(range(10)).rows].max() < 1.0
    assert predictor._variance[predictor.prompt(range(100, 120)).rows].min() == 1.0


def test_other_weights_are_learned_anew_and_a_moved_placement_from_nothing() -> None:
    desk = Desk(PolicySpec(), Posted().append)
    facts = desk.join(card())
    taught(desk, 40)
    desk._thread.submit(int).result()
    key = ("m", "generate")
    known = desk.models[key].predictor
    assert known._variance.min() < 1.0
    assert desk.join(card(revision="b")) == facts
    assert known._variance.min() == 1.0
    assert known.reports == 40
    moved = desk.join(card(revision="b", placement=1))
    assert moved != facts
    assert desk.models[key].predictor.reports == 0
    assert desk.report(key)["placement"] == 1
    assert desk.report(("x", "y")) == {}
    desk.close()


# ---------------------------------------------------------------- who may wait is held at the door, once


@pytest.fixture(scope="module")
def saturated() -> Iterator[Live]:
    """An echo server whose door says of each request, one time fewer than it has tokens, that experts are saturated."""
    with live() as running:
        told: Counter[int] = Counter()
        core = running.runtime.core

        def admit(arrival: Any, door: Any, now_ns: int) -> Refusal | None:
            del door, now_ns
            told[arrival.rid] += 1
            if told[arrival.rid] >= arrival.tokens:
                return None
            return Refusal("expert_saturated", "full", 30 if arrival.tokens < LONG else 60_000, "expert_saturated")

        core.policies = dataclasses.replace(core.policies, admit=admit)
        yield running


@pytest.mark.parametrize(
    ("refusals", "more", "code"),
    [
        (1, {"deadline_ms": 10_000}, ""),
        (2, {"deadline_ms": 10_000}, "expert_saturated"),  # held once, not twice
        (1, {}, "expert_saturated"),  # nobody said that it may wait
        (1, {"deadline_ms": 50}, "expert_saturated"),  # no time for that
    ],
)
def test_who_may_wait_is_tried_once_more(saturated: Live, refusals: int, more: dict[str, int], code: str) -> None:
    client = saturated.client()
    answer = client.ask(type="call", id="1", payload="x", tokens=refusals + 1, accepted=True, **more)
    assert answer.get("code", "") == code
    if code:
        assert (answer["retryable"], answer["retry_after_ms"], answer["http"]) == (True, 30, 429)


@pytest.mark.parametrize("patient", [True, False])
def test_who_is_held_can_be_cancelled(saturated: Live, patient: bool) -> None:
    """Also in the turn in which it comes."""
    client = saturated.client()
    before = client.status()["counters"].get("deferred", 0)
    client.send(type="call", id="1", payload="x", tokens=LONG, deadline_ms=300_000)
    if patient:
        while client.status()["counters"].get("deferred", 0) <= before:
            pass
    client.send(type="cancel", id="1")
    assert client.ending("1")["code"] in (("cancelled",) if patient else ("expert_saturated", "cancelled"))
    assert saturated.runtime.door.waiting == 0


def test_whoever_goes_away_is_not_held(saturated: Live) -> None:
    client, other = saturated.client(), saturated.client()
    before = other.status()["counters"].get("deferred", 0)
    client.send(type="call", id="2", payload="x", tokens=LONG, deadline_ms=300_000)
    while other.status()["counters"].get("deferred", 0) <= before:
        pass
    client.close()  # it goes away, and so does its request
    while saturated.runtime.door.waiting:
        other.status()
