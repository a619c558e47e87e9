"""Replays against real servers: sent at their own times, and every request accounted for."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("numpy")

from typer.testing import CliRunner

from headway.bench.replay import job as jobs
from headway.bench.replay.job import Job
from headway.bench.replay.plan import Shaping, Shot, opened
from headway.bench.replay.player import Player, Timers, run
from headway.bench.replay.report import Facts, Report, report_of
from headway.bench.replay.seen import Note, Seen
from headway.bench.replay.targets import How
from headway.cli.app import app
from headway.scheduler import clock, wire
from headway.scheduler.config import ConfigError
from headway.scheduler.errors import HeadwayError
from headway.scheduler.spec import ServerSpec
from headway.scheduler.sync_client import SyncClient
from tests.live import Live, echo, live

MS = 1_000_000
SERVICE_MS = 40
STREAM = echo("stream", mode="iteration", fixed_ms=1)
SLOW = echo("slow", mode="oneshot", fixed_ms=SERVICE_MS, max_batch=1)
FAILING = echo("failing", mode="oneshot", kind="embed", fail_every=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(STREAM, SLOW, FAILING) as running:
        yield running


def played(server: Live, shots: list[Shot], *, processes: int = 1, **keys: Any) -> Report:
    how = How(model=keys.pop("model", "stream"), slow_ms=keys.pop("slow_ms", 0.0), stream=keys.pop("stream", True))
    job = Job(connect=server.address, how=how, **keys)
    playing = jobs.play_in(processes, job, shots) if processes > 1 else jobs.play(job, shots)
    seen, watched = run(playing)
    assert [one.index for one in sorted(seen, key=lambda one: one.index)] == [shot.index for shot in shots]
    report = report_of(Facts(source="some", target="there", mode="open loop", **_facts(keys)), seen, watched)
    assert sum(report.endings.values()) == report.requests == len(shots)
    return report


def _facts(keys: dict[str, Any]) -> dict[str, int]:
    return {"concurrency": keys.get("concurrency", 0)}


def shots(source: str, kind: str = "generate", **how: Any) -> list[Shot]:
    return opened(source, Shaping(**how)).shots(kind)


# ---------------------------------------------------------------- waiting that nobody may leave out


@pytest.mark.parametrize("concurrency", [0, 1])
def test_waiting_at_the_replayer_is_latency(server: Live, concurrency: int) -> None:
    """Eight at four times the pace of a server that takes one at a time: the last waits for all others, wherever it
    does (coordinated omission). The server's time is a lower bound, so the machine's own pace does not matter."""
    gap_ms = SERVICE_MS // 4
    load = [Shot(index, index * gap_ms * MS, 1, 0, "call") for index in range(8)]
    report = played(server, load, model="slow", concurrency=concurrency)
    last_ms = report.columns["e2el_ms"][-1]
    assert last_ms >= 8 * SERVICE_MS - 7 * gap_ms
    held, lag = report.times["held"].max_ms or 0.0, report.times["lag"].max_ms or 0.0
    warned = [text for text in report.warnings if "limit of 1 at once" in text]
    if concurrency:
        assert held + lag >= 7 * SERVICE_MS - 7 * gap_ms
        assert (report.times["service"].mean_ms or 0.0) < (report.times["e2el"].mean_ms or 0.0)
        assert warned
    else:
        assert not warned


def test_timers_are_set_earlier_by_what_they_surely_are_late() -> None:
    timers, rng = Timers(), random.Random("timers")
    for _ in range(500):
        timers.woke(400_000 + int(rng.expovariate(1 / 50_000)))
    assert 380_000 < timers.early_ns < 450_000
    for _ in range(20):
        timers.woke(30_000)
    assert timers.early_ns < 60_000
    timers.woke(10**10)  # the machine stood still
    assert timers.early_ns <= MS


def test_a_time_is_when_the_answer_came_and_not_when_it_was_looked_at() -> None:
    note = Note(Seen(0, 0), 1_000)
    note.tokens(2, 5_000)
    note.tokens(1, 9_000)
    note.over("ok", at_ns=12_000)
    assert (note.seen.first_ns, note.seen.gaps, note.seen.done_ns) == (4_000, [4_000], 11_000)


def test_what_is_measured_is_what_the_server_did_and_the_way(tmp_path: Path) -> None:
    """A server that stamps what it reads and answers: no request was read before it was sent, and no answer was seen
    before it was given; what lies between is the service to the nanosecond."""
    address = f"ipc://{tmp_path}/s"
    server = subprocess.Popen(
        [sys.executable, "-m", "headway.bench.exact_server", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    load = [Shot(at, at * 10 * MS, 1, 0, "call", payload=msgspec.msgpack.encode(3)) for at in range(6)]
    began_ns: list[int] = []
    seen, _ = run(jobs.play(Job(connect=address, timeout_ms=60_000), load, started=began_ns.append))
    stamps = json.loads(server.communicate(timeout=60)[0])
    assert len(stamps) == len(seen) == 6
    for one in seen:
        read_ns, answered_ns = (at - began_ns[0] for at in stamps[f"r{one.index}"])
        assert one.due_ns <= one.sent_ns <= read_ns
        assert answered_ns - read_ns == 3 * MS
        assert one.done_ns >= answered_ns
        assert one.server_ms == 3.0


class Scripted:
    """A target that is done at once, or fails."""

    slow = False

    def __init__(self, *fails: int) -> None:
        self.fails = fails
        self.fired: list[int] = []

    def load(self, shot: Shot) -> object:
        if shot.kind != "call":
            raise ConfigError("no such kind")
        return None

    async def fire(self, shot: Shot, ready: object, left_ms: int | None, note: Note) -> None:
        del ready, left_ms, note
        self.fired.append(shot.index)
        if shot.index in self.fails:
            raise HeadwayError("engine_error", "as scripted")


def play(target: Scripted, load: list[Shot], *, begin_ms: int = 5, **closed: int) -> list[Seen]:
    async def main() -> list[Seen]:
        player = Player(target, clock.now_ns() + begin_ms * MS)
        return await (player.play_closed(load, **closed) if closed else player.play(load))

    return run(main())


def test_nothing_is_sent_before_its_time_and_lateness_does_not_add_up() -> None:
    """A replay that begins five seconds too late sends at once what is due, and the last at its own time again, unless
    the machine stands still for seconds."""
    load = [Shot(index, index * 1275 * MS, 1, 0, "call") for index in range(5)]
    seen = play(Scripted(), load, begin_ms=-5000)
    lag_ms = [(one.woke_ns - one.due_ns) / MS for one in seen]
    assert [one.due_ns for one in seen] == [shot.at_ns for shot in load]
    assert min(lag_ms) >= 0
    assert lag_ms[0] >= 5000
    assert lag_ms[-1] < 5000


def test_a_failure_is_one_request_s_and_a_fault_is_everybody_s() -> None:
    load = [Shot(index, 0, 1, 0, "call") for index in range(4)]
    assert [one.code for one in play(Scripted(2), load)] == ["ok", "ok", "engine_error", "ok"]
    with pytest.raises(ConfigError, match="no such kind"):
        play(Scripted(), [Shot(0, 0, 1, 0, "sing")])
    with pytest.raises(ConfigError, match="no such kind"):
        play(Scripted(), [Shot(0, 0, 1, 0, "sing")], clients=1, think_ns=0)


def test_a_deadline_counts_from_when_it_should_have_gone() -> None:
    target = Scripted()
    load = [Shot(0, 0, 1, 0, "call", deadline_ms=500), Shot(1, 0, 1, 0, "call", deadline_ms=600_000)]
    assert [one.code for one in play(target, load, begin_ms=-1000)] == ["deadline_exceeded", "ok"]
    assert target.fired == [1]


# ---------------------------------------------------------------- a real server


def test_streams_are_seen_token_by_token(server: Live) -> None:
    report = played(server, shots("poisson:rps=200,n=60,tokens=12,max_new=5"))
    assert (report.endings["completed"], report.first_tokens, report.output_tokens) == (60, 60, 300)
    assert (report.times["itl"].n, report.times["tpot"].n, report.input_tokens) == (240, 60, 720)
    assert report.times["queue"].n == 60
    assert report.watched is not None
    assert sum(batch["size"] for batch in report.watched.batches.values()) == 60
    assert report.device_ms is not None
    assert report.device_ms >= 1


def test_outputs_of_no_one_two_and_many_tokens(server: Live) -> None:
    load = [Shot(index, 0, 64, new, "generate") for index, new in enumerate((0, 1, 2, 50))]
    report = played(server, load)
    assert report.columns["output_lens"] == [1, 1, 2, 50], "an engine that generates needs a step for no token, too"
    assert [value is None for value in report.columns["tpot_ms"]] == [True, True, False, False]


def test_a_storm_of_cancels_and_deadlines(server: Live) -> None:
    load = shots("poisson:rps=300,n=90,tokens=3000,max_new=3000", cancel_share=0.5, cancel_ms=30.0, deadline_ms=900)
    before = server.client().status()["counters"]
    report = played(server, load)
    assert report.endings["cancelled"] == sum(shot.cancel_ms > 0 for shot in load)
    assert report.endings["expired"] + report.endings["refused"] == 90 - report.endings["cancelled"]
    assert report.output_tokens > 0
    after = server.client().status()["counters"]
    assert after["ended.cancelled"] > before.get("ended.cancelled", 0)


def test_nothing_is_held_back_for_what_the_server_advises(server: Live) -> None:
    advised = next(model.concurrency for model in _info(server).models if model.name == "slow")
    before = server.client().status()["counters"].get("received", 0)
    load = [Shot(index, 0, 1, 0, "call", cancel_ms=200.0) for index in range(2 * advised)]
    played(server, load, model="slow")
    client = server.client()
    for _ in range(500):  # the server may have them in its socket still
        if client.status()["counters"]["received"] - before == 2 * advised:
            return
        client.socket.poll(20)
    raise AssertionError("some were never sent")


def _info(server: Live) -> wire.InfoReply:
    with SyncClient(server.address) as client:
        return client.info()


def test_slow_readers_read_slowly_on_connections_of_their_own(server: Live) -> None:
    load = shots("poisson:rps=300,n=20,tokens=6,max_new=6", slow_share=0.3)
    slow = sum(shot.slow for shot in load)
    report = played(server, load, slow_ms=20.0)
    assert (report.endings["completed"], report.slow_readers, report.times["e2el"].n) == (20, slow, 20 - slow)
    assert 0 < slow < 20
    [seen], _ = run(jobs.play(Job(connect=server.address, how=How(model="stream", slow_ms=20.0)), [SLOWLY]))
    assert seen.done_ns - seen.sent_ns >= 7 * 20 * MS, "six tokens and an ending, each read after a pause"


SLOWLY = Shot(0, 0, 6, 6, "generate", slow=True)


def test_a_closed_loop_never_has_more_under_way_than_clients(server: Live) -> None:
    load = shots("closed:clients=3,think_ms=0,n=30", kind="call")
    seen, _ = run(jobs.play(Job(connect=server.address, how=How(model="slow"), clients=3), load))
    assert [one.code for one in seen] == ["ok"] * 30
    for one in seen:
        assert sum(other.sent_ns <= one.sent_ns < other.done_ns for other in seen) <= 3


def test_several_processes_are_one_replay(server: Live) -> None:
    report = played(server, shots("poisson:rps=400,n=80,tokens=4,max_new=2"), processes=2)
    assert report.completed == 80
    assert report.columns["at_s"] == sorted(report.columns["at_s"])
    with pytest.raises(HeadwayError, match="no such file; give the model's tokenizer"):
        run(jobs.play_in(2, Job(connect=server.address, how=How(tokenizer="nowhere")), shots("poisson:n=4")))


def test_inside_this_process() -> None:
    spec = ServerSpec(models=(STREAM,), log_level="warning")
    load = shots("poisson:rps=200,n=20,tokens=5,max_new=3")
    seen, watched = run(jobs.play(Job(), load, spec=spec))
    assert Counter(one.code for one in seen) == {"ok": 20}
    assert watched is not None
    assert watched.launched > 0
    with pytest.raises(ConfigError, match="an embedded scheduler has none"):
        run(jobs.play(Job(), shots("poisson:n=9", slow_share=0.9), spec=spec))


# ---------------------------------------------------------------- the command


def test_the_command_replays_reports_and_compares(server: Live, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cli = CliRunner(env={"COLUMNS": "160"})
    for name, rps in (("a", 200), ("b", 100)):
        files = ["--json", str(tmp_path / f"{name}.json"), "--html", str(tmp_path / f"{name}.html")]
        source = f"poisson:rps={rps},n=40,tokens=8,max_new=4"
        options = ["--connect", server.address, "--model", "stream", "--slo", "e2e:60000,ttft:60000", *files]
        result = cli.invoke(app, ["replay", source, *options, "--warmup-s", "0.01", "--cost-per-hour", "3.6"])
        assert result.exit_code == 0, result.output
        assert "100.0 % within e2e:60000,ttft:60000" in result.output
        assert "more in warm-up and cool-down" in result.output
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["completed"] == written["num_prompts"] < 40
    assert written["cost_per_request"] > 0
    assert (written["model_id"], datetime.fromisoformat(written["date"]).tzinfo) == ("stream", UTC)
    page = (tmp_path / "a.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert "http://" not in page.replace(server.address, "")
    assert "<script" not in page
    result = cli.invoke(app, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert result.exit_code == 0
    assert "mean_e2el_ms" in result.output
    assert "the loads are not the same" in result.output


def test_failures_are_shown_and_are_the_exit_code(server: Live, tmp_path: Path) -> None:
    cli = CliRunner(env={"COLUMNS": "160"})
    path = tmp_path / "r.json"
    result = cli.invoke(
        app,
        [
            "replay",
            "poisson:rps=500,n=40,tokens=8",
            "--connect",
            server.address,
            "--model",
            "failing",
            "--json",
            str(path),
        ],
    )
    assert result.exit_code == 4, result.output
    written = json.loads(path.read_text())
    assert written["failed_by"] == {"engine_error": written["failed"]}
    assert written["completed"] + written["failed"] == 40
    assert "engine_error: " in result.output


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_replay_reports_what_has_ended(server: Live, tmp_path: Path, processes: int) -> None:
    pytest.importorskip("matplotlib")
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    before = server.client().status()["counters"].get("received", 0)
    arguments = ["poisson:rps=100,n=100000,tokens=4,max_new=2", "--connect", server.address, "--model", "stream"]
    program = [sys.executable, "-m", "headway", "replay", *arguments, "--json", str(path), "--html", str(page)]
    process = subprocess.Popen(
        [*program, "--processes", str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # whoever runs the tests may not
    )
    watching = server.client()
    while watching.status()["counters"].get("received", 0) < before + 20:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: " in shown
    written = json.loads(path.read_text())
    assert 0 < written["completed"] < 100_000
    assert written["completed"] + written["interrupted"] == 100_000
    assert "interrupted: " in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.csv"], "no such file"),
        (["poisson", "--pattern", "random"], "--pattern is 'random'; it must be one of trace, fixed, poisson"),
        (["poisson", "--kind", "sing"], "--kind is 'sing'"),
        (["poisson", "--prompts", "text"], "needs --tokenizer"),
        (["poisson", "--slo", "ttft"], "give name:milliseconds"),
        (["poisson", "--slo", "speed:5"], "give name:milliseconds"),
        (["poisson", "--openai", "http://127.0.0.1:1", "--config", "a.yaml"], "both name a target"),
        (["poisson", "--config", "a.yaml", "--processes", "2"], "has one process that sends to it"),
        (["poisson", "--json", "no/such/folder.json"], "there is no folder"),
        (["closed", "--speed", "2"], "a closed loop sets its own speed"),
    ],
)
def test_what_cannot_be_replayed_is_a_usage_error(arguments: list[str], said: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", *arguments])
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_a_model_that_is_not_there_is_waited_for_and_named(server: Live) -> None:
    arguments = ["replay", "poisson:n=2", "--connect", server.address, "--timeout-ms", "300"]
    for more, said in ((["--model", "other"], "no model called 'other'"), (["--kind", "classify"], "serves classify")):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, *more])
        assert (result.exit_code, said in result.output) == (4, True), result.output


def test_a_server_that_is_not_there_is_unreachable() -> None:
    arguments = ["replay", "poisson:n=2", "--connect", "tcp://127.0.0.1:9", "--timeout-ms", "50"]
    assert CliRunner().invoke(app, arguments).exit_code == 3
