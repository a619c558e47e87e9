"""What a server writes down: its traffic, to be replayed, and its core's events, to be decided again."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("numpy")

from typer.testing import CliRunner

from headway.bench.replay import job as jobs
from headway.bench.replay import rerun
from headway.bench.replay.job import Job
from headway.bench.replay.plan import Shaping, opened
from headway.bench.replay.player import run
from headway.bench.sim import recording
from headway.bench.sim.sources import open_source
from headway.cli.app import app
from headway.scheduler import actions as act
from headway.scheduler import link
from headway.scheduler.blackbox import Step
from headway.scheduler.config import ConfigError
from headway.scheduler.spec import PolicySpec
from headway.scheduler.tape import Tape, ends, whole_bytes
from tests.live import Raw, echo, live

STREAM = echo("stream", mode="iteration")


def traffic(client: Raw) -> None:
    """One good answer, one refused at the door, one cancelled."""
    assert client.ask(type="generate", id="1", prompt="secret", tenant="acme")["type"] == "result"
    wrong = client.ask(type="generate", id="2", prompt="x", tenant="acme", params={"stop_token_ids": [999_999]})
    assert wrong["code"] == "invalid_request"
    client.send(
        type="generate", id="3", input_ids=[65] * 5000, params={"max_new_tokens": 5000}, stream=True, priority=3
    )
    assert client.receive()["type"] == "delta"
    client.send(type="cancel", id="3")
    assert client.ending("3")["code"] == "cancelled"


# ---------------------------------------------------------------- traffic


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "r.msgpack"
    with live(STREAM, record=str(path)) as server:
        traffic(server.client())
    return path


def test_traffic_is_recorded_without_names_and_contents(recorded: Path) -> None:
    entries, torn = recording.entries(recorded)
    assert not torn
    assert [entry.went.outcome for entry in entries if entry.went] == ["ok", "invalid_request", "cancelled"]
    first, second, third = entries
    assert (first.came.kind, first.came.model, first.came.tokens, first.came.max_new) == ("generate", "stream", 6, 256)
    assert first.went is not None
    assert (first.went.output, first.went.batch_size, first.record.max_new) == (6, 1, 6)
    assert first.went.total_ms >= (first.went.ttft_ms or 0) >= first.went.queue_ms >= 0
    assert (third.came.priority, third.record.max_new) == (3, 5000)
    assert first.came.tenant == second.came.tenant != ""
    data = recorded.read_bytes()
    assert b"acme" not in data
    assert b"secret" not in data
    assert link.pack_ids(list(b"secret")) not in data


def test_contents_and_names_are_recorded_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "r.msgpack"
    models = (STREAM, echo("call"))
    with live(*models, record=str(path), record_prompts=True, record_tenants="names") as server:
        client = server.client()
        traffic(client)
        assert client.ask(type="call", id="4", payload={"a": [1]})["value"] == {"a": [1]}
        load = opened(str(path), Shaping(seed=1))
        shots = load.shots("embed")
        assert (shots[0].ids, shots[0].tenant, shots[0].kind) == (list(b"secret"), "acme", "generate")
        assert msgspec.msgpack.decode(shots[-1].payload or b"") == {"a": [1]}
        seen, _ = run(jobs.play(Job(connect=server.address), [shots[0], shots[-1]]))
        assert [one.code for one in seen] == ["ok", "ok"]
    assert [record.ids for record in recording.records(path)[0]][-2:] == [link.pack_ids(list(b"secret")), None]


def test_a_recording_is_simulated_with_answers_as_long_as_they_were(recorded: Path) -> None:
    load = open_source(str(recorded))
    assert load.max_new.tolist() == [6, 0, 5000]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["simulate", str(recorded), "--engine", "fast"])
    assert result.exit_code == 0, result.output
    assert "3 of 3" in result.output


def test_what_was_there_at_a_crash_is_recorded_and_the_next_start_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.msgpack"
    program = [sys.executable, "-m", "headway", "serve", "--engine", "echo", "--option", "fixed_ms=3600000"]
    options = ["--bind", f"ipc://{tmp_path}/s", "--record", str(path)]
    process = subprocess.Popen([*program, *options], stderr=subprocess.DEVNULL, start_new_session=True)
    client = Raw(f"ipc://{tmp_path}/s")
    try:
        client.wait_ready()
        client.send(type="call", id="1", payload=1, accepted=True)
        assert client.receive()["type"] == "accepted"
        client.status()  # a turn later
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        client.close()
    with path.open("ab") as file:
        file.write(b"\x8a\xa1v")  # as if it had died while it wrote
    assert recording.entries(path)[1]
    with live(echo(), record=str(path)) as server:
        server.client().ask(type="call", id="2", payload=2)
    (first, second), torn = recording.entries(path)
    assert not torn
    assert (first.came.kind, first.went) == ("call", None)
    assert second.went is not None
    assert first.came.at_ns < second.came.at_ns


# ---------------------------------------------------------------- the file itself


def test_half_a_value_is_cut_off_before_anything_is_added(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for value in ({"a": 1}, {"b": [1, {"c": b"x" * 70_000}]}):
        tape = Tape(str(path))
        tape.put(value)
        tape.close()
        with path.open("ab") as file:
            file.write(msgspec.msgpack.encode({"half": "a value"})[:-3])
    tape = Tape(str(path))
    tape.close()
    with path.open("rb") as file:
        assert len(list(ends(file, ""))) == 2
    assert whole_bytes(path) == path.stat().st_size


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(ConfigError, match="is no recording; it will not be added to, nor overwritten"):
        Tape(str(path))
    assert path.read_text() == "my notes"
    with pytest.raises(ConfigError, match="cannot be written to"):
        Tape(str(tmp_path / "no" / "folder"))


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tape = Tape(str(tmp_path / "t"), bytes_max=100)
    for _ in range(9):
        tape.put({"some": "value"})
        tape.flush()
    assert [record.getMessage().count("recorded no further") for record in caplog.records] == [1]
    assert whole_bytes(tmp_path / "t") == (tmp_path / "t").stat().st_size <= 100


# ---------------------------------------------------------------- the core's events


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two starts of a server; in the second, requests so far apart that the literal rule would wait."""
    path = tmp_path_factory.mktemp("flight") / "f.msgpack"
    with live(STREAM, flight_record=str(path)) as server:
        server.client().ask(type="generate", id="1", prompt="abc")
    with live(echo("call", fixed_ms=1), flight_record=str(path), policy=PolicySpec(window="greedy")) as server:
        client = server.client()
        for number in range(60):
            client.ask(type="call", id=str(number), payload=number)
    return path


def test_a_record_decided_again_is_the_same(flight: Path) -> None:
    assert rerun.sessions(flight) == 2
    found = rerun.rerun(flight, {}, reasons=True)
    assert (found.parting, found.batches) == (None, 60)
    assert rerun.rerun(flight, {}, session=1).batches == 1
    assert b"abc" not in flight.read_bytes()


def test_another_policy_parts_at_its_first_other_deed(flight: Path) -> None:
    same = {"window": "fixed", "fixed_wait_ms": 0}
    assert rerun.rerun(flight, same).parting is None, "it does the same, for other reasons"
    reason = rerun.rerun(flight, same, reasons=True).parting
    assert reason is not None
    assert isinstance(reason.first[0], act.Dispatch)
    assert isinstance(reason.second[0], act.Dispatch)
    assert reason.first[0].reason == "greedy" != reason.second[0].reason
    found = rerun.rerun(flight, {"window": "fixed", "fixed_wait_ms": 500})
    assert found.parting is not None
    assert type(found.parting.first[0]) is act.Dispatch
    assert not any(type(action) is act.Dispatch for action in found.parting.second)
    assert "Submit" in found.parting.event
    assert (found.batches, found.names) == (0, ("as recorded", "window=fixed, fixed_wait_ms=500"))


def test_who_would_have_woken_sooner_parts_there(tmp_path: Path) -> None:
    """Both would launch at the recorded tick; but the second would not have waited for it."""
    path = tmp_path / "f"
    policy = PolicySpec(window="fixed", fixed_wait_ms=40)
    with live(echo(), flight_record=str(path), policy=policy) as server:
        server.client().ask(type="call", id="1", payload=1)
    assert rerun.rerun(path, {}).parting is None
    parting = rerun.rerun(path, {"fixed_wait_ms": 5}).parting
    assert parting is not None
    assert (parting.event, parting.first) == ("Tick()", [])
    assert type(parting.second[0]) is act.Dispatch


def test_another_version_parts_where_it_decided_otherwise(flight: Path, tmp_path: Path) -> None:
    """A record with one other decision in it is what another version would have left."""
    path = tmp_path / "f"
    values: list[Any] = list(rerun.read(flight))
    place = next(i for i, v in enumerate(values) if isinstance(v, Step) and v.actions and i > len(values) // 2)
    values[place] = Step(values[place].now_ns, values[place].event, [])
    path.write_bytes(b"".join(map(msgspec.msgpack.encode, values)))
    found = rerun.rerun(path, {})
    assert found.parting is not None
    assert (found.parting.first, bool(found.parting.second)) == ([], True)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["rerun", str(path)])
    assert result.exit_code == 0
    assert f"part at step {found.parting.step}" in result.output
    assert "nothing" in result.output
    again = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["rerun", str(path), "--window", "greedy"])
    assert "decide the same" in again.output


def test_what_is_no_flight_record_is_refused(flight: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no session 7; it has 2"):
        rerun.rerun(flight, {}, session=7)
    with pytest.raises(ConfigError, match="cannot be used here: window"):
        rerun.rerun(flight, {"window": "soon"})
    other = tmp_path / "r"
    recording.write(other, [recording.Record(1, 1, 1)])
    with pytest.raises(ConfigError, match="not of a flight record"):
        rerun.rerun(other, {})
    torn = tmp_path / "t"
    torn.write_bytes(flight.read_bytes()[:-3])
    assert rerun.rerun(torn, {}).steps == rerun.rerun(flight, {}).steps - 1
