"""Settings: what wins, what is refused, and whether the refusal tells a person what to change."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.scheduler.config import ConfigError, load, parse_options
from headway.scheduler.keys import KEYS, VARIABLES, dotted, is_variable, variable
from headway.scheduler.spec import WINDOW_KEYS, ModelSpec, PolicySpec, ServerSpec


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the person who runs the tests."""
    import os

    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)


def read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    flags: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    text: str = "",
    suffix: str = ".yaml",
) -> ServerSpec:
    for name, value in (env or {}).items():
        monkeypatch.setenv(name, value)
    path = tmp_path / f"headway{suffix}"
    path.write_text(text)
    return load(path, flags or {})


def value_at(spec: ServerSpec, key: str) -> Any:
    node: Any = spec
    for part in key.replace("[", ".").replace("]", "").split("."):
        node = node[int(part)] if part.isdigit() else node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def test_nothing_given_is_the_default() -> None:
    assert load() == ServerSpec()


@pytest.mark.parametrize(
    ("key", "flags", "env", "text", "want"),
    [
        ("bind", {"bind": "ipc:///f"}, {"HEADWAY_BIND": "ipc:///e"}, "bind: ipc:///y", "ipc:///f"),
        ("bind", {"bind": None}, {"HEADWAY_BIND": "ipc:///e"}, "bind: ipc:///y", "ipc:///e"),
        ("bind", {}, {"HEADWAY_BIND": ""}, "bind: ipc:///y", "ipc:///y"),
        ("bind", {}, {}, "", "tcp://127.0.0.1:5555"),
        ("policy.window", {"window": "fixed"}, {"HEADWAY_POLICY__WINDOW": "p95"}, "policy: {window: greedy}", "fixed"),
        ("policy.window", {}, {"HEADWAY_POLICY__WINDOW": "p95"}, "policy: {window: greedy}", "p95"),
        ("policy.window", {}, {"HEADWAY_POLICY": '{"window": "p95"}'}, "", "p95"),
        ("policy.queue_max", {"window": "fixed"}, {}, "policy: {queue_max: 7}", 7),
        ("models[0].threads", {"threads": 3}, {"HEADWAY_MODELS__0__THREADS": "2"}, "models: [{threads: 1}]", 3),
        ("models[0].threads", {}, {"HEADWAY_MODELS__0__THREADS": "2"}, "models: [{threads: 1}]", 2),
        ("models[1].threads", {"threads": 3}, {}, "models: [{name: a}, {name: b, threads: 5}]", 5),
        ("models[0].name", {"threads": 3}, {}, "models: [{name: a}, {name: b}]", "a"),
        ("models[1].workers", {}, {"HEADWAY_MODELS__1__WORKERS": "4"}, "models: [{name: a}, {name: b}]", 4),
        ("models[0].name", {}, {"HEADWAY_MODELS": '[{"name": "z"}]'}, "models: [{name: a}, {name: b}]", "z"),
        ("models[0].options.a", {"options": {"a": 1}}, {}, "models: [{engine: echo, options: {a: 2, b: 3}}]", 1),
        ("models[0].options.b", {"options": {"a": 1}}, {}, "models: [{engine: echo, options: {a: 2, b: 3}}]", 3),
        ("models[0].options", {}, {"HEADWAY_MODELS__0__OPTIONS": '{"a": [1]}'}, "", {"a": [1]}),
        ("curve.public", {}, {"HEADWAY_CURVE__PUBLIC": "p" * 40, "HEADWAY_CURVE__SECRET": "s" * 40}, "", "p" * 40),
        ("allow_public", {}, {"HEADWAY_ALLOW_PUBLIC": "true"}, "", True),
    ],
)
def test_precedence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    flags: dict[str, Any],
    env: dict[str, str],
    text: str,
    want: object,
) -> None:
    assert value_at(read(tmp_path, monkeypatch, flags=flags, env=env, text=text), key) == want


@pytest.mark.parametrize(
    ("flags", "engine", "model", "name"),
    [
        ({}, "generate", "smollm2", "smollm2"),
        ({"model": "minilm"}, "embed", "minilm", "minilm"),
        ({"model": "minilm", "engine": "generate"}, "generate", "minilm", "minilm"),
        ({"engine": "embed"}, "embed", "minilm", "minilm"),
        ({"engine": "echo"}, "echo", "", "echo"),
        ({"engine": "acme.rerank:make"}, "acme.rerank:make", "", "rerank"),
        ({"model": "acme/tiny"}, "generate", "acme/tiny", "acme/tiny"),
        ({"model": "./models/tiny/"}, "generate", "./models/tiny/", "tiny"),
        ({"model": "acme/tiny", "name": "t"}, "generate", "acme/tiny", "t"),
    ],
)
def test_what_is_left_out_follows_from_the_rest(flags: dict[str, Any], engine: str, model: str, name: str) -> None:
    [found] = load(None, flags).models
    assert (found.engine, found.model, found.name) == (engine, model, name)
    assert ModelSpec.model_validate_json(found.model_dump_json()) == found


def test_toml_says_the_same_as_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = (
        'drain_ms = 5\n[policy]\nwindow = "fixed"\n[[models]]\nname = "a"\n[[models]]\nname = "b"\nmodel = "minilm"\n'
    )
    yaml = "drain_ms: 5\npolicy: {window: fixed}\nmodels:\n  - name: a\n  - name: b\n    model: minilm\n"
    assert read(tmp_path, monkeypatch, text=toml, suffix=".toml") == read(tmp_path, monkeypatch, text=yaml)


def test_a_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yml"
    path.write_text("drain_ms: 77")
    monkeypatch.setenv("HEADWAY_CONFIG", str(path))
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setenv("HEADWAY_CONNECT", "tcp://127.0.0.1:1")
    assert load(None, {}).drain_ms == 77


@pytest.mark.parametrize(
    ("flags", "env", "text", "want"),
    [
        # unknown keys, everywhere
        ({}, {}, "bnd: x", ["headway.yaml", "there is no key bnd", "did you mean bind?"]),
        ({}, {}, "window: fixed", ["headway.yaml", "no key window", "did you mean policy.window?"]),
        ({}, {}, "policy: {windw: fixed}", ["no key policy.windw", "did you mean window?"]),
        ({}, {}, "models: [{max-batch: 4}]", ["no key models[0].max-batch", "did you mean max_batch?"]),
        ({}, {}, "qqqqqq: 1", ["there is no key qqqqqq"]),
        ({}, {"HEADWAY_BNID": "x"}, "", ["HEADWAY_BNID", "did you mean HEADWAY_BIND?"]),
        ({}, {"HEADWAY_WINDOW": "x"}, "", ["HEADWAY_WINDOW is set, but there is no such setting"]),
        ({}, {"HEADWAY_POLICY__WINDW": "x"}, "", ["did you mean HEADWAY_POLICY__WINDOW?"]),
        ({}, {"HEADWAY_MODELS__0__THREDS": "1"}, "", ["did you mean HEADWAY_MODELS__0__THREADS?"]),
        ({"thread": 1}, {}, "", ["no flag --thread", "did you mean threads?"]),
        # wrong values name the key, the value, the limit and where it was set
        ({"max_batch": 0}, {}, "", ["--max-batch: models[0].max_batch is 0, but must be greater than or equal to 1"]),
        ({}, {"HEADWAY_DRAIN_MS": "soon"}, "", ["HEADWAY_DRAIN_MS: drain_ms is 'soon', but must be a valid integer"]),
        ({}, {}, "policy: {window: 'a:b:c'}", ["policy.window is 'a:b:c', but must be", "or package.module:factory"]),
        ({}, {}, "models: [{window: fast}]", ["headway.yaml: models[0].window is 'fast', but must be 'adaptive', 'ef"]),
        ({}, {}, "models: [{max_wait_cap_ms: -1}]", ["models[0].max_wait_cap_ms is -1, but must be greater than or"]),
        ({}, {}, "policy: {window: fast}", ["headway.yaml: policy.window is 'fast', but must be 'adaptive', 'effi"]),
        ({}, {}, "models: []", ["models is [], but must have at least 1 item"]),
        ({}, {}, "models: {name: a}", ["models is {'name': 'a'}, but must be a valid list"]),
        ({}, {}, "models: [{name: ''}]", ["models[0].name is '', but must have at least 1 character"]),
        ({}, {}, "models: [{name: a}, {name: b, threads: x}]", ["headway.yaml: models[1].threads is 'x'"]),
        ({}, {"HEADWAY_MODELS__0__OPTIONS": "{"}, "", ["must be JSON"]),
        ({}, {"HEADWAY_POLICY": "{"}, "", ["HEADWAY_POLICY is not valid JSON"]),
        ({}, {"HEADWAY_MODELS__1__NAME": "b"}, "", ["HEADWAY_MODELS__1: models[1] is set, but there is no models[0]"]),
        ({}, {"HEADWAY_MODELS": "[{}]", "HEADWAY_MODELS__0__NAME": "b"}, "", ["HEADWAY_MODELS is all of the models"]),
        ({}, {}, "curve: {public: x}", ["curve.public must have at least 40", "curve.secret is missing"]),
        ({"drain_ms": -1, "max_batch": 0}, {}, "", ["2 settings cannot be used", "--drain-ms", "--max-batch"]),
        # relations name both keys
        (
            {"heartbeat_ms": 3000},
            {},
            "lost_after_ms: 6000",
            ["lost_after_ms (6000) must be more than twice heartbeat_ms (3000)", "--heartbeat-ms, /", "headway.yaml"],
        ),
        ({}, {}, "models: [{name: a}, {name: a}]", ["models[1]: a model named 'a'", "is there already"]),
        # the file itself
        ({}, {}, "- a", ["must be a map of keys"]),
        ({}, {}, "a: [", ["is not valid YAML"]),
        ({}, {}, "bind: a\nbind: b", ["bind is there twice", "line"]),
    ],
)
def test_refusals_say_what_to_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    env: dict[str, str],
    text: str,
    want: list[str],
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, monkeypatch, flags=flags, env=env, text=text)
    message = str(caught.value)
    assert [part for part in want if part not in message] == [], message
    assert "\n" not in message
    assert "pydantic" not in message


def test_secrets_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for env in ({"HEADWAY_CURVE__SECRET": "hush"}, {"HEADWAY_CURVE": "{hush"}):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, monkeypatch, env=env)
        assert "hush" not in str(caught.value)
    spec = load(None, {"curve": {"public": "p" * 40, "secret": "s" * 40}})
    assert "s" * 40 not in repr(spec)


@pytest.mark.parametrize(
    ("name", "want"), [("none.yaml", "cannot be read"), ("a.json", "ends in .yaml, .yml or .toml")]
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, want: str) -> None:
    with pytest.raises(ConfigError, match=want):
        load(tmp_path / name, {})


def test_a_huge_or_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="that is no settings file"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("pairs", "want"),
    [
        ([], {}),
        (
            ["a=1", "b=x", "c=[1, 2]", "d=", "e=a=b", 'f="1"'],
            {"a": 1, "b": "x", "c": [1, 2], "d": "", "e": "a=b", "f": "1"},
        ),
    ],
)
def test_options(pairs: list[str], want: dict[str, Any]) -> None:
    assert parse_options(pairs) == want


@pytest.mark.parametrize("pair", ["a", "=1", ""])
def test_an_option_needs_a_name_and_a_value(pair: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_options([pair])


def test_a_flag_has_one_place() -> None:
    server, model, policy = (set(group.model_fields) for group in (ServerSpec, ModelSpec, PolicySpec))
    assert model & policy == set(WINDOW_KEYS)  # the policy's; a model has its own only in a file or a variable
    assert not server & (model | policy)


def test_a_flag_for_the_window_is_the_policy_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "models: [{name: a}, {name: b, model: minilm, window: p95, fixed_wait_ms: 3}]\npolicy: {window: fixed}"
    spec = read(tmp_path, monkeypatch, flags={"window": "greedy"}, env={"HEADWAY_MODELS__0__WINDOW": "aimd"}, text=text)
    assert spec.policy.window == "greedy"
    assert [(model.window, model.fixed_wait_ms) for model in spec.models] == [("aimd", None), ("p95", 3.0)]


def test_every_key_has_a_variable_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(is_variable(variable(at)) for at in KEYS)
    assert all(is_variable(name) for name in VARIABLES)
    assert dotted(("models", 0, "max_batch")) == "models[0].max_batch"
    spec = load(None, {"engine": "echo"})
    dump = json.loads(spec.model_dump_json())
    for at in KEYS:
        if at[-1] in ("curve", "public", "secret", "policy", "models"):
            continue
        value = value_at(spec, dotted(at))
        if value is None:  # the policy's: say so
            value = dump["models"][0][at[-1]] = dump["policy"][at[-1]]
        monkeypatch.setenv(variable(at), json.dumps(value) if isinstance(value, dict) else str(value))
    assert json.loads(load().model_dump_json()) == dump
