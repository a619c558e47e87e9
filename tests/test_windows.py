"""Which window a model and kind has: by name, by its own entry, by an import path; and what becomes of a bad one."""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from headway.policies.views import Launch
from headway.policies.windows import MAKERS, adaptive, fixed
from headway.scheduler.chosen import policies_of
from headway.scheduler.config import ConfigError
from headway.scheduler.held import HeldWindow
from headway.scheduler.report import estimate
from headway.scheduler.spec import ModelSpec, PolicySpec
from tests.live import Live, echo, live
from tests.sim import MS, World
from tests.test_policies import STEADY, view

OPERATING = Path(__file__).parents[1] / "docs" / "operating.md"
MODULES = {
    "own_good": """
        class Counted:
            def __init__(self):
                self.asked = 0
            def __call__(self, view, now_ns):
                from headway.policies.views import Launch
                self.asked += 1
                return Launch("counted")
        class inner:
            make = Counted
        a_list = []
        def makes_none(): return None
        def makes_class(): return Counted
        def makes_short(): return lambda view: None
        def makes_async():
            async def window(view, now_ns): ...
            return window
        def needs(size): return Counted()
        def raises(): raise OSError("no disk")
        made = []
        def once():
            made.append(1)
            if len(made) > 1:
                raise OSError("no disk any more")
            return Counted()
        """,
    "own_raising": "1 / 0",
    "own_needing": "import a_package_that_is_not_there",
    "own_broken": """
        def make_window():
            def window(view, now_ns):
                return {}["nothing"]
            return window
        """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the operator starts headway. Own modules lie there; the documented one waits longer than any test."""
    folder = tmp_path_factory.mktemp("operator")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(dedent(text))
    source = re.search(r"```python\n# quorum.py(.*?)```", OPERATING.read_text(), re.S)
    assert source
    assert "10_000_000\n" in source.group(1)
    (folder / "quorum.py").write_text("#" + source.group(1).replace("10_000_000", "10_000_000_000"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        yield folder
    for name in [*MODULES, "quorum"]:
        sys.modules.pop(name, None)


def chosen(window: str, *models: ModelSpec, **keys: Any) -> Any:
    return policies_of(PolicySpec(window=window, **keys), models).window_of


@pytest.mark.parametrize("name", MAKERS)
def test_every_window_can_be_chosen(name: str) -> None:
    choice = chosen(name)("m", "k")
    assert choice.name == name
    assert isinstance(choice.window(view(STEADY, waiting=32), 0), Launch)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:x", "there is no module 'no_such_module'; start in the directory that holds it"),
        ("own_needing:x", "module own_needing needs 'a_package_that_is_not_there', which is not installed"),
        ("own_raising:x", "importing own_raising raised ZeroDivisionError"),
        ("own_good:x", "module own_good has no 'x'"),
        ("own_good:inner.x", "module own_good has no 'inner.x'"),
        ("own_good:a_list", "own_good:a_list is of type list, which cannot be called"),
        ("own_good:makes_none", "returned a NoneType, which is no window"),
        ("own_good:makes_class", "returned a type, which is no window"),
        ("own_good:makes_short", "returned a function, which is no window"),
        ("own_good:makes_async", "returned a function, which is no window"),
        ("own_good:needs", "raised TypeError: needs() missing 1 required positional argument: 'size'"),
        ("own_good:raises", "raised OSError: no disk"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_path_that_gives_no_window_is_refused_and_the_field_is_named(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(path)
    assert str(error.value).startswith("policy.window: ")
    assert says in str(error.value)
    with pytest.raises(ConfigError, match=r"^models\[1\]\.window: "):
        chosen("greedy", ModelSpec(engine="echo"), ModelSpec(name="b", engine="echo", window=path))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("path", ["own_good:Counted", "own_good:inner.make"])
def test_each_model_and_kind_has_a_new_window_of_its_own(path: str) -> None:
    choose = chosen(path, max_wait_cap_ms=7)
    first, second = choose("m", "embed"), choose("m", "classify")
    assert (first.name, first.bound_ns) == (path, 7 * MS)
    assert first.window is not second.window
    assert first.window(view(STEADY), 0) == Launch("counted")
    assert (first.window.asked, second.window.asked) == (1, 0)


@pytest.mark.usefixtures("folder")
def test_a_factory_that_fails_later_is_a_fault_and_no_more() -> None:
    held = HeldWindow(chosen("own_good:once")("m", "k"))
    assert held.ask(view(STEADY), 10, 0) == Launch("window_fault")
    assert "own_good:once raised OSError: no disk any more" in held.fault


def test_a_model_has_its_own_keys_and_else_the_policy_s() -> None:
    choose = chosen(
        "fixed",
        ModelSpec(name="a", engine="echo", window="greedy"),
        ModelSpec(name="b", engine="echo", fixed_wait_ms=9),
        ModelSpec(name="c", engine="echo", window="adaptive", max_wait_cap_ms=20),
        ModelSpec(name="d", engine="echo"),
        fixed_wait_ms=3,
        max_wait_cap_ms=50,
    )
    found = {name: choose(name, "call") for name in ("a", "b", "c", "d", "e")}
    assert {name: (choice.name, choice.bound_ns // MS) for name, choice in found.items()} == {
        "a": ("greedy", 50),
        "b": ("fixed", 9),
        "c": ("adaptive", 20),
        "d": ("fixed", 3),
        "e": ("fixed", 3),  # a worker of another machine, which serves what is in no entry
    }
    assert found["b"].window(view(STEADY), 0).until_ns == 9 * MS


def test_entries_of_one_name_are_told_by_their_kind() -> None:
    choose = chosen(
        "p95",
        ModelSpec(name="m", engine="embed", model="minilm", window="greedy"),
        ModelSpec(name="m", engine="own:make", window="aimd"),
        ModelSpec(name="m", engine="generate", window="fixed"),
    )
    kinds = ("embed", "generate", "call", "classify")
    assert [choose("m", kind).name for kind in kinds] == ["greedy", "fixed", "aimd", "aimd"]


# ---------------------------------------------------------------- live


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    del folder
    models = [
        echo(name).model_copy(update={"window": window})
        for name, window in {"greedy": "greedy", "quorum": None, "broken": "own_broken:make_window"}.items()
    ]
    with live(*models, policy=PolicySpec(window="quorum:make_window", max_wait_cap_ms=60_000)) as server:
        yield server


def ask(server: Live, model: str, count: int) -> dict[str, int]:
    """So many at once; which counters grew by how much."""
    client = server.client()
    before = client.status()["counters"]
    for index in range(count):
        client.send(type="call", id=str(index), model=model, payload=index)
    assert [client.ending(str(index))["value"] for index in range(count)] == list(range(count))
    after = client.status()["counters"]
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def test_the_window_of_the_document_waits_for_four(server: Live) -> None:
    grew = ask(server, "quorum", 4)
    assert (grew["batches"], grew["launched.quorum"]) == (1, 1)


def test_another_model_has_another_window(server: Live) -> None:
    grew = ask(server, "greedy", 3)
    assert grew["batches"] == grew["launched.greedy"]


def test_a_broken_window_answers_all_the_same_is_counted_and_logged_once(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "headway.scheduler"):
        grew = [ask(server, "broken", 2), ask(server, "broken", 2)]
    assert all(one["launched.window_fault"] == one["batches"] == one["window_faults"] for one in grew)
    said = "window own_broken:make_window of model broken (call) counts as launch: KeyError: 'nothing'"
    assert [record.getMessage() for record in caplog.records] == [said]


# ---------------------------------------------------------------- what is reported


def told(world: World) -> dict[str, Any]:
    service = world.core.services[("m", "k")]
    return estimate(service, service.short, world.now_ns)


def apart(world: World, *gaps_ms: int) -> World:
    """Requests so far apart, each alone; then the world is idle."""
    for gap in gaps_ms:
        world.run(world.now_ns + gap * MS)
        world.submit()
    world.run(world.now_ns + 200 * MS)
    return world


def test_what_is_known_of_intervals_and_window_is_reported() -> None:
    world = World(0, window=adaptive(cap_ns=100 * MS))
    world.join(max_batch=32)
    assert told(world) == {"window_ms": 0, "longest_ms": 0, "intervals": 0, "censored": 0}
    world.beat()
    apart(world, *[500, 1, 1, 1] * 10)
    known = told(world)
    assert (known["intervals"], known["rule_ms"], known["interval_p95_ms"]) == (39, 750, 500)
    assert 1 < known["longest_ms"] <= 8.2
    assert (known["censored"], known["censored_share"]) == (9, 0.231)


def test_the_effective_window_is_what_a_request_that_comes_now_waits() -> None:
    world = World(0, window=adaptive(cap_ns=100 * MS))
    world.join(max_batch=32)
    world.beat()
    apart(world, *[1] * 60)
    expected_ms = told(world)["window_ms"]
    begin_ns = world.now_ns
    world.submit()
    world.run(begin_ns + 100 * MS)
    waited = [line for line in world.log if "window_over" in line][-1]
    assert expected_ms == 1.5
    assert f"waited_ns={int(expected_ms * MS)}" in waited


def test_while_an_iteration_engine_runs_the_effective_window_is_none() -> None:
    world = World(0, window=fixed(wait_ns=7 * MS))
    world.join(iteration=True)
    assert told(world)["window_ms"] == 7
    world.submit(max_new=5)
    world.run(world.now_ns + 8 * MS)
    assert told(world)["window_ms"] == 0
    world.submit()
    assert world.core.counters["launched.joins_running"] == 1
    world.run(world.now_ns + 200 * MS)
    assert told(world)["window_ms"] == 7


def test_status_and_info_tell(server: Live) -> None:
    ask(server, "broken", 1)
    client = server.client()
    lanes = {(row["model"], row["lane"]): row for row in client.status()["lanes"]}
    short = lanes[("quorum", "short")]
    assert short["window"] == "quorum:make_window"
    assert short["window_ms"] == 10_000.0
    assert lanes[("quorum", "long")]["window_ms"] == 0
    assert lanes[("broken", "short")]["window_fault"] == "KeyError: 'nothing'"
    client.send(type="info", id="i")
    models = {model["name"]: model["window"] for model in client.receive()["models"]}
    assert models["quorum"].items() >= {"name": "quorum:make_window", "window_ms": 10_000.0}.items()
    assert models["greedy"]["window_ms"] == 0
