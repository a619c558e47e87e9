"""The worker's loop against a ROUTER that plays the scheduler: registering, answering, engines that misbehave, leaving.

`run_worker` runs in a thread here: the same code without the signals, which `test_worker_death.py` sends.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from headway.scheduler import link, supervisor
from headway.scheduler.link import Bye, Done, Drop, Failed, Ready, Step, Stop, Welcome
from headway.scheduler.spec import ModelSpec
from headway.workers import line, process
from headway.workers.process import run_worker
from tests.played_scheduler import WAIT_MS, Scheduler, calls, texts, values


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    made = Scheduler(f"ipc://{tmp_path}/w")
    yield made
    made.close()
    made.context.term()


# ---------------------------------------------------------------- in a thread


class Hand:
    """A worker in a thread; `code` once it has ended."""

    def __init__(self, scheduler: Scheduler, engine: str = "echo", **options: Any) -> None:
        curve = options.pop("curve", None)
        spec = ModelSpec(name="m", engine=engine, options=options)
        self.code: int | None = None

        def run() -> None:
            self.code = run_worker(scheduler.address, spec, name="w", heartbeat_ms=20, curve=curve)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def ended(self) -> int | None:
        self._thread.join(WAIT_MS / 1000)
        assert not self._thread.is_alive()
        return self.code


@contextmanager
def working(scheduler: Scheduler, engine: str = "echo", **options: Any) -> Iterator[bytes]:
    """A registered worker, which must still be in order at the end."""
    hand = Hand(scheduler, engine, **options)
    worker, _ = scheduler.welcome()
    yield worker
    scheduler.send(worker, Stop())
    assert scheduler.next(Bye)[1].reason == "drained"
    assert hand.ended() == 0


def test_a_worker_registers_until_it_is_welcomed(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "READY_AGAIN_NS", 1_000_000)
    hand = Hand(scheduler)
    names = {scheduler.next(Ready)[0] for _ in range(3)}
    worker, ready = scheduler.welcome()
    assert names == {worker}
    assert (ready.link, ready.name, ready.pid, ready.card.name) == (link.LINK, "w", os.getpid(), "m")
    assert worker.startswith(b"w:w:")
    scheduler.send(worker, Stop())
    while not isinstance(scheduler.any()[1], Bye):
        pass
    assert hand.ended() == 0


def test_batches_are_answered_in_order_and_heartbeats_count_them(scheduler: Scheduler) -> None:
    with working(scheduler) as worker:
        for batch in range(5):
            scheduler.send(worker, calls(batch, batch, None, {"a": [1]}))
        for batch in range(5):
            done = scheduler.next(Done)[1]
            assert (done.batch, values(done)) == (batch, [batch, None, {"a": [1]}])
        beat = scheduler.beat(worker)
        while beat.progress < 10 or beat.busy:
            beat = scheduler.beat(worker)
        assert beat.progress == 10  # before and after each step
        assert beat.rss_bytes > 1 << 20


@pytest.mark.parametrize("junk", [[b""], [b"\xff" * 20], [b"\x93\xa3run\x01"], [b"", b""], [b"\x92\xa4evil\x00"]])
def test_junk_is_survived(scheduler: Scheduler, junk: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    with working(scheduler) as worker:
        for _ in range(9):
            scheduler.socket.send_multipart([worker, *junk])
        scheduler.send(worker, calls(1, "fine"))
        assert values(scheduler.next(Done)[1]) == ["fine"]
    said = [r.getMessage() for r in caplog.records if "does not decode" in r.getMessage()]
    assert len(said) == 4  # of the 1st, 2nd, 4th and 8th


def test_a_long_name_fits_an_identity(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "NAME_BYTES_MAX", 5)
    hand = Hand(scheduler)
    worker, _ = scheduler.welcome()
    assert len(worker) < 20
    scheduler.send(worker, Stop(drain=False))
    assert hand.ended() == 0


def test_dropped_streams_end_and_others_go_on(scheduler: Scheduler) -> None:
    with working(scheduler, mode="iteration", fixed_ms=1) as worker:
        scheduler.send(worker, texts(1, "x" * 200, "y" * 30))
        scheduler.next(Step)
        scheduler.send(worker, Drop(1, [0, 77]))
        ends: dict[int, str] = {}
        steps = 0
        while len(ends) < 2:
            steps += 1
            ends.update({row.rid: row.finish for row in scheduler.next(Step)[1].rows if row.finish})
        assert ends == {0: "dropped", 1: "stop"}
        assert steps < 40


def test_draining_finishes_what_runs_and_honours_what_still_comes(scheduler: Scheduler) -> None:
    hand = Hand(scheduler, mode="iteration", fixed_ms=1)
    worker, _ = scheduler.welcome()
    scheduler.send(worker, texts(1, "x" * 30))
    scheduler.next(Step)
    scheduler.send(worker, Stop())
    scheduler.send(worker, texts(2, "y" * 50))
    said: dict[int, int] = {}
    while not isinstance(message := scheduler.any()[1], Bye):
        for row in message.rows if isinstance(message, Step) else ():
            said[row.batch] = said.get(row.batch, 1) + len(row.tokens)
    assert said == {1: 30, 2: 51}
    assert hand.ended() == 0


def test_told_to_leave_at_once_it_does(scheduler: Scheduler) -> None:
    hand = Hand(scheduler, mode="iteration", fixed_ms=1)
    worker, _ = scheduler.welcome()
    scheduler.send(worker, texts(1, "x" * 50_000))
    scheduler.send(worker, Stop(drain=False))
    assert hand.ended() == 0


def test_a_scheduler_restart_is_survived_and_old_work_forgotten(scheduler: Scheduler) -> None:
    hand = Hand(scheduler, mode="iteration", fixed_ms=1)
    old, _ = scheduler.welcome()
    scheduler.send(old, texts(1, "old" * 5000))
    scheduler.next(Step)
    scheduler.close()
    scheduler.open()
    new, _ = scheduler.welcome()
    assert new != old
    assert scheduler.beat(new)
    scheduler.send(new, texts(1, "n"))
    worker, step = scheduler.next(Step)
    assert worker == new
    assert [(row.rid, row.tokens, row.finish) for row in step.rows] == [(0, [ord("n")], "stop")]
    scheduler.send(new, Stop())
    assert scheduler.next(Bye)[0] == new
    assert hand.ended() == 0


def test_a_worker_that_is_not_known_any_more_forgets_its_work_and_registers_again(scheduler: Scheduler) -> None:
    hand = Hand(scheduler, mode="iteration", fixed_ms=1)
    worker, _ = scheduler.welcome()
    scheduler.send(worker, texts(1, "x" * 5000))
    scheduler.next(Step)
    scheduler.send(worker, link.Again())
    again, message = scheduler.any()
    while not isinstance(message, Ready):  # steps that were on their way
        again, message = scheduler.any()
    assert again != worker
    scheduler.send(again, Welcome())
    scheduler.send(again, texts(2, "y"))
    who, step = scheduler.next(Step)
    assert (who, {row.batch for row in step.rows}) == (again, {2})
    scheduler.send(again, Stop())
    assert hand.ended() == 0


def test_a_heartbeat_that_overtakes_the_registration_does_not_undo_it(scheduler: Scheduler) -> None:
    hand = Hand(scheduler, mode="iteration", fixed_ms=1)
    worker, _ = scheduler.next(Ready)
    scheduler.send(worker, link.Again())  # what a heartbeat of a stranger is told
    scheduler.send(worker, Welcome())
    scheduler.send(worker, texts(1, "y"))
    who, step = scheduler.next(Step)
    assert (who, [row.tokens for row in step.rows]) == (worker, [[ord("y")]])
    scheduler.send(worker, Stop())
    assert hand.ended() == 0


def test_reports_wait_for_a_slow_scheduler_but_not_for_a_dead_one(scheduler: Scheduler) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    alarm_fd, ring_fd = os.pipe()
    log = logging.LoggerAdapter(logging.getLogger("headway.worker"), {})
    to = line.Line(context, scheduler.address, name="w", curve=None, alarm_fd=alarm_fd, log=log)
    body = link.encode(Bye("x" * 10_000))  # the sender is far ahead of whoever reads it

    def talk() -> None:
        assert to.wait(None, writable=True)
        while not to.broken:
            to.send(body)

    talker = threading.Thread(target=talk)
    talker.start()
    for _ in range(3000):  # more than both ends keep
        scheduler.next(Bye)
    scheduler.close()
    talker.join(WAIT_MS / 1000)
    assert not talker.is_alive()
    to.close(0)
    os.close(alarm_fd)
    os.close(ring_fd)
    context.term()


def test_curve(scheduler: Scheduler) -> None:
    public, secret = zmq.curve_keypair()
    scheduler.close()
    scheduler.open(secret)
    with working(scheduler, curve=public.decode()) as worker:
        assert scheduler.beat(worker)


def test_a_wrong_key_is_refused_and_said_once(scheduler: Scheduler, caplog: pytest.LogCaptureFixture) -> None:
    (_, secret), (other, other_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    scheduler.close()
    scheduler.open(secret)
    watch = scheduler.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    hand = Hand(scheduler, curve=other.decode())
    for _ in range(6):
        assert watch.poll(WAIT_MS)
        watch.recv_multipart()
    scheduler.socket.disable_monitor()
    watch.close(0)
    assert scheduler.silent(0)
    scheduler.close()
    scheduler.open(other_secret)  # it goes on trying
    worker, _ = scheduler.welcome()
    scheduler.send(worker, Stop(drain=False))
    assert hand.ended() == 0
    assert sum("refused the handshake" in r.getMessage() for r in caplog.records) == 1


def test_leaving_by_hand_has_a_limit(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    box: list[process.Worker] = []
    init = process.Worker.__init__

    def keep(self: process.Worker, *args: Any, **keys: Any) -> None:
        init(self, *args, **keys)
        box.append(self)

    monkeypatch.setattr(process.Worker, "__init__", keep)
    monkeypatch.setattr(process, "DRAIN_NS_MAX", 0)
    hand = Hand(scheduler, mode="iteration", fixed_ms=1)
    worker, _ = scheduler.welcome()
    scheduler.send(worker, texts(1, "x" * 50_000))
    scheduler.next(Step)
    box[0].drain()
    while not isinstance(scheduler.any()[1], Bye):
        pass
    assert hand.ended() == 0


# ---------------------------------------------------------------- engines that misbehave

ENGINES = """
import msgspec
from headway.scheduler.link import Card, Done, Failed, Outcome, Row, Step

class Base:
    card = Card("m", "call", "oneshot", 8, 8, 8)
    def __init__(self): self.batches, self.cancelled = [], []
    @property
    def busy(self): return bool(self.batches)
    def add(self, batch, items): self.batches.append((batch, items))
    def cancel(self, batch, rids): self.cancelled += rids
    def close(self): pass
    def step(self):
        batch, items = self.batches.pop()
        return [self.report(batch, [item.rid for item in items])]

class Unpackable(Base):
    def report(self, batch, rids):
        odd = [object(), msgspec.Raw(b"\\xc1"), msgspec.Raw(b""), 1 << 80, "x", msgspec.Raw(b"\\x2a")]
        return Done(batch, 1, 1, [Outcome(rid, value=odd[rid]) for rid in rids])

class Large(Base):
    def report(self, batch, rids):
        return Done(batch, 1, 1, [Outcome(rid, embedding=b"x" * (4000 if rid == 1 else 4)) for rid in rids])

class Rows(Base):
    def report(self, batch, rids):
        self.batches += [(batch, [])] if rids else []
        if not rids:
            return Failed(batch, "engine_error", repr(self.cancelled), [7])
        return Step(1, 1, 1, [Row(batch, 0, [1]), Row(batch, 1, [-1.5]), Row(batch, 2, [object()], "stop")])

class Breaks(Base):
    def step(self): raise RuntimeError("the device is gone")

class Junk(Base):
    def step(self): return ["done"]

class Takes(Base):
    def add(self, batch, items):
        if batch == 1: raise ValueError("no room")
        self.batches.append((batch, items))
    def report(self, batch, rids): return Done(batch, 1, 1, [Outcome(rid) for rid in rids])

class Never(Base):
    def __init__(self): raise OSError("the disk is not there yet")
"""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_engines.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_engines", None)


@pytest.mark.usefixtures("engines")
def test_a_result_that_cannot_be_packed_is_an_error_of_its_own_request(scheduler: Scheduler) -> None:
    with working(scheduler, "their_engines:Unpackable") as worker:
        scheduler.send(worker, calls(1, *range(6)))
        made = values(scheduler.next(Done)[1])
        assert made[4:] == ["x", 42]
        assert all(str(text).startswith("the result cannot be sent: ") for text in made[:4])


@pytest.mark.usefixtures("engines")
def test_a_result_larger_than_a_message_is_an_error(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    with working(scheduler, "their_engines:Large") as worker:
        monkeypatch.setattr(link, "LINK_BYTES_MAX", 3000)
        scheduler.send(worker, calls(1, 0, 1, 2))
        first, large, last = scheduler.next(Done)[1].outcomes
        assert (first.embedding, last.embedding) == (b"xxxx", b"xxxx")
        assert "bytes are more than the" in large.message


@pytest.mark.usefixtures("engines")
def test_tokens_that_cannot_be_packed_end_their_stream(scheduler: Scheduler) -> None:
    with working(scheduler, "their_engines:Rows") as worker:
        scheduler.send(worker, calls(1, 0, 1, 2))
        rows = scheduler.next(Step)[1].rows
        assert [(row.tokens, row.finish, row.code) for row in rows] == [
            ([1], "", ""),
            ([], "error", "engine_error"),
            ([], "error", "engine_error"),
        ]
        assert scheduler.next(Failed)[1].message == "[1, 2]"  # the engine was told


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("engine", "says"), [("Breaks", "RuntimeError: the device is gone"), ("Junk", "TypeError: the engine's step")]
)
def test_a_broken_engine_fails_its_batches_and_ends_the_worker(scheduler: Scheduler, engine: str, says: str) -> None:
    hand = Hand(scheduler, f"their_engines:{engine}")
    worker, _ = scheduler.welcome()
    scheduler.send(worker, calls(5, "a", "b"))
    failed = scheduler.next(Failed)[1]
    assert (failed.batch, failed.code, failed.rids) == (5, "engine_error", [0, 1])
    assert failed.message.startswith(says)
    assert scheduler.next(Bye)[1].reason.startswith(f"the engine broke: {says}")
    assert hand.ended() == process.EXIT_BROKEN


@pytest.mark.usefixtures("engines")
def test_a_batch_that_an_engine_does_not_take_has_failed(scheduler: Scheduler) -> None:
    with working(scheduler, "their_engines:Takes") as worker:
        scheduler.send(worker, calls(1, "a", "b"))
        scheduler.send(worker, calls(2, "a"))
        failed = scheduler.next(Failed)[1]
        assert (failed.batch, failed.message, failed.rids) == (1, "ValueError: no room", [0, 1])
        assert scheduler.next(Done)[1].batch == 2


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("engine", "code", "says"),
    [
        ("no_such:thing", process.EXIT_CANNOT_LOAD, "there is no module 'no_such'"),
        ("their_engines:Never", process.EXIT_CANNOT_LOAD, "the disk is not there yet"),
        ("echo", process.EXIT_CANNOT_LOAD, "speed"),
    ],
)
def test_an_engine_that_cannot_be_made(
    scheduler: Scheduler, engine: str, code: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"speed": 1} if engine == "echo" else {}
    assert Hand(scheduler, engine, **options).ended() == code
    assert says in caplog.text


def test_what_may_pass_while_loading_is_worth_another_try(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(_spec: ModelSpec) -> Any:
        raise MemoryError("the last worker's memory is not free yet")

    monkeypatch.setattr(process, "make_engine", make)
    assert Hand(scheduler).ended() == process.EXIT_BROKEN


def test_workers_get_huge_pages_unless_the_operator_tunes_the_allocator() -> None:
    assert supervisor.worker_environment({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert supervisor.worker_environment({"GLIBC_TUNABLES": "x=1"}) == {"GLIBC_TUNABLES": "x=1"}
