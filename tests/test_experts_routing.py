"""What workers say of experts, held to a count by hand: the stock model, one text at a time, its routers' indices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway.scheduler.link import Item, Routed, Step, pack_ids, unpack_counts  # noqa: E402
from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.make import engine_for  # noqa: E402
from headway.workers.packaged import LoadError  # noqa: E402
from headway.workers.routing import COUNT_MAX, Share, watch  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

pytestmark = pytest.mark.models

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss")
EXPERTS = 8


def by_hand(name: str, ids: list[int], start: int, end: int) -> list[list[int]]:
    """Tokens of positions [start, end) for each layer and expert, by the stock model without any of our hooks."""
    model = tiny._reference(name)
    found: list[list[int]] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        chosen = output[2].reshape(len(ids), -1)[start:end].flatten()
        found.append(torch.bincount(chosen, minlength=EXPERTS).tolist())

    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("router")]
    hooks = [one.register_forward_hook(keep) for one in routers]
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def counts_of(report: Routed, groups: int) -> list[list[int]]:
    flat = unpack_counts(report.counts)
    return [flat[at : at + groups] for at in range(0, len(flat), groups)]


def devices(counts: list[list[int]], of: Callable[[int], int], count: int) -> list[list[int]]:
    """Expert counts as those of devices."""
    return [
        [sum(n for expert, n in enumerate(row) if of(expert) == device) for device in range(count)] for row in counts
    ]


def routed(answers: tiny.Answers) -> list[Routed]:
    return [report for step in answers.steps for report in step.routed]


def expect_by_hand(name: str, answers: tiny.Answers, wanted: list[tiny.Wanted], groups: int) -> None:
    """All reports of each request, added up, are its prompt and what it decoded, and nothing twice."""
    for rid, (ids, _) in enumerate(wanted):
        text = [*ids, *answers.tokens[rid]]
        reports = [one for one in routed(answers) if one.rid == rid]
        [prompt] = [one for one in reports if one.prompt]
        fold = (
            (lambda counts: devices(counts, lambda expert: expert * groups // EXPERTS, groups))
            if groups < EXPERTS
            else list
        )
        assert (prompt.tokens, prompt.cached) == (len(ids), 0)
        assert counts_of(prompt, groups) == fold(by_hand(name, text, 0, len(ids)))
        decoded = [one for one in reports if not one.prompt]
        read = len(text) - 1 - len(ids)  # the last token is answered, and never read
        assert sum(one.tokens for one in decoded) == read
        if read:
            sums = [
                [sum(row) for row in zip(*layers, strict=True)]
                for layers in zip(*[counts_of(one, groups) for one in decoded], strict=True)
            ]
            assert sums == fold(by_hand(name, text, len(ids), len(text) - 1))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("groups", [4, 8], ids=["devices", "experts"])
def test_reports_are_what_the_stock_model_routes(name: str, groups: int) -> None:
    """Prompts in chunks, requests that join and leave, and pages so scarce that some are preempted and read again."""
    wanted = tiny.requests(7, seed=3)
    engine = tiny.engine(name, expert_devices=groups if groups < EXPERTS else 0, max_num_seqs=4)
    engine._pages.take(max(0, engine._pages.free - 22))
    answers = tiny.drive(engine, wanted)
    card = engine.card.experts
    assert card is not None
    assert (card.experts, card.top_k, card.groups) == (EXPERTS, 2, groups)
    assert card.sampled == list(range(card.layers))
    expect_by_hand(name, answers, wanted, groups)
    assert engine._routing is not None
    assert engine._routing._tallies == {}


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_padded_rows_count_what_the_stock_model_routes(name: str) -> None:
    """The engine with the model's own cache: rows that are padded at the left, requests that join and leave."""
    wanted = tiny.requests(7, seed=3)
    spec = ModelSpec(name="tiny", packing="padded", expert_devices=4, max_num_seqs=4, step_tokens=40, kv_mib=4)
    subject = engine_for(spec, tiny.loaded(tiny.model(name)))
    assert subject.card.facts["generation"].startswith("padded")
    answers = tiny.drive(subject, wanted)
    expect_by_hand(name, answers, wanted, 4)


def test_long_answers_are_reported_every_32_tokens() -> None:
    answers = tiny.drive(tiny.engine("qwen3_moe", expert_devices=4), [([5, 6, 7], Params(max_new_tokens=80))])
    assert [(one.prompt, one.tokens) for one in routed(answers)] == [(True, 3), (False, 32), (False, 32), (False, 15)]


def test_steps_say_what_their_hottest_device_had() -> None:
    engine = tiny.engine("qwen3_moe", expert_devices=4)
    answers = tiny.drive(engine, [([5, 6, 7, 8], Params(max_new_tokens=1))])
    counts = devices(by_hand("qwen3_moe", [5, 6, 7, 8], 0, 4), lambda expert: expert // 2, 4)
    assert [(step.critical, step.active) for step in answers.steps] == [(sum(max(row) for row in counts), 0)]
    alone = tiny.drive(tiny.engine("qwen3_moe"), [([5, 6, 7, 8], Params(max_new_tokens=1))])
    used = sum(n > 0 for row in by_hand("qwen3_moe", [5, 6, 7, 8], 0, 4) for n in row)
    assert [step.active for step in alone.steps] == [used]


def test_what_was_generated_elsewhere_is_no_prompt() -> None:
    engine = tiny.engine("qwen3_moe", expert_devices=4)
    engine.add(1, [Item(0, ids=pack_ids([5, 6, 7]), done=pack_ids([9, 10]), params=Params(max_new_tokens=4))])
    answers = tiny.drive(engine)
    assert [(one.prompt, one.tokens) for one in routed(answers)] == [(True, 3), (False, 3)]


def test_a_cancelled_request_is_forgotten() -> None:
    engine = tiny.engine("qwen3_moe", expert_devices=4)
    engine.add(1, tiny.items([([5, 6, 7], Params(max_new_tokens=50))]))
    engine.step()
    engine.step()
    engine.cancel(1, [0])
    [step] = [one for one in engine.step() if isinstance(one, Step)]
    assert engine._routing is not None
    assert (step.routed, engine._routing._tallies) == ([], {})


def test_no_router_no_report() -> None:
    engine = tiny.engine("llama")
    answers = tiny.drive(engine, [([5, 6], Params(max_new_tokens=3))])
    assert engine.card.experts is None
    assert all((step.routed, step.critical, step.active) == ([], 0, 0) for step in answers.steps)


# ---------------------------------------------------------------- placements, pads, sizes


def two_texts(telemetry: Any, model: Any) -> None:
    with torch.inference_mode():
        model(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False)
    telemetry.count([Share((1, 1), 0, 2, 2), Share((1, 2), 0, 3, 3)])


def test_replicas_share_and_a_new_placement_starts_anew() -> None:
    model = tiny.model("qwen3_moe")
    telemetry = watch(model, torch.device("cpu"), devices=2)
    assert telemetry is not None
    two_texts(telemetry, model)
    telemetry.place([[0, 1, 2, 3, 4, 5, 6, 7, 0, 0]] * 3, 2, revision=7)  # expert 0 on both devices: 1 and 2 slots
    assert telemetry.take(()) == []  # what was counted was of the old one
    two_texts(telemetry, model)
    first = next(one for one in telemetry.take(()) if one.rid == 1)
    experts = by_hand("qwen3_moe", [5, 6, 7, 8, 9], 0, 2)
    for row, counts in zip(counts_of(first, 2), experts, strict=True):
        one = sum(counts[1:5]) + counts[0] / 3  # devices hold five slots each
        assert row == [round(one), round(4 - one)]
    assert first.placement == telemetry.card.placement == 7


def test_a_placement_file(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"slots": [[7, 6, 5, 4, 3, 2, 1, 0]] * 3, "revision": 3}))
    engine = tiny.engine("qwen3_moe", expert_devices=4, expert_placement=str(path))
    answers = tiny.drive(engine, [([5, 6, 7, 8], Params(max_new_tokens=1))])
    expected = devices(by_hand("qwen3_moe", [5, 6, 7, 8], 0, 4), lambda expert: (7 - expert) // 2, 4)
    assert [(counts_of(one, 4), one.placement) for one in routed(answers)] == [(expected, 3)]


@pytest.mark.parametrize(
    ("spec", "content", "words"),
    [
        ({"expert_devices": 3}, "", "do not divide into expert_devices 3"),
        ({"expert_placement": "x"}, "{}", "expert_devices must say"),
        ({"expert_devices": 2, "expert_placement": "x"}, None, "cannot read expert_placement"),
        ({"expert_devices": 2, "expert_placement": "x"}, '{"slots": [[0]], "extra": 1}', "unknown field"),
        ({"expert_devices": 2, "expert_placement": "x"}, '{"slots": [[0, 1]]}', "has 1 layers"),
        ({"expert_devices": 2, "expert_placement": "x"}, '{"slots": [[0], [0], [0]]}', "1 slots for 2 devices"),
        ({"expert_devices": 2, "expert_placement": "x"}, '{"slots": [[0, 1], [0, 1], [0, 1]]}', "are nowhere"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    tmp_path: Path, spec: dict[str, Any], content: str | None, words: str
) -> None:
    path = tmp_path / "map.json"
    if content is not None:
        path.write_text(content)
    given = spec | ({"expert_placement": str(path)} if "expert_placement" in spec else {})
    with pytest.raises(LoadError, match=words):
        GenerateEngine(ModelSpec(name="tiny", kv_mib=4, **given), tiny.loaded(tiny.model("qwen3_moe")))


def test_pads_are_not_counted() -> None:
    model = tiny.model("olmoe")
    telemetry = watch(model, torch.device("cpu"))
    assert telemetry is not None
    texts = [[5, 6, 7, 8, 9], [10, 11]]
    padded = torch.tensor([texts[0], [*texts[1], 0, 0, 0]])
    mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    with torch.inference_mode():
        model(padded, attention_mask=mask, use_cache=False)
    counts = telemetry.count_padded(mask)
    assert counts[0].tolist() == by_hand("olmoe", texts[0], 0, 5)
    assert counts[1].tolist() == by_hand("olmoe", texts[1], 0, 2)
    assert telemetry.count_padded(mask) is None  # no forward since


def test_a_report_stays_within_a_kilobyte_and_says_when_it_is_full() -> None:
    model = tiny.model("qwen3_moe", num_experts=256, num_hidden_layers=5)
    telemetry = watch(model, torch.device("cpu"))
    assert telemetry is not None
    assert telemetry.card.sampled == [1, 3]
    deep = watch(model, torch.device("cpu"), devices=64)
    assert deep is not None
    assert deep.card.sampled == [0, 1, 2, 3, 4]
    two_texts(telemetry, model)
    telemetry._sums[2 * telemetry._tallies[1, 1].slot + 1, 0, 0] = COUNT_MAX + 5
    reports = telemetry.take(())
    assert all(len(one.counts) <= 1024 for one in reports)
    assert [one.saturated for one in reports].count(True) == 1
    with torch.inference_mode():
        model(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False)
    with pytest.raises(ValueError, match="4 tokens were shared out, the routers saw 5"):
        telemetry.count([Share((1, 1), 0, 4, 4)])
    with pytest.raises(LoadError, match="1024 groups"):
        watch(tiny.model("qwen3_moe", num_experts=1024, num_hidden_layers=1), torch.device("cpu"))
