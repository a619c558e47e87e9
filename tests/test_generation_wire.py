"""What the parameters of a generate request do on the way from wire to engine and back, with an echo for a model."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from headway.scheduler import link, wire
from headway.scheduler.flight import Flight
from headway.scheduler.text import TextPlane
from tests.live import Live, Raw, echo, live

BYTES = TextPlane(link.Tokenizer("bytes"))
TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(echo("stream", mode="iteration", max_input_tokens=99)) as running:
        yield running


def ask(server: Live, prompt: str = TEXT, stream: bool = False, **params: Any) -> dict[str, Any]:
    return server.client().ask(type="generate", id="1", prompt=prompt, stream=stream, params=params)


def streamed(client: Raw) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    deltas = []
    while (message := client.receive())["type"] == "delta":
        deltas.append(message)
    return deltas, message


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize("params", [{}, {"stop": ["fox"]}, {"stop": ["ick b"]}, {"max_new_tokens": 3}])
def test_logprobs_go_with_the_tokens(server: Live, params: dict[str, Any]) -> None:
    client = server.client()
    client.send(type="generate", id="1", prompt="🙂 " + TEXT, stream=True, params={"logprobs": 2, **params})
    deltas, result = streamed(client)
    tokens = result["token_ids"]
    assert result["logprobs"] == {
        "chosen": [0.0] * len(tokens),
        "top_ids": [[token] for token in tokens],  # an echo knows of no other
        "top": [[0.0]] * len(tokens),
    }
    for name in ("chosen", "top_ids", "top"):
        assert [one for delta in deltas for one in delta["logprobs"][name]] == result["logprobs"][name]
    assert all(len(delta["logprobs"]["chosen"]) == len(delta["token_ids"]) for delta in deltas)


def test_logprobs_of_the_chosen_tokens_only_and_none_unasked(server: Live) -> None:
    assert ask(server, "ab", logprobs=0)["logprobs"] == {"chosen": [0.0, 0.0]}
    assert "logprobs" not in ask(server, "ab")
    assert "logprobs" not in ask(server, "ab", logprobs=None)


def flight(stream: bool = False, **params: Any) -> tuple[Flight, list[Any]]:
    said: list[Any] = []
    message = wire.Generate(id="1", prompt="", params=wire.Params(**params), stream=stream)
    made = Flight(1, 1, message, said.append, 0)
    made.kind = "generate"
    made.speak(BYTES, message.params)
    return made, said


def row(text: str, first: float = 0.0) -> link.Row:
    """A row of several tokens, each with two alternatives."""
    ids = [*text.encode()]
    own = [first - at for at in range(len(ids))]
    top = [value for one in own for value in (one, one - 0.5)]
    return link.Row(1, 1, ids, logprobs=link.pack_logprobs(own, [token for i in ids for token in (i, i + 1)], top))


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_end_with_the_token_that_completes_a_stop_string(stream: bool) -> None:
    subject, said = flight(stream, stop=["cd"], logprobs=2)
    assert not subject.push(row("ab"), 1)
    assert subject.push(row("cdef", -2.0), 2)
    assert subject.push(row("gh", -6.0), 3) is False  # late, and after the end
    subject.finish("stop", None, 4)
    result = said[-1]
    assert (result.text, bytes(result.token_ids)) == ("ab", b"abcd")
    assert result.logprobs.chosen == [0.0, -1.0, -2.0, -3.0]
    assert result.logprobs.top_ids == [[97, 98], [98, 99], [99, 100], [100, 101]]
    assert result.logprobs.top[3] == [-3.0, -3.5]
    if stream:
        deltas = said[:-1]
        assert "".join(delta.text for delta in deltas) == "ab"
        assert [value for delta in deltas for value in delta.logprobs.chosen] == result.logprobs.chosen


def test_rows_without_the_logprobs_that_were_asked_for_are_refused() -> None:
    subject, _ = flight(logprobs=0)
    with pytest.raises(ValueError, match="no logprobs"):
        subject.push(link.Row(1, 1, [97]), 1)
    with pytest.raises(ValueError, match="12 bytes are no logprobs of 2 tokens"):
        subject.push(link.Row(1, 1, [97, 98], logprobs=b"x" * 12), 1)


@pytest.mark.parametrize("width", [0, 1, 20])
@pytest.mark.parametrize("tokens", [1, 3])
def test_packed_logprobs_come_back(tokens: int, width: int) -> None:
    chosen = [-0.5 * at for at in range(tokens)]
    ids = [[place * 100 + at for at in range(width)] for place in range(tokens)]
    top = [[-0.25 * at for at in range(width)] for _ in range(tokens)]
    body = link.pack_logprobs(chosen, chain(*ids), chain(*top))
    assert link.unpack_logprobs(body, tokens) == (chosen, ids, top)
    for wrong in (body[:-1], body + b"xxxx", b""):
        with pytest.raises(ValueError, match="are no logprobs"):
            link.unpack_logprobs(wrong, tokens)


# ---------------------------------------------------------------- the least number of tokens


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"stop": ["b"]}, "a"),
        ({"stop": ["b"], "min_tokens": 1}, "a"),
        ({"stop": ["b"], "min_tokens": 2}, "abca"),  # the second b
        ({"stop": ["bc"], "min_tokens": 2}, "abca"),  # the first begins too early
        ({"stop": ["ca"], "min_tokens": 2}, "ab"),
        ({"stop": ["b"], "min_tokens": 5}, "abcabc🙂"),
        ({"stop": ["🙂"], "min_tokens": 6}, "abcabc"),
        ({"stop": ["🙂"], "min_tokens": 8}, "abcabc"),  # its text comes with its last byte
        ({"stop": ["🙂"], "min_tokens": 10}, "abcabc🙂"),
        ({"stop_token_ids": [98]}, "ab"),
        ({"stop_token_ids": [98], "min_tokens": 1}, "ab"),
        ({"stop_token_ids": [98], "min_tokens": 2}, "abcab"),
        ({"stop_token_ids": [98], "stop": ["c"], "min_tokens": 4}, "abcab"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_ends_an_answer_too_early(server: Live, params: dict[str, Any], text: str, stream: bool) -> None:
    client = server.client()
    client.send(type="generate", id="1", prompt="abcabc🙂", stream=stream, params=params)
    deltas, result = streamed(client)
    assert (result["text"], result["finish_reason"]) == (text, "stop")
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) > params.get("min_tokens", 0) - 1
    if stream:
        assert "".join(delta["text"] for delta in deltas) == text


# ---------------------------------------------------------------- what the model's limits refuse


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"stop_token_ids": [1, 256]}, "params.stop_token_ids", "names token 256; the model's vocabulary has 256"),
        ({"logit_bias": {9: 1.0, 300: 1.0}}, "params.logit_bias", "names token 300; the model's vocabulary has 256"),
        ({"min_tokens": 5, "max_new_tokens": 4}, "params.min_tokens", "is 5; the limit is max_new_tokens, 4"),
    ],
)
def test_a_refusal_names_the_field_and_the_limit(server: Live, params: dict[str, Any], field: str, words: str) -> None:
    error = ask(server, **params)
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert words in error["message"]
    assert ask(server)["text"] == TEXT


# ---------------------------------------------------------------- counting


def test_every_request_is_counted_once_and_so_is_every_first_token() -> None:
    """Finished, failed, cancelled before and after its first token, too late: the books agree with what was told."""
    with live(echo("stream", mode="iteration", fixed_ms=1, fail_on="bad", max_num_seqs=1)) as server:
        client = server.client()

        def send(name: str, text: str, **fields: Any) -> None:
            client.send(type="generate", id=name, prompt=text, **fields)

        send("long", "x" * 90_000, stream=True, params={"max_new_tokens": 90_000})
        assert client.receive()["type"] == "delta"  # it runs, and nobody else can
        for at in range(3):
            send(f"waiting {at}", "never begun")
            client.send(type="cancel", id=f"waiting {at}")
            assert client.ending(f"waiting {at}")["code"] == "cancelled"
            send(f"late {at}", "x", deadline_ms=0)
            assert client.ending(f"late {at}")["code"] == "deadline_exceeded"
        send("held", "x", deadline_ms=30)
        assert client.ending("held")["code"] in ("deadline_exceeded", "deadline_unreachable")
        client.send(type="cancel", id="long")
        partial = client.ending("long")["partial"]
        assert 0 < len(partial["token_ids"]) < 90_000
        for at in range(12):
            send(f"good {at}", "abc", params={"min_tokens": at % 4, "stop": ["b"]})
        for at in range(3):
            send(f"bad {at}", "bad")
            assert client.ending(f"bad {at}")["code"] == "engine_error"
        for at in range(12):
            usage = client.ending(f"good {at}")["usage"]
            assert usage == {"prompt_tokens": 3, "completion_tokens": 2 if at % 4 < 2 else 3}
        counters = client.status()["counters"]
    told = {name: count for name, count in counters.items() if name.startswith(("ended.", "refused."))}
    assert sum(told.values()) == 1 + 3 + 3 + 1 + 12 + 3
    assert told["ended.ok"] == 12
    assert told["ended.engine_error"] == 3
    assert told["ended.cancelled"] == 4
    assert counters["first_tokens"] == 12 + 1
