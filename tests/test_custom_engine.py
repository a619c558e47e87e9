"""A user's own engine: found, told apart, wrapped, and each mistake answered with what to do."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.scheduler.link import Card, Done, Failed, Item
from headway.scheduler.spec import ModelSpec
from headway.workers.custom import CannotLoad, load_custom

SOURCE = """
import asyncio

def double(payloads):
    return [p * 2 for p in payloads]

def scaled(payloads, by=10):
    return [p * by for p in payloads]

class Model:
    def __init__(self, by, extra=0):
        self.by, self.extra = by, extra
    def __call__(self, payloads):
        return [p * self.by + self.extra for p in payloads]

def make(by=3):
    return lambda payloads: [p * by for p in payloads]

class Own:
    card = "a card"
    def step(self): return []
own = Own()
def make_own(): return Own()

class Methods:
    def run(self, payloads): return double(payloads)
methods = Methods()

def picky(payloads):
    return [ValueError("odd") if p % 2 else p for p in payloads]
def short(payloads): return payloads[1:]
def none(payloads): return None
def text(payloads): return "abc"
def lazy(payloads): return (p for p in payloads)
def tuple_(payloads): return tuple(payloads)
def odd_values(payloads): return [{1, 2}, {"a": [0, object()]}, 1 << 70, "\\ud800", (1, None)]
def broken(payloads): raise KeyError("text")

number = 7
class Empty: pass
def nothing(): return None
def raises(): raise OSError("no such folder")
def gives_number(): return 7
async def slow(payloads): return payloads
def generator(payloads): yield 1
class AsyncCall:
    async def __call__(self, payloads): return payloads
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current directory, which is not on the path."""
    (tmp_path / "their_model.py").write_text(SOURCE)
    (tmp_path / "their_broken.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "their_raising.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    sys.modules.pop("their_model", None)


def load(name: str, **options: Any) -> Any:
    return load_custom(f"their_model:{name}", ModelSpec(name="m", engine=f"their_model:{name}", options=options))


def answers(engine: Any, *payloads: object) -> Any:
    engine.add(1, [Item(rid, payload=msgspec.Raw(msgspec.msgpack.encode(p))) for rid, p in enumerate(payloads)])
    (report,) = engine.step()
    if isinstance(report, Failed):
        return report.code, report.message
    assert isinstance(report, Done)
    return [(o.code, o.message) if o.code else msgspec.msgpack.decode(o.value) for o in report.outcomes]


@pytest.mark.parametrize(
    ("name", "options", "result"),
    [
        ("double", {}, [2, 4]),
        ("scaled", {}, [10, 20]),
        ("scaled", {"by": 5}, [5, 10]),
        ("Model", {"by": 4}, [4, 8]),
        ("Model", {"by": 4, "extra": 1}, [5, 9]),
        ("make", {}, [3, 6]),
        ("make", {"by": 7}, [7, 14]),
        ("methods.run", {}, [2, 4]),
        ("tuple_", {}, [1, 2]),
    ],
)
def test_functions_classes_and_factories(name: str, options: dict[str, Any], result: list[int]) -> None:
    engine = load(name, **options)
    assert isinstance(engine.card, Card)
    assert (engine.card.name, engine.card.kind, engine.card.mode) == ("m", "call", "oneshot")
    assert answers(engine, 1, 2) == result


@pytest.mark.parametrize("name", ["Own", "own", "make_own"])
def test_an_engine_is_taken_as_it_is(name: str) -> None:
    assert load(name).card == "a card"


def test_an_exception_in_the_list_is_that_requests_alone() -> None:
    assert answers(load("picky"), 2, 3, 4) == [2, ("engine_error", "ValueError: odd"), 4]


def test_a_value_that_cannot_be_sent_is_that_requests_alone_and_named() -> None:
    made = answers(load("odd_values"), *range(5))
    assert made[0] == ("engine_error", "result: a set cannot be sent; send a list")
    assert made[1][1].startswith("result.a[1]: an object cannot be sent")
    assert "64 bits" in made[2][1]
    assert "surrogate" in made[3][1]
    assert made[4] == [1, None]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("short", ("engine_error", "the engine returned 1 results for 2 inputs")),
        ("none", ("engine_error", "TypeError: the function returned a NoneType; it must return a list")),
        ("text", ("engine_error", "TypeError: the function returned a str; it must return a list")),
        ("lazy", ("engine_error", "TypeError: the function returned a generator; it must return a list")),
        ("broken", ("engine_error", "KeyError: 'text'")),
    ],
)
def test_a_function_that_fails_the_batch(name: str, said: tuple[str, str]) -> None:
    code, message = answers(load(name), 1, 2)
    assert code == said[0]
    assert message.startswith(said[1])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "their_model",
            "is no engine; use generate, embed, classify, score, echo, or a path like package.module:attribute",
        ),
        ("no_such_module:x", "there is no module 'no_such_module'; start in the directory that holds it"),
        ("their_broken:x", "module their_broken needs 'a_package_that_is_not_there', which is not installed"),
        ("their_raising:x", "importing their_raising raised ZeroDivisionError"),
        ("their_model:nope", "module their_model has no 'nope'; define it there"),
        ("their_model:number", "gives a int, which cannot be called"),
        ("their_model:gives_number", "gives a int, which cannot be called"),
        ("their_model:Empty", "gives a Empty, which cannot be called"),
        ("their_model:Model", "needs 'by'; give it in the model's options"),
        ("their_model:nothing", "returned nothing; it must return an engine or a function"),
        ("their_model:raises", "raised OSError: no such folder"),
        ("their_model:slow", "is async or a generator"),
        ("their_model:generator", "is async or a generator"),
        ("their_model:AsyncCall", "is async or a generator"),
    ],
)
def test_each_mistake_has_an_answer(path: str, says: str) -> None:
    with pytest.raises(CannotLoad, match=says):
        load_custom(path, ModelSpec(engine=path))


@pytest.mark.parametrize("name", ["double", "make", "Model"])
def test_an_unknown_option_is_an_error(name: str) -> None:
    with pytest.raises(CannotLoad, match=r"colour.*correct the model's options"):
        load(name, by=1, colour=2) if name != "double" else load(name, colour=2)
