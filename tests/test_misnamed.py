"""Fields that other servers have: refused all the same, with the name that is right here."""

import msgpack
import pytest

from headway.scheduler import misnamed, wire
from headway.scheduler.errors import HeadwayError

FIELDS = {name for kind in wire.ClientMessage.__args__ for name in kind.__struct_fields__}
PARAMS = set(wire.Params.__struct_fields__)


def refusal(**fields: object) -> str:
    """What is said of a message with these fields."""
    with pytest.raises(HeadwayError) as caught:
        wire.decode(msgpack.packb({"type": "generate", "id": "1", "prompt": "Hi", **fields}))
    assert caught.value.code == "invalid_request"
    return caught.value.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"params": {"max_tokens": 5}}, "did you mean params.max_new_tokens?"),
        ({"params": {"maxTokens": 5}}, "did you mean params.max_new_tokens?"),
        ({"params": {"temprature": 5}}, "did you mean params.temperature?"),
        ({"params": {"repeat-penalty": 1.1}}, "did you mean params.repetition_penalty?"),
        ({"params": {"top_logprobs": 5}}, "did you mean params.logprobs?"),
        ({"params": {"stream": True}}, "did you mean stream, beside params?"),
        ({"params": {"n": 2}}, "a request has one answer; send several, with different seeds"),
        ({"temperature": 1}, "did you mean params.temperature?"),
        ({"max_tokens": 5}, "did you mean params.max_new_tokens?"),
        ({"timeout": 5}, "did you mean deadline_ms?"),
        ({"user": "u"}, "did you mean tenant?"),
        ({"response_format": {}}, "no guided decoding"),
        ({"type": "chat"}, "the types are generate, embed, classify, score, call, cancel, ping, info, status"),
    ],
)
def test_the_right_name_is_said(fields: dict[str, object], said: str) -> None:
    assert said in refusal(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"params": {"zzz": 1}}, {"x" * 65: 1}, {"q" * 5_000_000: 1}, {"messages": [{"role": "u", "content": "", "n": 1}]}],
)
def test_where_none_is_near_nothing_is_guessed(fields: dict[str, object]) -> None:
    message = refusal(**fields)
    assert "did you mean" not in message
    assert "several" not in message
    assert len(message) < 1000


def test_every_advice_names_a_field_that_is_there_for_a_name_that_is_not() -> None:
    assert set(misnamed.SAME) <= FIELDS | PARAMS
    others = [*misnamed._PLACES, *misnamed.WORDS]
    assert not set(others) & (FIELDS | PARAMS)
    assert len(set(others)) == len(others)
