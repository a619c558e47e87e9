"""Memory that runs out costs time, never an answer: only what does not fit alone is told so.

The engines run as they are; what is put in is the fault: a forward that raises as allocators do, above a size.
"""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headway.scheduler.link import Card, Done, Failed, Item, Outcome
from headway.scheduler.spec import PolicySpec
from headway.workers.ceiling import PATIENCE, RISES
from headway.workers.oneshot import OneShot
from tests.live import echo, live

# ---------------------------------------------------------------- one-shot engines


def one_shot(fits: Callable[[Sequence[Item]], bool], sizes: list[int]) -> OneShot:
    def run(items: Sequence[Item]) -> list[Outcome]:
        sizes.append(len(items))
        if not fits(items):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return [Outcome(item.rid) for item in items]

    return OneShot(Card("x", "call", "oneshot", 16, 16, 8), run)


def done(engine: OneShot, batch: int, rids: Sequence[int]) -> Done:
    engine.add(batch, [Item(rid) for rid in rids])
    (report,) = engine.step()
    assert isinstance(report, Done)
    assert [outcome.rid for outcome in report.outcomes] == list(rids)
    return report


def test_a_batch_too_large_runs_in_halves_and_the_next_begins_there() -> None:
    sizes: list[int] = []
    engine = one_shot(lambda items: len(items) <= 5, sizes)
    report = done(engine, 1, range(16))
    assert not any(outcome.code for outcome in report.outcomes)
    assert (sizes, report.shortages, report.tokens) == ([16, 8, 4, 4, 4, 4], 2, 16)
    assert done(engine, 2, range(8)).shortages == 0
    assert sizes[6:] == [4, 4]


def test_it_tries_more_again_after_a_while() -> None:
    sizes: list[int] = []
    engine = one_shot(lambda items: len(items) <= 8 or len(sizes) > 3, sizes)
    done(engine, 1, range(16))
    for batch in range(8 * PATIENCE):
        done(engine, 2 + batch, range(16))
    assert sizes[-1] == 16


def test_one_that_does_not_fit_even_alone_is_told_so_and_no_other() -> None:
    sizes: list[int] = []
    engine = one_shot(lambda items: all(item.rid != 5 for item in items), sizes)
    report = done(engine, 1, range(8))
    assert [outcome.code for outcome in report.outcomes] == ["", "", "", "", "", "out_of_memory", "", ""]
    assert "can't allocate" in report.outcomes[5].message


def test_an_error_of_another_kind_among_the_halves_fails_the_batch() -> None:
    def run(items: Sequence[Item]) -> list[Outcome]:
        if len(items) > 2:
            raise MemoryError
        raise ValueError("no")

    engine = OneShot(Card("x", "call", "oneshot", 16, 16, 8), run)
    engine.add(1, [Item(rid) for rid in range(4)])
    (report,) = engine.step()
    assert isinstance(report, Failed)
    assert (report.code, report.message) == ("engine_error", "ValueError: no")


# ---------------------------------------------------------------- a server (a batch that fails, as clients see it)


def test_32_at_once_are_all_answered_although_memory_holds_4() -> None:
    with live(echo(oom_above=4, max_batch=32), policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        for number in range(33):
            client.send(type="call", id=str(number), payload=number)
        assert [client.ending(str(number)).get("value") for number in range(33)] == list(range(33))
        assert client.status()["counters"]["memory_shortages"] >= 1
        assert client.status()["counters"].get("batches_failed", 0) == 0


def test_32_at_once_are_all_answered_although_their_worker_is_killed() -> None:
    with live(echo(fixed_ms=200, max_batch=32), policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        pid = client.status()["workers"][0]["pid"]
        for number in range(32):
            client.send(type="call", id=str(number), payload=number)
        client.socket.poll(50)
        os.kill(pid, signal.SIGKILL)
        assert [client.ending(str(number)).get("value") for number in range(32)] == list(range(32))
        assert client.ask(type="call", id="33", payload=33)["value"] == 33


def test_a_result_too_few_is_an_error_and_never_a_shift() -> None:
    with live(echo(short_results=True, max_batch=32), policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        for number in range(8):
            client.send(type="call", id=str(number), payload=number)
        endings = [client.ending(str(number)) for number in range(8)]
        assert {(one["type"], one["code"]) for one in endings} == {("error", "engine_error")}


# ---------------------------------------------------------------- generation

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from tests import torch_models as tiny  # noqa: E402


def short_of_memory(subject: GenerateEngine, monkeypatch: pytest.MonkeyPatch, fits: Callable[[Any], bool]) -> list[int]:
    """Let forwards raise whose plan does not fit. Returns the tokens of those that did, as they come."""
    run, sizes = subject._runner.run, list[int]()

    def limited(plan: Any, cache: Any) -> Any:
        if not fits(plan):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        sizes.append(plan.tokens)
        return run(plan, cache)

    monkeypatch.setattr(subject._runner, "run", limited)
    return sizes


@pytest.mark.parametrize("most", [1, 3, 13])
def test_every_answer_comes_whatever_little_fits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where not even all who run fit into a step: they take turns."""
    subject = tiny.engine(step_tokens=40)
    sizes = short_of_memory(subject, monkeypatch, lambda plan: plan.tokens <= most)
    wanted = tiny.requests(10)
    answers = tiny.drive(subject, wanted)
    tiny.expect_solo(answers, wanted)
    assert not answers.failed
    assert max(sizes) <= most
    assert sum(step.shortages for step in answers.steps) == subject._ceiling.shortages >= 2
    assert subject._pages.used == 0


def test_nobody_is_left_out_of_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny.engine(step_tokens=40)
    short_of_memory(subject, monkeypatch, lambda plan: plan.tokens <= 2)
    subject.add(1, tiny.items([([7] * (at + 1), Params(max_new_tokens=40)) for at in range(6)]))
    last = dict.fromkeys(range(6), 0)
    for step in range(120):
        for row in subject.step()[0].rows:
            last[row.rid] = step
        assert step < 30 or step - min(last.values()) <= 12, "somebody waits for ever"


def test_the_ceiling_comes_back_when_memory_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headway.worker")
    subject = tiny.engine(step_tokens=40)
    scarce = [True]
    sizes = short_of_memory(subject, monkeypatch, lambda plan: not scarce[0] or plan.tokens <= 9)
    wanted = tiny.requests(10)
    tiny.expect_solo(tiny.drive(subject, wanted), wanted)
    assert subject._ceiling.limit < 20
    assert "out of memory in a step of 40 tokens; at most 20 from now on" in caplog.text
    scarce[0] = False
    long = [([at % 500 + 1 for at in range(400)], Params(max_new_tokens=1)) for _ in range(2 * RISES)]
    tiny.drive(subject, long)
    assert subject._ceiling.limit == max(sizes) == 40
    assert "memory suffices again for a whole step of 40 tokens" in caplog.text


def test_one_that_does_not_fit_even_alone_ends_with_that_and_its_neighbours_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = tiny.engine(step_tokens=40)
    short_of_memory(subject, monkeypatch, lambda plan: max(plan.positions[0].tolist()) < 60)
    wanted = tiny.requests(5)
    wanted = [(list(ids)[:30], Params(max_new_tokens=20)) for ids, _ in wanted]
    subject.add(2, tiny.items([([9] * 58, Params(max_new_tokens=40))], first=9))
    answers = tiny.drive(subject, wanted)
    tiny.expect_solo(answers, wanted)
    row = answers.rows[9]
    assert (row.finish, row.code) == ("error", "out_of_memory")
    assert "Tried to allocate" in row.message
    assert answers.tokens[9] == tiny.solo("llama", [9] * 58, len(answers.tokens[9]))
    assert subject._pages.used == 0
