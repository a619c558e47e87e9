"""Protocol 1: the document, the vectors and the code say the same, and no bytes whatever do more than be refused."""

import json
import math
import re
import threading
from pathlib import Path
from typing import Any

import msgpack
import msgpack.fallback
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.scheduler import wire
from headway.scheduler.errors import CODES, HeadwayError
from tests.protocol_vectors import CALL_HEAD, TO_CLIENT, TO_SERVER, call, generate, nested, request
from tests.scripted import Message, Reply, Scripted

DOCS = Path(__file__).parent.parent / "docs"
DOCUMENT = (DOCS / "protocol.md").read_text()
ABOUT = (
    "Messages of protocol 1. `hex`: the frame. `decoded`: its value, null if it is no msgpack; what JSON lacks is "
    'written as {"$bytes": hex}, {"$float": "nan" or "inf"}, {"$ext": [code, hex]}, and a map with keys that are not '
    'text as {"$map": [[key, value], ...]}. `outcome`: "ok", or the code and field of the error it is answered with.'
)


# ---------------------------------------------------------------- vectors


def jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: jsonable(item) for key, item in value.items()}
        return {"$map": [[jsonable(key), jsonable(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    if isinstance(value, msgpack.Timestamp):
        return {"$ext": [-1, value.to_bytes().hex()]}
    if isinstance(value, msgpack.ExtType):
        return {"$ext": [value.code, value.data.hex()]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value


def listed() -> list[Message]:
    made = []
    for direction, vectors in (("to_server", TO_SERVER), ("to_client", TO_CLIENT)):
        for name, value, error in vectors:
            body = value if isinstance(value, bytes) else msgpack.packb(value)
            made.append(
                {
                    "name": name,
                    "direction": direction,
                    "hex": body.hex(),
                    "decoded": None if isinstance(value, bytes) else jsonable(value),
                    "outcome": "ok" if error is None else {"code": error[0], "field": error[1]},
                }
            )
    return made


def test_the_vectors_file_is_made_from_the_list(rewrite: bool) -> None:
    lines = ",\n".join(f"    {json.dumps(vector, ensure_ascii=False)}" for vector in listed())
    text = f'{{\n  "protocol": {wire.PROTOCOL},\n  "about": {json.dumps(ABOUT)},\n  "vectors": [\n{lines}\n  ]\n}}\n'
    if rewrite:
        (DOCS / "vectors.json").write_text(text)
    assert (DOCS / "vectors.json").read_text() == text, "run: pytest tests/test_protocol.py --rewrite"


VECTORS: list[Message] = (
    json.loads((DOCS / "vectors.json").read_text())["vectors"] if (DOCS / "vectors.json").exists() else []
)


def outcome(body: bytes) -> Any:
    try:
        wire.decode(body)
    except HeadwayError as error:
        return {"code": error.code, "field": error.field}
    return "ok"


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["direction"] == "to_server"], ids=lambda v: v["name"])
def test_a_message_has_the_outcome_that_is_listed(vector: Message) -> None:
    body = bytes.fromhex(vector["hex"])
    assert outcome(body) == vector["outcome"]
    if vector["outcome"] == "ok":
        message = wire.decode(body)
        again = wire.decode(wire.encode(message))
        assert wire.encode(again) == wire.encode(message)
        assert wire.id_of(body) == message.id


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["direction"] == "to_client"], ids=lambda v: v["name"])
def test_an_answer_is_read_and_written_alike(vector: Message) -> None:
    answer = wire.decode_answer(bytes.fromhex(vector["hex"]))
    written = jsonable(msgpack.unpackb(wire.encode(answer), strict_map_key=False))
    expected = {k: v for k, v in vector["decoded"].items() if k != "later" and (k, v) != ("value", None)}
    assert written == expected


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["decoded"] is not None], ids=lambda v: v["name"])
def test_three_decoders_agree(vector: Message) -> None:
    body = bytes.fromhex(vector["hex"])
    slow = msgpack.fallback.Unpacker(strict_map_key=False)
    slow.feed(body)
    assert jsonable(slow.unpack()) == vector["decoded"]
    assert jsonable(msgpack.unpackb(body, strict_map_key=False)) == vector["decoded"]
    assert msgpack.fallback.Packer().pack(msgpack.unpackb(body, strict_map_key=False)) == body
    if "$ext" not in json.dumps(vector["decoded"]):
        assert jsonable(msgspec.msgpack.decode(body)) == vector["decoded"]


def test_every_type_is_in_the_vectors_and_enough_is_refused() -> None:
    good = {(v["direction"], v["decoded"]["type"]) for v in VECTORS if v["outcome"] == "ok"}
    assert {kind for way, kind in good if way == "to_server"} == tags(wire.ClientMessage)
    assert {kind for way, kind in good if way == "to_client"} == tags(wire.ServerMessage)
    assert sum(v["outcome"] != "ok" for v in VECTORS) >= 25
    assert len({(v["direction"], v["name"]) for v in VECTORS}) == len(VECTORS)


def tags(union: Any) -> set[Any]:
    return {kind.__struct_config__.tag for kind in union.__args__}


# ---------------------------------------------------------------- the document


def rows(heading: str) -> list[list[str]]:
    section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]


def test_the_error_table_is_the_codes() -> None:
    assert rows("Errors") == [
        [name, str(code.http), "yes" if code.retryable else "no", code.meaning] for name, code in CODES.items()
    ]


def test_the_limits_table_is_the_limits() -> None:
    assert {name: int(value) for name, value, _ in rows("Limits")} == wire.LIMITS


def test_every_message_and_field_is_described() -> None:
    structs = [*wire.ClientMessage.__args__, *wire.ServerMessage.__args__, wire.Params, wire.ChatMessage, wire.Usage]
    structs += [wire.Timing, wire.ModelInfo, wire.Partial, wire.Logprobs]
    for struct in structs:
        names = {*struct.__struct_fields__, struct.__struct_config__.tag} - {None}
        missing = {name for name in names if f"`{name}`" not in DOCUMENT}
        assert not missing, f"{struct.__name__}: {missing}"


def test_defaults_are_as_documented() -> None:
    assert wire.decode(msgpack.packb(request(prompt="x"))) == wire.Generate(id="1", prompt="x")
    documented = {row[0]: row[2] for row in rows("Client to server") if len(row) == 4}
    for name in wire.Params.__struct_fields__:
        value = json.dumps(getattr(wire.Params(), name)).replace("null", "nil")
        assert documented[name] == value, name


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_bytes_shown_are_what_they_say() -> None:
    sent, answered = (bytes.fromhex("".join(line[:35] for line in block.splitlines())) for block in blocks("hex"))
    assert sent == msgpack.packb({"type": "generate", "id": "1", "prompt": "Hi"})
    assert f"one frame of {len(sent)} bytes" in DOCUMENT
    assert wire.decode(sent) == wire.Generate(id="1", prompt="Hi")
    assert wire.decode_answer(answered) == wire.Result(id="1", text="!", token_ids=[0])


def run_block(block: str, server: Scripted) -> None:
    """Run an example of the document in this process, against another address."""
    names: dict[str, Any] = {}
    try:
        exec(block.replace("tcp://127.0.0.1:5555", server.endpoint), names)
    finally:
        names["socket"].close(linger=0)


def test_the_minimal_client_works(capsys: pytest.CaptureFixture[str]) -> None:
    block = blocks("python")[0]
    assert len(block.splitlines()) <= 10
    with Scripted() as server:
        run_block(block, server)
    assert capsys.readouterr().out == "Once upon a time\n"


@pytest.mark.parametrize(("pieces", "end"), [(3, "stop"), (30, "cancelled")])
def test_the_streaming_client_works(pieces: int, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    def script(reply: Reply, message: Message) -> None:
        if message["type"] == "cancel":
            reply.send("cancel_ack", found=True)
            reply.error("cancelled")
            return
        for seq in range(pieces):
            reply.send("delta", seq=seq, token_ids=[seq], text="red, ")
        if end == "stop":
            reply.text("red, " * pieces)

    with Scripted(script) as server:
        run_block(blocks("python")[1], server)
    assert capsys.readouterr().out == "red, " * pieces + f"\n {end}\n"
    assert (len(server.of("cancel")) > 0) is (end == "cancelled")


# ---------------------------------------------------------------- limits, at the edge and one past it


@pytest.mark.parametrize(
    ("least", "past", "field"),
    [
        (request(input_ids=[1] * wire.INPUT_IDS_MAX), request(input_ids=[1] * (wire.INPUT_IDS_MAX + 1)), "input_ids"),
        (
            request(messages=[{"role": "u", "content": ""}] * wire.MESSAGES_MAX),
            request(messages=[{"role": "u", "content": ""}] * (wire.MESSAGES_MAX + 1)),
            "messages",
        ),
        (
            generate(logit_bias=dict.fromkeys(range(wire.LOGIT_BIAS_MAX), 1.0)),
            generate(logit_bias=dict.fromkeys(range(wire.LOGIT_BIAS_MAX + 1), 1.0)),
            "params.logit_bias",
        ),
        (generate(stop=["x"] * wire.STOP_MAX), generate(stop=["x"] * (wire.STOP_MAX + 1)), "params.stop"),
        (
            request(prompt="x", priority=-wire.PRIORITY_MAX),
            request(prompt="x", priority=-wire.PRIORITY_MAX - 1),
            "priority",
        ),
        (
            request(messages=[{"role": "r" * 32, "content": ""}]),
            request(messages=[{"role": "r" * 33, "content": ""}]),
            "messages[0].role",
        ),
        (call({"a": nested(15)}), call({"a": nested(16)}), "payload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_limit_holds_at_its_edge(least: Message, past: Message, field: str) -> None:
    assert outcome(msgpack.packb(least)) == "ok"
    assert outcome(msgpack.packb(past)) == {"code": "invalid_request", "field": field}


def test_the_size_of_a_message() -> None:
    room = wire.MESSAGE_BYTES_MAX - len(msgpack.packb(request(prompt="x" * (1 << 16)))) + (1 << 16)
    assert outcome(msgpack.packb(request(prompt="x" * room))) == "ok"
    assert outcome(msgpack.packb(request(prompt="x" * (room + 1)))) == {"code": "too_large", "field": None}


# ---------------------------------------------------------------- hostile bytes


BOMBS = {
    "lists": b"\x91" * 200_000 + b"\x00",
    "maps": b"\x81\xa1a" * 100_000 + b"\x00",
    "keys": b"\x81\x91" * 50_000 + b"\x00" * 50_001,
    "payload of lists": CALL_HEAD + b"\x91" * 200_000 + b"\x00",
    "payload of maps": CALL_HEAD + b"\x81\xa1a" * 100_000 + b"\x00",
    "payload with 300 levels": CALL_HEAD + b"\x91" * 300 + b"\x00",
    "payload that claims 4 Gi items": CALL_HEAD + b"\xdd\xff\xff\xff\xff",
    "payload that claims 4 GiB": CALL_HEAD + b"\xc6\xff\xff\xff\xff",
    "token ids that claim 4 Gi items": msgpack.packb(request(input_ids=0))[:-1] + b"\xdd\xff\xff\xff\xff",
    "stop strings that claim 4 Gi items": msgpack.packb(generate(stop=0))[:-1] + b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("stack_kib", [None, 512])
def test_bombs_are_refused(bomb: bytes, stack_kib: int | None) -> None:
    """Also in a thread with a small stack, where recursion in C would crash first."""
    if stack_kib is None:
        assert outcome(bomb)["code"] == "invalid_request"
        return
    found: list[Any] = []
    before = threading.stack_size(stack_kib << 10)
    try:
        thread = threading.Thread(target=lambda: found.append(outcome(bomb)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found[0]["code"] == "invalid_request"


def test_an_error_never_echoes_much() -> None:
    for message in (request(prompt="x", **{"n" * 5_000_000: 1}), request("t" * 5_000_000)):
        with pytest.raises(HeadwayError) as caught:
            wire.decode(msgpack.packb(message))
        assert len(wire.encode(wire.error_message("1", caught.value))) < 2000


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1, -(1 << 63)])
def test_integers_of_64_bits(value: int) -> None:
    for name in ("priority", "deadline_ms"):
        expected = "ok" if name == "deadline_ms" and value < 0 else {"code": "invalid_request", "field": name}
        assert outcome(msgpack.packb(request(prompt="x", **{name: value}))) == expected
    assert outcome(msgpack.packb(request(prompt="x", v=value))) == {"code": "unsupported_version", "field": "v"}
    assert outcome(msgpack.packb(call(value))) == "ok"


def check(body: bytes) -> None:
    """Whatever the bytes: a message or a HeadwayError that can itself be sent."""
    refusal = None
    try:
        wire.encode(wire.decode(body))
    except HeadwayError as error:
        refusal = wire.error_message(wire.id_of(body), error)
    if refusal is not None:
        assert refusal.message
        assert wire.decode_answer(wire.encode(refusal)) == refusal


BODIES = [bytes.fromhex(vector["hex"]) for vector in listed() if vector["direction"] == "to_server"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=12,
)
FIELDS = sorted({name for kind in wire.ClientMessage.__args__ for name in kind.__struct_fields__})
QUICK = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.binary(max_size=200))
def test_random_bytes(body: bytes) -> None:
    check(body)
    check(CALL_HEAD + body)


@QUICK
@given(st.sampled_from(BODIES), st.integers(0, 1 << 16), st.integers(0, 255), st.integers(0, 64))
def test_damaged_messages(body: bytes, at: int, byte: int, cut: int) -> None:
    if body:
        at %= len(body)
        check(body[:at] + bytes([byte]) + body[at + 1 :])
        check(body[:at] + body[at + cut :])
        check(body[:at])


@QUICK
@given(
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), VALUES, max_size=5),
    st.sampled_from(sorted(tags(wire.ClientMessage))),
)
def test_random_fields(fields: Message, kind: str) -> None:
    check(msgpack.packb({"type": kind, "id": "1", **fields}))
