"""The command line: what it prints, how it ends, and that asking for help is quick and loads no model library.

A small server in a thread answers as protocol 1 says, so that these tests need neither a model nor a worker.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import msgspec
import pytest
import zmq
from typer.testing import CliRunner, Result

from headway.cli.app import app
from headway.cli.exits import EXITS
from headway.cli.show import cell
from headway.scheduler import wire
from headway.scheduler.errors import HeadwayError
from headway.scheduler.spec import ModelSpec, PolicySpec, ServerSpec

NOWHERE = "tcp://127.0.0.1:1"
COMMANDS = [
    "serve",
    "worker",
    "generate",
    "embed",
    "classify",
    "score",
    "call",
    "info",
    "status",
    "version",
    "demo",
    "metrics",
    "simulate",
    "plan",
    "replay",
    "compare",
    "rerun",
    "tune",
    "ab",
    "split",
]

_decode = msgspec.msgpack.Decoder(wire.ClientMessage).decode


def answers(message: wire.ClientMessage) -> list[wire.ServerMessage]:
    """What the small server says."""
    id_ = message.id
    usage, timing = wire.Usage(3, 2), wire.Timing(1.0, 2.0)
    match message:
        case wire.Info():
            model: dict[str, Any] = {
                "workers": 1,
                "concurrency": 8,
                "max_batch": 8,
                "max_input_tokens": 0,
                "context_tokens": 0,
            }
            kinds = ("generate", "embed", "classify", "score", "call")
            models = [wire.ModelInfo(name="m", kind=kind, bypass_tokens=9, tokenizer=True, **model) for kind in kinds]
            return [
                wire.InfoReply(id=id_, protocol=1, server="9.9", models=models, limits={"a_max": 7}, state="serving")
            ]
        case wire.Status():
            batch = {"batch": 1, "reason": "idle", "waited_ms": 2.5}
            lanes = [{"model": "m", "waiting": 3}, {"model": "n", "paused": True}]
            return [
                wire.StatusReply(
                    id=id_,
                    state="serving",
                    uptime_s=5,
                    counters={"done": 4, "zero": 0},
                    lanes=lanes,
                    workers=[],
                    batches=[batch] * message.batches,
                )
            ]
        case wire.Embed():
            vector = [float(len(message.text or "")), 0.5, *([9.0] if message.prompt_name == "query" else [])]
            if message.truncate:
                usage = wire.Usage(3, truncated=True)
            return [wire.Result(id=id_, embedding=vector, usage=usage, timing=timing, model="m")]
        case wire.Classify():
            return [wire.Result(id=id_, scores={"no": 0.25, "yes": 0.75}, usage=usage, timing=timing, model="m")]
        case wire.Score():
            far = abs(len(message.text) - len(message.text_pair))
            return [wire.Result(id=id_, scores={"score": 1.0 / (1 + far)}, usage=usage, timing=timing, model="m")]
        case wire.Call():
            return [wire.Result(id=id_, value=message.payload, usage=usage, timing=timing, model="m")]
        case wire.Generate(tenant="mallory"):
            return [wire.error_message(id_, HeadwayError("too_long", "400 tokens; the limit is 300", field="prompt"))]
        case wire.Generate():
            words = [
                message.prompt or (message.messages or [])[0].content.upper(),
                f" +{message.params.max_new_tokens}",
            ]
            deltas = [wire.Delta(id=id_ or "", seq=seq, token_ids=[seq], text=text) for seq, text in enumerate(words)]
            odds = wire.Logprobs([-0.5, -1.0]) if message.params.logprobs == 0 else None
            ending = wire.Result(
                id=id_,
                text="".join(words),
                token_ids=[0, 1],
                finish_reason="stop",
                logprobs=odds,
                usage=usage,
                timing=timing,
                model="m",
            )
            return [*(deltas if message.stream else []), ending]
    return []


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.PAIR) as end:
        router.linger = end.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        end.bind("inproc://end")
        thread = threading.Thread(target=serve_small, args=(context, router))
        thread.start()
        yield f"tcp://127.0.0.1:{port}"
        end.send(b"")
        thread.join()


def serve_small(context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]") -> None:
    with context.socket(zmq.PAIR) as end:
        end.connect("inproc://end")
        poller = zmq.Poller()
        poller.register(end, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        while end not in dict(poller.poll()):
            who, body = router.recv_multipart()
            for answer in answers(_decode(body)):
                router.send_multipart([who, wire.encode(answer)])


@pytest.fixture
def run(address: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADWAY_CONNECT", address)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("headway.cli.connection.is_piped", lambda: True)

    def invoke(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return invoke


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(run: Callable[..., Result], command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"$ headway {command}" in result.output
    assert "Exit codes" in result.output
    assert "130 interrupted" in result.output


def test_every_command_is_tested_and_listed(run: Callable[..., Result]) -> None:
    output = run("--help").output
    assert [command.name or command.callback.__name__ for command in app.registered_commands if command.callback] == [
        *COMMANDS
    ]
    assert all(command in output for command in COMMANDS)
    assert all(f"{code:<3} {meaning}" in output for code, meaning in EXITS.items())


def test_every_setting_is_a_flag_of_serve(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    output = run("serve", "--help").output
    for group in (ModelSpec, PolicySpec, ServerSpec):
        for name in group.model_fields:
            if name not in ("models", "policy", "curve", "options", "tenant_weights"):
                assert f"--{name.replace('_', '-')}" in output


def test_help_is_light() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from headway.cli.app import app\n"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'transformers', 'zmq', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serv"], 2, "Did you mean 'serve'?"),
        (["serve", "--max-batch", "0"], 2, "--max-batch: models[0].max_batch is 0, but must be greater"),
        (["serve", "--max-batch", "many"], 2, "--max-batch"),
        (["serve", "--window", "no_such:x"], 2, "policy.window: there is no module 'no_such'; start in the directory"),
        (["simulate", "poisson:n=9", "--window", "no_such:x"], 2, "policy.window: there is no module 'no_such'"),
        (["serve", "--window", "fast"], 2, "policy.window is 'fast', but must be 'adaptive'"),
        (["serve", "--option", "x"], 2, "--option takes key=value"),
        (["serve", "--config", "no.yaml"], 2, "no.yaml cannot be read"),
        (["worker"], 2, "--connect"),
        (["generate", "--stream", "a", "b"], 2, "leave out --stream"),
        (["generate"], 2, "give a PROMPT"),
        (["generate", "--temperature", "-1", "a"], 2, "--temperature"),
        (["generate", "--logprobs", "2", "a"], 2, "add --json"),
        (["generate", "--min-p", "2", "a"], 4, "params.min_p"),
        (["call", "{"], 2, "the value is not JSON"),
        (["info", "--connect", "localhost"], 2, "it must be tcp://host:port"),
        (["info", "--server-key", "x"], 2, "40 characters"),
        (["info", "--connect", NOWHERE, "--timeout-ms", "50"], 3, "headway: unreachable:"),
        (["embed", "a", "--connect", NOWHERE, "--timeout-ms", "50"], 3, "headway: unreachable:"),
        (["generate", "a", "--tenant", "mallory"], 4, "headway: too_long: 400 tokens; the limit is 300 (field prompt)"),
        (["generate", "a", "b", "--tenant", "mallory"], 4, "headway: too_long:"),
    ],
)
def test_exit_codes(run: Callable[..., Result], arguments: list[str], code: int, says: str) -> None:
    result = run(*arguments)
    assert says in " ".join(result.stderr.split()), result.output
    assert result.exit_code == code
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x (a fault of headway itself; please report it)"),
        (KeyboardInterrupt(), 130, ""),
        (HeadwayError("queue_full", "full", retry_after_ms=7), 4, "queue_full: full; try again in 7 ms"),
        (HeadwayError("no_worker", "none"), 4, "no_worker: none; trying again may help"),
    ],
)
def test_what_goes_wrong_inside(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    def fails(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr("headway.cli.show.ask", fails)
    result = run("info")
    assert says in result.stderr
    assert result.exit_code == code


def test_an_unreachable_server_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "headway", "info", "--connect", NOWHERE, "--timeout-ms", "50"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.startswith("headway: unreachable: tcp://127.0.0.1:1")


def test_ctrl_c(address: str) -> None:
    command = [sys.executable, "-m", "headway", "status", "--watch", "--json", "--connect", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "serving"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_a_reader_that_has_seen_enough(address: str) -> None:
    command = [sys.executable, "-m", "headway", "status", "--watch", "--every-ms", "50", "--json", "--connect", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


# ---------------------------------------------------------------- what it prints


@pytest.mark.parametrize(
    ("arguments", "stdin", "output"),
    [
        (["generate", "abc"], "", "ABC +256\n"),
        (["generate", "abc", "--no-stream", "--max-new-tokens", "5"], "", "ABC +5\n"),
        (["generate", "--raw", "abc"], "", "abc +256\n"),
        (["generate", "ab", "cd", "ef"], "", "AB +256\nCD +256\nEF +256\n"),
        (["generate"], "from a pipe\n", "FROM A PIPE +256\n"),
        (["embed", "abc"], "", "2 numbers: 3.0000, 0.5000, …  abc\n"),
        (["embed"], "a\n\nab\n", "2 numbers: 1.0000, 0.5000, …  a\n2 numbers: 2.0000, 0.5000, …  ab\n"),
        (["embed", "--prompt-name", "query", "abc"], "", "3 numbers: 3.0000, 0.5000, 9.0000, …  abc\n"),
        (["embed", "--truncate", "abc"], "", "2 numbers: 3.0000, 0.5000, …  abc  (cut)\n"),
        (["classify", "abc"], "", "yes 0.7500  abc\n"),
        (["classify"], "a\nb\n", "yes 0.7500  a\nyes 0.7500  b\n"),
        (["score", "abc", "a", "ab"], "", "0.3333  a\n0.5000  ab\n"),
        (["score", "--sort", "abc"], "a\nab\n", "0.5000  ab\n0.3333  a\n"),
        (["call", '{"a": [1, null, "ü"]}'], "", '{"a":[1,null,"ü"]}\n'),
        (["call", "-"], "[true]", "[true]\n"),
    ],
)
def test_answers(run: Callable[..., Result], arguments: list[str], stdin: str, output: str) -> None:
    result = run(*arguments, stdin=stdin)
    assert (result.stdout, result.stderr, result.exit_code) == (output, "", 0)


def test_json(run: Callable[..., Result]) -> None:
    [answer] = map(json.loads, run("generate", "abc", "--json").stdout.splitlines())
    assert (answer["text"], answer["finish_reason"], answer["usage"]["prompt_tokens"]) == ("ABC +256", "stop", 3)
    assert "logprobs" not in answer
    [answer] = map(json.loads, run("generate", "abc", "--json", "--logprobs", "0").stdout.splitlines())
    assert [one["logprob"] for one in answer["logprobs"]] == [-0.5, -1.0]
    *deltas, last = map(json.loads, run("generate", "abc", "--json", "--stream").stdout.splitlines())
    assert ([delta["text"] for delta in deltas], last["text"]) == (["ABC", " +256"], "ABC +256")
    lines = [json.loads(line) for line in run("embed", "a", "ab", "--json").stdout.splitlines()]
    assert [(line["text"], line["embedding"]) for line in lines] == [("a", [1.0, 0.5]), ("ab", [2.0, 0.5])]
    [line] = map(json.loads, run("embed", "--truncate", "a", "--json").stdout.splitlines())
    assert line["usage"] == {"prompt_tokens": 3, "truncated": True}
    [line] = map(json.loads, run("classify", "a", "--json").stdout.splitlines())
    assert (line["label"], line["scores"]) == ("yes", {"no": 0.25, "yes": 0.75})
    [line] = map(json.loads, run("score", "a", "a", "--json").stdout.splitlines())
    assert (line["text"], line["score"]) == ("a", 1.0)
    assert json.loads(run("info", "--json").stdout)["server"] == "9.9"
    assert len(json.loads(run("status", "--json", "-b", "2").stdout)["batches"]) == 2


def test_tables(run: Callable[..., Result]) -> None:
    info = run("info").stdout
    assert "headway 9.9, protocol 1, serving" in info
    assert "a_max" in info
    status = run("status", "--batches", "1").stdout
    assert all(part in status for part in ("serving, up for 5 s", "waiting", "waited ms", "2.5", "idle", "done"))
    assert "zero" not in status


def test_watching_shows_it_again(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    async def enough(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(anyio, "sleep", enough)
    result = run("status", "--watch")
    assert (result.exit_code, "serving, up for 5 s" in result.stdout) == (130, True)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("a", None, ""),
        ("a", True, "yes"),
        ("a", 12345, "12345"),
        ("a", 0.123456, "0.123"),
        ("a", 1234.5, "1,234"),
        ("wait_ns", 1_500_000, "1.5"),
        ("rss_bytes", 3 << 20, "3.0"),
        ("a", {"b_ns": 1_000_000, "c": "d"}, "b_ns 1.0, c d"),
        ("a", ["x", 1], "x, 1"),
    ],
)
def test_cells(key: str, value: object, shown: str) -> None:
    assert cell(key, value) == shown


def test_version_names_what_is_there(run: Callable[..., Result]) -> None:
    output = run("version").stdout
    assert output.startswith("headway 0.1.0, Python 3.")
    assert "pyzmq" in output


# ---------------------------------------------------------------- the long-running ones


def test_worker_hands_over_its_spec(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    import headway.workers.process as process

    seen: dict[str, object] = {}

    def record(**arguments: object) -> int:
        seen.update(arguments)
        return 2

    monkeypatch.setattr(process, "run_worker", record)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run("worker", "--connect", "ipc:///w", "--engine", "echo", "--worker-name", "w", "--option", "delay_ms=5")
    assert result.exit_code == 5
    assert seen["spec"] == ModelSpec(engine="echo", options={"delay_ms": 5})
    assert (seen["connect"], seen["name"], seen["parent_pid"], seen["curve"]) == ("ipc:///w", "w", None, None)


def test_a_worker_serves_one_model(run: Callable[..., Result], tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "a.yaml")
    with open(path, "w") as file:
        file.write("models: [{name: a}, {name: b}]")
    result = run("worker", "--connect", "ipc:///w", "--config", path)
    assert (result.exit_code, "a worker serves one model, but 2 are configured (a, b)" in result.stderr) == (2, True)


def test_demo_passes_its_flags_and_exit_code_on(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    import headway.bench.demo as demo

    seen: dict[str, object] = {}

    def record(**arguments: object) -> int:
        seen.update(arguments)
        return 4

    monkeypatch.setattr(demo, "run", record)
    assert run("demo", "--requests", "5", "--seed", "7").exit_code == 4
    assert seen == {"requests": 5, "model": "smollm2", "seed": 7}
