"""Shared beginnings: read once within a tenant, never across tenants, and answers as if nothing were shared."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.link import Item, pack_ids  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.prefix import SharedPages  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

PAGE = 8
SYSTEM = [(at * 37 + 11) % 500 + 1 for at in range(100)]  # 12 full pages and a half


# ---------------------------------------------------------------- the tree


def held(pages: SharedPages, tokens: Sequence[int]) -> list[int]:
    """What a request with these tokens takes: what is known, and pages of its own for the rest."""
    found = pages.reuse("t", tokens)
    return found + pages.take(-(-len(tokens) // PAGE) - len(found))


def test_only_full_pages_that_lie_before_the_last_token_are_shared() -> None:
    pages = SharedPages(20, PAGE)
    text = list(range(20))
    mine = held(pages, text)
    pages.learn("t", text, mine)
    for length, shared in ((8, 0), (9, 1), (16, 1), (17, 2), (20, 2)):
        found = pages.reuse("t", text[:length])
        assert found == mine[:shared]
        pages.give(found)
    assert pages.reuse("t", [*text[:8], 99, *text[9:]]) == mine[:1]
    assert pages.reuse("u", text) == []


def test_what_only_the_tree_holds_is_free_and_the_longest_unused_end_goes_first() -> None:
    pages = SharedPages(6, PAGE)
    first, second = list(range(32)), list(range(100, 116))
    for text in (first, second):
        mine = held(pages, text)
        pages.learn("t", text, mine)
        pages.give(mine)
    assert (pages.used, pages.free, repr(pages)) == (0, 6, "<SharedPages 0/6 used, 6 known>")
    taken = pages.take(2)  # the last two pages of the first text
    assert len(pages.reuse("t", [*first, 0])) == 2
    assert len(pages.reuse("t", [*second, 0])) == 2
    assert (pages.used, pages.free) == (6, 0)
    pages.give(taken)


def test_a_page_that_is_forgotten_while_somebody_reads_it_is_not_given_away() -> None:
    """Two computed the same first page; the second page hangs under the other's first, which nobody holds any more."""
    pages = SharedPages(4, PAGE)
    text = list(range(17))
    one, other = pages.take(1), pages.take(2)
    pages.learn("t", text[:8], one)
    pages.learn("t", text[:16], other)
    pages.give(one)
    rest = pages.take(2)
    assert not set(rest) & set(other)
    assert pages.reuse("t", text) == []
    pages.give(other)
    pages.give(rest)
    assert pages.free == 4


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pages, held_by = SharedPages(30, PAGE), list[tuple[list[int], list[int]]]()
    for _ in range(400):
        if held_by and rng.random() < 0.5:
            text, mine = held_by.pop(rng.randrange(len(held_by)))
            if rng.random() < 0.7:
                pages.learn("t", text, mine)
            pages.give(mine)
        else:
            text = [rng.randrange(2) for _ in range(PAGE)] * rng.randint(1, 4) + [7] * rng.randint(1, 9)
            if -(-len(text) // PAGE) <= pages.free:
                held_by.append((text, held(pages, text)))
        assert pages.used == len({page for _, mine in held_by for page in mine})
    for _, mine in held_by:
        pages.give(mine)
    assert pages.free == 30
    assert len(set(pages.take(30))) == 30


# ---------------------------------------------------------------- the engine


def engine(name: str = "llama", **spec: Any) -> GenerateEngine:
    return tiny.engine(name, prefix_sharing="tenant", **spec)


def ask(subject: GenerateEngine, tokens: Sequence[int], tenant: str, count: int = 6) -> tuple[list[int], int]:
    """The answer, and how many tokens of the input were not read again."""
    subject.add(1, [Item(0, ids=pack_ids(tokens), params=Params(max_new_tokens=count), tenant=tenant)])
    answers = tiny.drive(subject)
    return answers.tokens[0], sum(step.reused for step in answers.steps)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe", "deepseek_v3"])
def test_a_shared_beginning_is_read_once_and_answers_are_those_of_a_fresh_engine(name: str) -> None:
    subject = engine(name)
    rng = random.Random(4)
    for number in range(8):
        prompt = SYSTEM + [rng.randrange(1, 500) for _ in range(rng.randint(1, 20))]
        answer, reused = ask(subject, prompt, "t")
        assert answer == tiny.solo(name, prompt, 6)
        assert reused == (96 if number else 0)
    assert subject._pages.used == 0


def test_a_conversation_is_read_on_from_its_last_answer() -> None:
    subject = engine()
    answer, _ = ask(subject, SYSTEM, "t", 40)
    longer = [*SYSTEM, *answer, 5, 6, 7]
    again, reused = ask(subject, longer, "t")
    assert again == tiny.solo("llama", longer, 6)
    assert reused == (len(SYSTEM) + 39) // PAGE * PAGE  # the last token was answered, never read


@pytest.mark.parametrize("sharing", ["off", "tenant"])
def test_nothing_is_shared_across_tenants_or_without_one_or_when_off(sharing: str) -> None:
    """Also not pages: what two requests hold at the same time has nothing in common."""
    subject = tiny.engine(prefix_sharing=sharing, step_tokens=500)
    tenants = ["a", "b", "", "", "c"] if sharing == "tenant" else ["a", "a", "", "", "b"]
    prompts = [[*SYSTEM, 3 + at] for at in range(len(tenants))]
    for at, (prompt, tenant) in enumerate(zip(prompts, tenants, strict=True)):
        answer, reused = ask(subject, prompt, tenant)
        assert (answer, reused) == (tiny.solo("llama", prompt, 6), 0), f"request {at}"
    items = [
        Item(at, ids=pack_ids(prompt), params=Params(max_new_tokens=6), tenant=tenant + "2" if tenant else "")
        for at, (prompt, tenant) in enumerate(zip(prompts, tenants, strict=True))
    ]
    subject.add(2, items)
    subject.step()
    together = [page for request in subject._running for page in request.pages]
    assert len(subject._running) == len(tenants)
    assert len(set(together)) == len(together)
    tiny.drive(subject)


def test_fifty_pairs_after_cancels_and_errors_get_the_answers_of_a_fresh_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A is cancelled or fails in the middle, in one of three; B begins with the same long text."""
    subject = engine()
    run, rng, broken = subject._runner.run, random.Random(3), [False]

    def maybe(*args: Any) -> Any:
        logits = run(*args)
        return logits.fill_(float("nan")) if broken[0] else logits

    monkeypatch.setattr(subject._runner, "run", maybe)
    system = [(at * 53 + 7) % 500 + 1 for at in range(300)]
    for pair in range(50):
        first = [*system, *(rng.randrange(1, 500) for _ in range(9))]
        subject.add(1, [Item(0, ids=pack_ids(first), params=Params(max_new_tokens=4), tenant="t")])
        for _ in range(pair % 9):
            subject.step()
        broken[0] = pair % 3 == 1
        if pair % 3 == 2:
            subject.cancel(1, [0])
        tiny.drive(subject)
        broken[0] = False
        second = [*system, *(rng.randrange(1, 500) for _ in range(5))]
        answer, _ = ask(subject, second, "t", 2)
        assert answer == tiny.solo("llama", second, 2), f"pair {pair}"


def test_pages_are_forgotten_when_they_are_wanted() -> None:
    """More beginnings than there is room for; everybody is answered, also under preemption."""
    subject = engine(kv_mib=1, max_num_seqs=4, step_tokens=60)
    subject._pages = SharedPages(40, PAGE)
    rng = random.Random(6)
    wanted = [
        ([500 - rng.randrange(6)] * 40 + [rng.randrange(1, 400) for _ in range(30)], Params(max_new_tokens=20))
        for _ in range(16)
    ]
    items = [Item(at, ids=pack_ids(ids), params=params, tenant="t") for at, (ids, params) in enumerate(wanted)]
    subject.add(1, items)
    answers = tiny.drive(subject)
    tiny.expect_solo(answers, wanted)
    assert sum(step.reused for step in answers.steps) > 0
    assert (subject._pages.used, subject._pages.free) == (0, 40)
