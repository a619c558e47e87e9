"""One-shot engines with experts report as those that generate do: what each text alone routes, and never a pad."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("numpy")

from headway.scheduler import events as ev  # noqa: E402
from headway.scheduler.experts import Desk  # noqa: E402
from headway.scheduler.link import Done, Item, pack_ids, unpack_counts  # noqa: E402
from headway.scheduler.spec import ModelSpec, PolicySpec  # noqa: E402
from headway.workers.classify import classify_engine  # noqa: E402
from headway.workers.embed import embed_engine  # noqa: E402
from headway.workers.routers import Routers  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

pytestmark = pytest.mark.models

EXPERTS, LAYERS = 8, 2
MOE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "head_dim": 8},
    "Mixtral": {"num_local_experts": EXPERTS},
    "Olmoe": {"num_experts": EXPERTS},
}
SHARED = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": None}


def model(family: str, head: str) -> Any:
    return tiny.encoder(family, head, **SHARED | MOE[family] | {"num_labels": 3})


def engine(made: Any, kind: str, **spec: Any) -> Any:
    asked = ModelSpec(name="m", engine=kind, **spec)
    return (embed_engine if kind == "embed" else classify_engine)(asked, tiny.loaded(made))


def alone(made: Any, ids: Sequence[int]) -> list[int]:
    """Tokens for each layer and expert, flat: the text by itself, and none of our hooks."""
    found: list[int] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        found.extend(torch.bincount(output[2].flatten(), minlength=EXPERTS).tolist())

    hooks = [one.register_forward_hook(keep) for one in made.modules() if type(one).__name__.endswith("Router")]
    with torch.inference_mode():
        made(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def done(subject: Any, wanted: Sequence[Item], batch: int = 7) -> Done:
    subject.add(batch, wanted)
    [report] = subject.step()
    assert isinstance(report, Done), report
    return report


def items(texts: Sequence[Sequence[int]]) -> list[Item]:
    return [Item(10 + at, ids=pack_ids(ids)) for at, ids in enumerate(texts)]


CASES = [("Qwen3Moe", "ForSequenceClassification", "classify"), ("Mixtral", "ForSequenceClassification", "classify")]


@pytest.mark.parametrize(("family", "head", "kind"), [*CASES, ("Olmoe", "Model", "embed")])
def test_each_text_is_counted_as_it_is_alone(family: str, head: str, kind: str) -> None:
    texts = [[5, 6, 7], [9] * 11, [4, 3], [8, 7, 6, 5, 4, 3, 2], [11, 12, 13]]
    subject, stock = engine(model(family, head), kind), model(family, head)
    report = done(subject, items(texts))
    card = subject.card.experts
    assert card is not None
    assert (card.sampled, card.experts, card.top_k, card.groups, card.devices) == ([0, 1], EXPERTS, 2, EXPERTS, 1)
    assert {one.rid: unpack_counts(one.counts) for one in report.routed} == {
        10 + at: alone(stock, ids) for at, ids in enumerate(texts)
    }
    assert {one.rid: one.tokens for one in report.routed} == {10 + at: len(ids) for at, ids in enumerate(texts)}
    assert {(one.batch, one.prompt, one.cached, one.saturated) for one in report.routed} == {(7, True, 0, False)}
    assert report.critical * EXPERTS >= 2 * LAYERS * report.tokens  # the hottest has at least the mean, pads included
    assert 0 < report.active <= LAYERS * EXPERTS * len(texts)


def test_what_a_step_did_includes_its_pads() -> None:
    """The same two texts, alike in length and not: requests are counted alike, the step has more to do."""
    made = model("Qwen3Moe", "ForSequenceClassification")
    subject = engine(made, "classify", expert_devices=4)
    short = [5, 6, 7, 8]
    even = done(subject, items([short, short]))
    sums = [sum(pair) for pair in zip(*(unpack_counts(one.counts) for one in even.routed), strict=True)]
    assert even.critical == sum(max(sums[at : at + 4]) for at in (0, 4))
    rows = [item for item in items([short, [9] * 12]) if item.rid]
    padded = done(subject, rows)
    assert unpack_counts(padded.routed[0].counts) == unpack_counts(even.routed[0].counts)
    assert sum(one.tokens for one in padded.routed) == 16 <= padded.tokens


def test_a_text_that_fails_is_not_reported_and_halves_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("Qwen3Moe", "ForSequenceClassification")
    subject = engine(made, "classify")
    plain = made.forward

    def little_memory(input_ids: Any, **inputs: Any) -> Any:
        if len(input_ids) > 1:
            raise MemoryError("too much at once")
        return plain(input_ids, **inputs)

    monkeypatch.setattr(made, "forward", little_memory)
    report = done(subject, [*items([[5, 6, 7], [5, 6, 8], [5, 6, 9]]), Item(1, ids=pack_ids([tiny.VOCAB]))])
    assert [one.code for one in report.outcomes] == ["", "", "", "invalid_request"]
    assert sorted(one.rid for one in report.routed) == [10, 11, 12]
    again = done(subject, items([[5, 6, 7]]), batch=8)
    assert [(one.batch, one.rid) for one in again.routed] == [(8, 10)]


def test_no_router_no_report() -> None:
    subject = engine(tiny.encoder("Bert"), "embed")
    report = done(subject, items([[5, 6, 7]]))
    assert subject.card.experts is None
    assert (report.routed, report.critical, report.active) == ([], 0, 0)


def test_routers_that_see_other_tokens_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as of a model that leaves padding out: whose the counts are could not be known."""
    take = Routers.take
    monkeypatch.setattr(Routers, "take", lambda self: take(self)[:, 1:])
    with caplog.at_level(logging.WARNING, logger="headway.worker"):
        subject = engine(model("Qwen3Moe", "ForSequenceClassification"), "classify")
    assert "is not reported: 2 x 3 tokens are padded, the routers saw 5" in caplog.text
    assert subject.card.experts is None
    assert done(subject, items([[5, 6, 7]])).routed == []


def test_the_scheduler_learns_from_them() -> None:
    """From the engine's own message to the predictor: a pair of texts is known by all of its tokens."""
    subject = engine(model("Qwen3Moe", "ForSequenceClassification"), "classify", expert_devices=4)
    posted: list[ev.Event] = []
    desk = Desk(PolicySpec(), posted.append)
    try:
        facts = desk.join(subject.card)
        assert (facts.groups, facts.joining, facts.grouping, facts.slots) == (4, False, False, subject.card.max_batch)
        key, first, second = ("m", "classify"), [5, 6, 7], [8, 9]
        assert desk.forecast(key, 3, pack_ids(first) + pack_ids(second), "t", 0.0) is not None
        desk.hear(key, done(subject, [Item(3, ids=pack_ids(first), ids_pair=pack_ids(second))]))
        desk._thread.submit(lambda: None).result()
        assert desk.report(key)["reports_dropped"] == 0
        assert desk.models[key].predictor.reports == 1
        [told] = posted
        assert isinstance(told, ev.Routed)
        assert [(one.rid, one.tokens) for one in told.reports] == [(3, 5)]
    finally:
        desk.close()
