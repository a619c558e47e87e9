"""The echo engine and the one-shot engine under it: what goes in comes out, and declared faults happen as declared."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic
import pytest

from headway.scheduler.errors import HeadwayError
from headway.scheduler.link import Card, Failed, Item, Outcome, Step, pack_ids
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params
from headway.workers.echo import EMBEDDING_SIZE, embedding_of, make_engine
from headway.workers.engine import Engine, Report
from headway.workers.oneshot import OneShot, code_of


def engine(**options: Any) -> Engine:
    return make_engine(ModelSpec(name="e", engine="echo", options=options))


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def value(outcome: Outcome) -> object:
    return msgspec.msgpack.decode(outcome.value)


def calls(*payloads: object) -> list[Item]:
    return [Item(rid, payload=raw(payload)) for rid, payload in enumerate(payloads)]


def texts(*prompts: str, **params: Any) -> list[Item]:
    return [Item(rid, pack_ids([*prompt.encode()]), params=Params(**params)) for rid, prompt in enumerate(prompts)]


def only(reports: Sequence[Report]) -> Any:
    assert len(reports) == 1
    return reports[0]


def spoken(engine: Engine) -> tuple[dict[int, bytes], dict[int, str]]:
    """Step until idle: each request's bytes, and its one ending."""
    said: dict[int, bytes] = {}
    ends: dict[int, str] = {}
    while engine.busy:
        for report in engine.step():
            assert isinstance(report, Step)
            for row in report.rows:
                assert row.rid not in ends, "nothing after an ending"
                said[row.rid] = said.get(row.rid, b"") + bytes(row.tokens)
                if row.finish:
                    ends[row.rid] = row.finish
    return said, ends


# ---------------------------------------------------------------- call, embed


def test_a_call_comes_back_unchanged_and_batches_keep_their_order() -> None:
    e = engine()
    assert (e.card.kind, e.card.mode, e.card.tokenizer) == ("call", "oneshot", None)
    e.add(7, calls({"a": [1, None, b"x"]}, 3))
    e.add(8, calls("later"))
    first, second = only(e.step()), only(e.step())
    assert (first.batch, second.batch, e.busy, e.step()) == (7, 8, False, [])
    assert [(o.rid, value(o)) for o in first.outcomes] == [(0, {"a": [1, None, b"x"]}), (1, 3)]


def test_an_embedding_depends_on_the_ids_and_on_nothing_else() -> None:
    e = engine(kind="embed")
    e.add(1, texts("one", "two", "one"))
    a, b, c = (array("f", o.embedding) for o in only(e.step()).outcomes)
    assert a == c != b
    assert len(a) == EMBEDDING_SIZE
    assert sum(x * x for x in a) == pytest.approx(1)
    assert embedding_of([]) == bytes(4 * EMBEDDING_SIZE)


def test_costs_are_declared_and_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    e = engine(kind="embed", fixed_ms=2, per_token_ms=0.5, per_request_ms=1, load_ms=30)
    assert e.card.prior_ns == (2e6, 5e5, 1e6)
    e.add(1, texts("1234", "12"))
    assert only(e.step()).tokens == 6
    assert slept == [0.030, 0.007]
    free = engine()
    free.add(1, calls(1))
    free.step()
    assert len(slept) == 2, "no cost: no sleep at all"


def test_what_was_cancelled_before_its_batch_began_is_not_run() -> None:
    ran: list[int] = []

    def run(items: Sequence[Item]) -> list[Outcome]:
        ran.extend(item.rid for item in items)
        return [Outcome(item.rid) for item in items]

    e = OneShot(Card("x", "call", "oneshot", 8, 8, 8), run)
    e.add(1, calls(0, 1, 2))
    e.cancel(1, [1, 99])
    e.cancel(5, [0])
    assert {o.rid: o.code for o in only(e.step()).outcomes} == {0: "", 2: "", 1: "cancelled"}
    e.add(2, calls(0))
    e.cancel(2, [0])
    assert only(e.step()).outcomes[0].code == "cancelled"
    assert ran == [0, 2]


# ---------------------------------------------------------------- faults of a batch


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_one_bad_request_is_one_error_wherever_it_stands(bad: int) -> None:
    e = engine(fail_on="boom")
    e.add(1, calls(*("boom" if i == bad else i for i in range(8))))
    outcomes = only(e.step()).outcomes
    assert [o.rid for o in outcomes] == list(range(8))
    assert [o.code for o in outcomes] == ["engine_error" if i == bad else "" for i in range(8)]
    assert outcomes[bad].message == "RuntimeError: the request holds 'boom'"


def test_each_nth_request_fails() -> None:
    e = engine(fail_every=3)
    e.add(1, calls(*range(4)))
    e.add(2, calls(*range(4)))
    assert [[bool(o.code) for o in only(e.step()).outcomes] for _ in range(2)] == [[0, 0, 1, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"short_results": True}, "engine_error", "the engine returned 7 results for 8 inputs"),
        ({"fail_batch_on": "5"}, "engine_error", "RuntimeError: a request of this batch holds '5'"),
    ],
)
def test_a_batch_that_fails_as_a_whole(options: dict[str, Any], code: str, message: str) -> None:
    e = engine(**options)
    e.add(1, calls(*range(8)))
    failed = only(e.step())
    assert isinstance(failed, Failed)
    assert (failed.batch, failed.code, failed.message, failed.rids) == (1, code, message, [])
    assert not e.busy


def test_results_that_belong_to_others_are_an_error_not_a_shift() -> None:
    e = OneShot(Card("x", "call", "oneshot", 8, 8, 8), lambda items: [Outcome(item.rid) for item in items[::-1]])
    e.add(1, calls(0, 1))
    assert only(e.step()).message == "the engine answered request 1 in place of 0"


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "out_of_memory"),
        (OutOfMemoryError("CUDA"), "out_of_memory"),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("shapes differ"), "engine_error"),
        (HeadwayError("invalid_request", "no"), "invalid_request"),
        (HeadwayError("mine", "no"), "engine_error"),
    ],
)
def test_an_exception_has_a_code(error: BaseException, code: str) -> None:
    assert code_of(error) == code


def test_a_very_long_error_is_cut() -> None:
    def run(_items: Sequence[Item]) -> list[Outcome]:
        raise ValueError("x" * 10_000)

    e = OneShot(Card("x", "call", "oneshot", 8, 8, 8), run)
    e.add(1, calls(0))
    assert len(only(e.step()).message) < 2100


# ---------------------------------------------------------------- generate


def test_a_prompt_comes_back_one_byte_a_step() -> None:
    e = engine(mode="iteration")
    assert (e.card.kind, e.card.mode, e.card.vocab_size) == ("generate", "iteration", 256)
    e.add(1, texts("héllo", "ab", ""))
    first = only(e.step())
    assert (first.running, first.tokens) == (3, 9)  # prompts, and one for the empty one
    assert [(row.rid, row.tokens, row.finish) for row in first.rows] == [(0, [104], ""), (1, [97], ""), (2, [], "stop")]
    assert only(e.step()).tokens == 2
    said, ends = spoken(e)
    assert (said, ends) == ({0: "héllo".encode()[2:]}, {0: "stop"})


@pytest.mark.parametrize(
    ("params", "said", "end"),
    [
        ({"max_new_tokens": 3}, b"abc", "length"),
        ({"max_new_tokens": 6}, b"abcdef", "stop"),
        ({"stop_token_ids": [ord("d")]}, b"abcd", "stop"),
    ],
)
def test_endings(params: dict[str, Any], said: bytes, end: str) -> None:
    e = engine(mode="iteration")
    e.add(1, texts("abcdef", **params))
    assert spoken(e) == ({0: said}, {0: end})


def test_a_request_continues_after_what_was_said_elsewhere() -> None:
    e = engine(mode="iteration")
    begun = Item(4, pack_ids([*b"abcdef"]), done=pack_ids([*b"abc"]), params=Params(max_new_tokens=5))
    e.add(1, [begun, Item(5, pack_ids([*b"ab"]), done=pack_ids([*b"ab"]))])
    assert spoken(e) == ({4: b"de", 5: b""}, {4: "length", 5: "stop"})


def test_a_script_replaces_the_prompt() -> None:
    e = engine(mode="iteration", script=[1, 2, 3])
    e.add(1, texts("whatever"))
    assert spoken(e)[0] == {0: b"\x01\x02\x03"}


def test_dropped_requests_end_and_others_go_on() -> None:
    e = engine(mode="iteration")
    e.add(1, texts("abc", "def"))
    e.step()
    e.cancel(1, [1, 44])
    e.cancel(2, [0])
    said, ends = spoken(e)
    assert said == {0: b"bc", 1: b""}
    assert ends == {0: "stop", 1: "dropped"}


def test_the_same_id_in_two_batches_is_two_requests() -> None:
    e = engine(mode="iteration")
    e.add(1, texts("ab"))
    e.add(2, texts("xyz"))
    e.cancel(1, [0])
    rows = [(row.batch, row.tokens, row.finish) for row in only(e.step()).rows]
    assert rows == [(1, [], "dropped"), (2, [120], "")]


def test_faults_of_a_stream() -> None:
    e = engine(mode="iteration", fail_on="boom", oom_above=2)
    e.add(1, texts("abc"))
    e.step()
    e.add(2, texts("x", "y"))
    failed, step = e.step()
    assert isinstance(failed, Failed)
    assert isinstance(step, Step)
    assert (failed.batch, failed.code, failed.rids) == (2, "out_of_memory", [0, 1])
    assert [(row.batch, row.tokens) for row in step.rows] == [(1, [98])]
    e.add(3, texts("big boom"))
    (step,) = e.step()
    assert isinstance(step, Step)
    assert [(row.batch, row.finish, row.code) for row in step.rows] == [(1, "stop", ""), (3, "error", "engine_error")]
    assert not e.busy


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options", [{"speed": 1}, {"fixed_ms": -1}, {"mode": "iteration", "kind": "call"}, {"kind": "generate"}]
)
def test_wrong_options_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        engine(**options)
