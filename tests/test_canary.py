"""Canaries: a page that nobody holds is written by somebody, and the worker says so and ends."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.canary import IsolationError  # noqa: E402
from headway.workers.generate.engine import LOOK_STEPS, GenerateEngine  # noqa: E402
from headway.workers.generate.page_use import ENOUGH, PageUse  # noqa: E402
from tests import torch_models as tiny  # noqa: E402


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("sharing", ["off", "tenant"])
def test_answers_are_the_same_and_every_page_is_checked(dtype: str, sharing: str) -> None:
    wanted = tiny.requests(12)
    plain = tiny.drive(tiny.engine(kv_dtype=dtype), wanted).tokens
    subject = tiny.engine(kv_dtype=dtype, canary=True, prefix_sharing=sharing)
    assert tiny.drive(subject, wanted).tokens == plain
    assert subject._pages.used == 0
    assert subject._canary is not None
    assert subject._canary.checked > 12
    assert subject.card.facts["canary"] == "on"


def scribble(subject: GenerateEngine, page: int) -> None:
    """One number of one layer, in a page that is free."""
    store = subject._cache.values[1]
    store[page * subject._page_tokens + 3, 0, 5] = 1


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_write_to_a_free_page_is_found_when_the_page_is_used_again(dtype: str) -> None:
    subject = tiny.engine(kv_dtype=dtype, canary=True)
    subject.add(1, tiny.items([([5] * 30, Params(max_new_tokens=3))]))
    subject.step()
    page = subject._running[0].pages[0]
    tiny.drive(subject)
    scribble(subject, page)
    subject.add(2, tiny.items([([6] * 30, Params(max_new_tokens=3))]))
    with pytest.raises(IsolationError, match=rf"KV pages \[{page}\] were written while nobody held them"):
        subject.step()


def test_a_write_to_a_free_page_is_found_by_looking() -> None:
    """The one request that runs needs no other page."""
    subject = tiny.engine(canary=True, page_tokens=128)
    subject.add(1, tiny.items([([5], Params(max_new_tokens=2 * LOOK_STEPS - 10))]))
    subject.step()
    for page in range(subject._pages.total):
        if page not in subject._running[0].pages:
            scribble(subject, page)
    with pytest.raises(IsolationError, match="were written while nobody held them"):
        tiny.drive(subject)
    assert subject._steps == LOOK_STEPS


def test_a_read_of_a_free_page_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny.engine(canary=True)
    subject.add(1, tiny.items([([5] * 30, Params(max_new_tokens=8))]))
    subject.step()
    (request,) = subject._running
    free = next(page for page in range(subject._pages.total) if page not in request.pages)
    request.pages[0] = free
    monkeypatch.setattr(subject._pages, "give", lambda _: None)  # which would see that it is not his
    answers = tiny.Answers()
    answers.take(subject.step())
    assert [(one.rids, one.message) for one in answers.failed] == [
        ([0], "the model computed logits that are not finite")
    ]


# ---------------------------------------------------------------- a hint about the size of pages


def hints(page_tokens: int, lengths: list[int]) -> list[Any]:
    use = PageUse(page_tokens)
    return [said for length in lengths if (said := use.observe(length))]


def test_pages_too_large_and_too_small_are_said_once() -> None:
    (said,) = hints(256, [40] * 200)
    assert said.startswith("page_tokens 256 is large for texts of 40 tokens: 84% of the pages' room stays empty; 4 ")
    (said,) = hints(1, [3000] * 200)
    assert said == "page_tokens 1 is small for texts of 3000 tokens, 3000 pages each; 16 would be planned faster"
    assert hints(16, [300] * 200) == []
    assert hints(256, [40] * (ENOUGH - 1)) == []


def test_the_engine_passes_it_on(caplog: pytest.LogCaptureFixture) -> None:
    subject = tiny.engine(page_tokens=64)
    tiny.drive(subject, [([5] * 3, Params(max_new_tokens=1))] * ENOUGH)
    assert "page_tokens 64 is large for texts of 4 tokens" in caplog.text
