"""A trial on live traffic between two real servers: a slower B is rolled back, a dead one too, and nobody loses an
answer."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headway.bench.ab.split import Split
from headway.bench.ab.trial import FASTER, ROLLED_BACK, UNDECIDED, Trial
from headway.bench.overhead import free_address
from headway.scheduler.binding import BindError
from tests.live import Raw, echo, live


@contextmanager
def split(a: str, b: str, trial: Trial) -> Iterator[tuple[Split, Raw, list[str]]]:
    told: list[str] = []
    subject = Split("tcp://127.0.0.1:*", a, b, trial, told.append)
    over = threading.Event()
    thread = threading.Thread(target=subject.run, args=(over.is_set,))
    thread.start()
    client = Raw(subject.address)
    try:
        yield subject, client, told
    finally:
        client.close()
        over.set()
        thread.join()


def ask_all(client: Raw, count: int, **more: Any) -> list[dict[str, Any]]:
    return [client.ask(type="call", id=str(number), payload=number, **more) for number in range(count)]


def test_a_slower_server_is_rolled_back_and_every_request_is_answered() -> None:
    trial = Trial(share=0.5, seed=1)
    with (
        live(echo("m")) as a,
        live(echo("m", fixed_ms=20)) as b,
        split(a.address, b.address, trial) as (_, client, told),
    ):
        answers = ask_all(client, 400)
        assert [answer["value"] for answer in answers] == list(range(400))
        assert trial.verdict == ROLLED_BACK
        assert told[0].startswith("rolled back: ")
        assert 100 <= sum(trial.counts.values()) < 400
        before = b.client().status()["counters"]
        ask_all(client, 20)
        assert b.client().status()["counters"] == before  # nothing more goes there


def test_a_server_that_is_not_there_costs_an_error_that_says_so_and_is_rolled_back() -> None:
    trial = Trial(share=0.5, limit_ms=10.0, seed=2)
    with live(echo("m")) as a, split(a.address, free_address(), trial) as (_, client, _told):
        answers = ask_all(client, 250)
    lost = [answer for answer in answers if answer["type"] == "error"]
    assert {answer["code"] for answer in lost} == {"worker_lost"}
    assert all(answer["retryable"] for answer in lost)
    assert len(lost) == trial.failed["b"] > 0
    assert trial.verdict == ROLLED_BACK
    assert answers[-1]["type"] == "result"


def test_streams_cancels_and_questions_pass() -> None:
    model = echo("m", mode="iteration", fixed_ms=5)
    with live(model) as a, live(model) as b, split(a.address, b.address, Trial(share=0.5)) as (_, client, _told):
        client.send(type="info", id="i")
        assert client.receive()["type"] == "info"
        for number in range(6):
            client.send(type="generate", id=str(number), prompt="a b c", stream=True, params={"max_new_tokens": 5})
            assert client.receive()["type"] == "delta"
            assert client.ending(str(number))["type"] == "result"
            while client._kept:
                client.receive()
        client.send(type="generate", id="x", prompt="a", params={"max_new_tokens": 1000, "ignore_eos": True})
        client.send(type="cancel", id="x")
        assert client.ending("x")["code"] == "cancelled"
        client.send(type="generate", id="y")
        assert client.ending("y")["code"] == "invalid_request"
        assert client.receive()["type"] == "cancel_ack"
        client.send_frames(b"\xc1")
        assert client.receive()["type"] == "error"


def test_a_public_address_is_refused() -> None:
    with pytest.raises(BindError):
        Split("tcp://0.0.0.0:5999", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", Trial(), print)


def trial_of(b_factor: float, fails_b: float = 0.0, **changes: Any) -> Trial:
    rng, trial = random.Random(4), Trial(**{"share": 0.3, "requests_max": 3000, **changes})
    while not trial.over:
        arm = trial.arm()
        took = rng.lognormvariate(3.0, 0.5) * (b_factor if arm == "b" else 1.0)
        trial.observe(arm, took, not (arm == "b" and rng.random() < fails_b))
    return trial


def test_verdicts() -> None:
    assert trial_of(1.5).verdict == ROLLED_BACK
    assert trial_of(0.6).verdict == FASTER
    assert trial_of(1.0).verdict == UNDECIDED
    assert trial_of(1.15, slower_max=1.3).verdict == UNDECIDED
    failing = trial_of(1.0, fails_b=0.2)
    assert failing.verdict == ROLLED_BACK
    assert failing.arm() == "a"
    assert "time of B / A" in failing.words()
    assert Trial().words().endswith("too few to say anything")
