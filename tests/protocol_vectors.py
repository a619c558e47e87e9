"""The messages of docs/vectors.json in Python: name, what is sent (a value, or bytes as they are), what comes of it.

`tests/test_protocol.py --rewrite` packs them with the independent msgpack package and writes the file.
"""

import math
from typing import Any

import msgpack

Vector = tuple[str, Any, tuple[str, str | None] | None]  # None: it is valid

ID = {"id": "1"}
INVALID = "invalid_request"
STAMP = msgpack.Timestamp(1)


def request(kind: str = "generate", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": "1", **fields}


def generate(**params: Any) -> dict[str, Any]:
    return request(prompt="Hi", params=params)


def call(payload: Any) -> dict[str, Any]:
    return request("call", payload=payload)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CALL_HEAD = msgpack.packb(call(0))[:-1]  # all but the payload

TO_SERVER: list[Vector] = [
    ("generate, the least", request(prompt="Hi"), None),
    ("generate, version named", request(prompt="Hi", v=1), None),
    ("generate, empty prompt", request(prompt=""), None),
    (
        "generate, every field",
        {
            "type": "generate",
            "v": 1,
            "id": "a",
            "model": "m",
            "tenant": "t",
            "priority": -10,
            "deadline_ms": 86_400_000,
            "accepted": True,
            "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Grüße 🙂"}],
            "params": {
                "max_new_tokens": 131_072,
                "min_tokens": 131_072,
                "temperature": 0.7,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "presence_penalty": -2.0,
                "frequency_penalty": 2.0,
                "seed": (1 << 63) - 1,
                "stop": ["\n\n", "x" * 256],
                "stop_token_ids": [0, 2_147_483_647],
                "ignore_eos": True,
                "logit_bias": {50256: -100.0, 1: 5},
                "logprobs": 20,
            },
            "stream": True,
        },
        None,
    ),
    ("generate, token ids", request(input_ids=[0, 1, 2_147_483_647]), None),
    ("generate, nil for not given", request(prompt="Hi", messages=None, input_ids=None, model=None), None),
    ("generate, no time left", request(prompt="Hi", deadline_ms=-1), None),
    ("generate, an integer where a float is wanted", generate(temperature=1), None),
    (
        "generate, parameters that change nothing",
        generate(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, min_tokens=0, presence_penalty=0),
        None,
    ),
    (
        "generate, nil for parameters that are left out",
        generate(temperature=None, top_k=None, top_p=None, min_p=None, repetition_penalty=None, logprobs=None),
        None,
    ),
    ("generate, logprobs of the chosen tokens only", generate(logprobs=0), None),
    ("an id with NUL and emoji", {"type": "generate", "id": "\x00🙂", "prompt": "Hi"}, None),
    ("an id of 128 characters", {"type": "generate", "id": "é" * 128, "prompt": "Hi"}, None),
    ("embed, text", request("embed", text="Hi"), None),
    ("embed, token ids", request("embed", input_ids=[7]), None),
    ("embed, cut if need be, with a prompt", request("embed", text="Hi", truncate=True, prompt_name="query"), None),
    ("classify", request("classify", text="Hi", priority=10, truncate=False), None),
    ("score", request("score", text="q", text_pair="a"), None),
    ("score, cut if need be", request("score", text="q", text_pair="a", truncate=True), None),
    ("call, nil", call(None), None),
    ("call, a small integer", call(5), None),
    ("call, all kinds of values", call({"a": [True, -(1 << 63), (1 << 64) - 1, 0.5, b"\x00", None], 7: {}}), None),
    ("call, not a number", call({"x": math.nan, "y": math.inf}), None),
    ("call, nested 16 deep", call(nested(16)), None),
    ("call, with its size", request("call", payload="x", tokens=1 << 20), None),
    ("cancel", {"type": "cancel", "id": "1"}, None),
    ("ping", {"type": "ping"}, None),
    ("ping, with an id", {"type": "ping", "id": "p"}, None),
    ("info", {"type": "info"}, None),
    ("status", {"type": "status", "batches": 256}, None),
    # ------------------------------------------------------------ refused
    ("no bytes", b"", (INVALID, None)),
    ("a list", [1], (INVALID, None)),
    ("nil", None, (INVALID, None)),
    ("an integer", 7, (INVALID, None)),
    ("keys that are not text", {1: 2}, (INVALID, None)),
    ("bytes after the map", msgpack.packb({"type": "ping"}) + b"\x00", (INVALID, None)),
    ("a map cut short", msgpack.packb({"type": "ping"})[:-1], (INVALID, None)),
    ("the byte that msgpack never uses", b"\xc1", (INVALID, None)),
    ("a map that claims four billion entries", b"\xdf\xff\xff\xff\xff", (INVALID, None)),
    ("text that is not UTF-8", b"\x82\xa4type\xa4ping\xa2id\xa1\xff", (INVALID, None)),
    ("no type", {"id": "1"}, (INVALID, "type")),
    ("an unknown type", request("complete"), (INVALID, "type")),
    ("a type that is no text", {"type": 1, "id": "1"}, (INVALID, "type")),
    ("an unknown field", request(prompt="Hi", max_tokens=5), (INVALID, "max_tokens")),
    ("an unknown parameter", generate(typical_p=0.9), (INVALID, "params.typical_p")),
    ("a parameter under another's name for it", generate(max_tokens=9), (INVALID, "params.max_tokens")),
    ("several answers", generate(n=2), (INVALID, "params.n")),
    ("a parameter beside params", request(prompt="Hi", temperature=0.5), (INVALID, "temperature")),
    ("another version", request(prompt="Hi", v=2), ("unsupported_version", "v")),
    ("another version with fields unknown here", request(v=2, thought="x"), ("unsupported_version", "v")),
    ("another version of an unknown type", {"type": "think", "v": 9}, ("unsupported_version", "v")),
    ("a version that is no integer", request(prompt="Hi", v="1"), (INVALID, "v")),
    ("no id", {"type": "generate", "prompt": "Hi"}, (INVALID, "id")),
    ("an empty id", {"type": "generate", "id": "", "prompt": "Hi"}, (INVALID, "id")),
    ("an id of 129 characters", {"type": "generate", "id": "a" * 129, "prompt": "Hi"}, (INVALID, "id")),
    ("an id that is no text", {"type": "generate", "id": 1, "prompt": "Hi"}, (INVALID, "id")),
    ("cancel without an id", {"type": "cancel"}, (INVALID, "id")),
    ("nothing to continue", request(), (INVALID, "prompt")),
    ("two things to continue", request(prompt="Hi", input_ids=[1]), (INVALID, "prompt")),
    ("embed, nothing", request("embed"), (INVALID, "text")),
    ("score, half a pair", request("score", text="q"), (INVALID, "text_pair")),
    ("a prompt of 129 characters", request("embed", text="a", prompt_name="p" * 129), (INVALID, "prompt_name")),
    ("a wish to cut that is no bool", request("embed", text="a", truncate=1), (INVALID, "truncate")),
    ("a prompt of bytes", request(prompt=b"Hi"), (INVALID, "prompt")),
    ("a prompt that is a timestamp", request(prompt=STAMP), (INVALID, "prompt")),
    ("no token ids", request(input_ids=[]), (INVALID, "input_ids")),
    ("a negative token id", request(input_ids=[1, -1]), (INVALID, "input_ids[1]")),
    ("a token id past 31 bits", request(input_ids=[1 << 31]), (INVALID, "input_ids[0]")),
    ("a token id that is a float", request(input_ids=[1.0]), (INVALID, "input_ids[0]")),
    ("no turns", request(messages=[]), (INVALID, "messages")),
    ("a turn without content", request(messages=[{"role": "user"}]), (INVALID, "messages[0].content")),
    ("a turn with a name", request(messages=[{"role": "u", "content": "", "name": ""}]), (INVALID, "messages[0].name")),
    ("an empty role", request(messages=[{"role": "", "content": ""}]), (INVALID, "messages[0].role")),
    ("a priority of 11", request(prompt="Hi", priority=11), (INVALID, "priority")),
    ("a deadline of more than a day", request(prompt="Hi", deadline_ms=86_400_001), (INVALID, "deadline_ms")),
    ("a deadline that is a float", request(prompt="Hi", deadline_ms=5.0), (INVALID, "deadline_ms")),
    ("an empty model name", request(prompt="Hi", model=""), (INVALID, "model")),
    ("a tenant of 129 characters", request(prompt="Hi", tenant="t" * 129), (INVALID, "tenant")),
    ("no new tokens", generate(max_new_tokens=0), (INVALID, "params.max_new_tokens")),
    ("too many new tokens", generate(max_new_tokens=131_073), (INVALID, "params.max_new_tokens")),
    ("a temperature that is not a number", generate(temperature=math.nan), (INVALID, "params.temperature")),
    ("an infinite temperature", generate(temperature=math.inf), (INVALID, "params.temperature")),
    ("a negative temperature", generate(temperature=-0.1), (INVALID, "params.temperature")),
    ("top_p of 0", generate(top_p=0.0), (INVALID, "params.top_p")),
    ("top_p that is not a number", generate(top_p=math.nan), (INVALID, "params.top_p")),
    ("a negative top_k", generate(top_k=-1), (INVALID, "params.top_k")),
    ("more tokens at least than at most", generate(min_tokens=9, max_new_tokens=8), (INVALID, "params.min_tokens")),
    ("more tokens at least than the default", generate(min_tokens=257), (INVALID, "params.min_tokens")),
    ("a negative number of tokens", generate(min_tokens=-1), (INVALID, "params.min_tokens")),
    ("top_k that is a float", generate(top_k=40.0), (INVALID, "params.top_k")),
    ("a temperature of 11", generate(temperature=11), (INVALID, "params.temperature")),
    ("a temperature that is text", generate(temperature="1"), (INVALID, "params.temperature")),
    ("top_p past 1", generate(top_p=1.5), (INVALID, "params.top_p")),
    ("a negative min_p", generate(min_p=-0.1), (INVALID, "params.min_p")),
    ("min_p past 1", generate(min_p=1.1), (INVALID, "params.min_p")),
    ("min_p that is not a number", generate(min_p=math.nan), (INVALID, "params.min_p")),
    ("a repetition penalty of 0", generate(repetition_penalty=0), (INVALID, "params.repetition_penalty")),
    ("a negative repetition penalty", generate(repetition_penalty=-1.0), (INVALID, "params.repetition_penalty")),
    ("an infinite repetition penalty", generate(repetition_penalty=math.inf), (INVALID, "params.repetition_penalty")),
    ("no number for a penalty", generate(repetition_penalty=math.nan), (INVALID, "params.repetition_penalty")),
    ("a presence penalty past 2", generate(presence_penalty=2.1), (INVALID, "params.presence_penalty")),
    ("a presence penalty of nil", generate(presence_penalty=None), (INVALID, "params.presence_penalty")),
    ("a frequency penalty under -2", generate(frequency_penalty=-2.1), (INVALID, "params.frequency_penalty")),
    ("an infinite frequency penalty", generate(frequency_penalty=-math.inf), (INVALID, "params.frequency_penalty")),
    ("logprobs of 21 tokens", generate(logprobs=21), (INVALID, "params.logprobs")),
    ("logprobs of fewer than none", generate(logprobs=-1), (INVALID, "params.logprobs")),
    ("logprobs as yes or no", generate(logprobs=True), (INVALID, "params.logprobs")),
    ("a negative seed", generate(seed=-1), (INVALID, "params.seed")),
    ("a seed past 63 bits", generate(seed=1 << 63), (INVALID, "params.seed")),
    ("an empty stop string", generate(stop=[""]), (INVALID, "params.stop[0]")),
    ("a stop string of 257 characters", generate(stop=["x" * 257]), (INVALID, "params.stop[0]")),
    ("17 stop strings", generate(stop=["x"] * 17), (INVALID, "params.stop")),
    ("a stop string that is not in a list", generate(stop="x"), (INVALID, "params.stop")),
    ("a bias for a token named by text", generate(logit_bias={"5": 1.0}), (INVALID, "params.logit_bias")),
    ("a bias that is not a number", generate(logit_bias={5: math.nan}), (INVALID, "params.logit_bias[...]")),
    ("a bias past 1000", generate(logit_bias={5: 1000.5}), (INVALID, "params.logit_bias[...]")),
    ("call without a payload", request("call"), (INVALID, "payload")),
    ("a payload nested 17 deep", call(nested(17)), (INVALID, "payload")),
    ("a payload with an extension type", call({"x": msgpack.ExtType(5, b"x")}), (INVALID, "payload")),
    ("a payload with a timestamp", call([STAMP]), (INVALID, "payload")),
    ("a payload with a key that is nil", call({None: 1}), (INVALID, "payload")),
    ("a payload with a key that is bytes", call({b"k": 1}), (INVALID, "payload")),
    ("a payload with a key that is a list", CALL_HEAD + b"\x81\x91\x01\x02", (INVALID, "payload")),
    ("a payload with text that is not UTF-8", CALL_HEAD + b"\xa1\xff", (INVALID, "payload")),
    ("a payload cut short", CALL_HEAD + b"\x92\x01", (INVALID, None)),
    ("a negative size", request("call", payload=1, tokens=-1), (INVALID, "tokens")),
    ("257 batches", {"type": "status", "batches": 257}, (INVALID, "batches")),
]

TIMING = {"queue_ms": 1.5, "total_ms": 20.25, "ttft_ms": 4.0, "batch_size": 8}
MODEL = {
    "name": "smollm2",
    "kind": "generate",
    "workers": 2,
    "concurrency": 44,
    "max_batch": 32,
    "max_input_tokens": 8192,
    "context_tokens": 8192,
    "bypass_tokens": 1024,
    "tokenizer": True,
    "facts": {"device": "cpu"},
    "window": {"name": "adaptive", "window_ms": 1.5, "longest_ms": 8.0, "intervals": 128, "censored": 3},
}

TO_CLIENT: list[Vector] = [
    ("accepted", {"type": "accepted", **ID}, None),
    ("delta", {"type": "delta", **ID, "seq": 0, "token_ids": [5], "text": "H"}, None),
    ("delta, half a character", {"type": "delta", **ID, "seq": 1, "token_ids": [6], "text": ""}, None),
    (
        "result of generate",
        {
            "type": "result",
            **ID,
            "text": "Hi",
            "token_ids": [5, 6],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
            "timing": TIMING,
            "model": "smollm2",
        },
        None,
    ),
    (
        "delta with logprobs",
        {
            "type": "delta",
            **ID,
            "seq": 0,
            "token_ids": [5],
            "text": "H",
            "logprobs": {"chosen": [-0.5], "top_ids": [[5, 9]], "top": [[-0.5, -1.25]]},
        },
        None,
    ),
    (
        "result with logprobs of the chosen tokens only",
        {
            "type": "result",
            **ID,
            "text": "Hi",
            "token_ids": [5, 6],
            "finish_reason": "length",
            "logprobs": {"chosen": [-0.5, 0.0]},
        },
        None,
    ),
    ("result of embed", {"type": "result", **ID, "embedding": [0.5, -0.5], "usage": {"prompt_tokens": 3}}, None),
    (
        "result of embed, of a text that was cut",
        {"type": "result", **ID, "embedding": [1.0], "usage": {"prompt_tokens": 256, "truncated": True}},
        None,
    ),
    ("result of classify", {"type": "result", **ID, "scores": {"neg": 0.25, "pos": 0.75}}, None),
    ("result of score", {"type": "result", **ID, "scores": {"score": 0.75}}, None),
    ("result of call", {"type": "result", **ID, "value": {"top": [[1, 0.5]], 7: b"\x00"}}, None),
    ("result of call, nil", {"type": "result", **ID, "value": None}, None),
    (
        "error",
        {
            "type": "error",
            **ID,
            "code": "queue_full",
            "message": "8192 requests wait already; try again in 250 ms",
            "retryable": True,
            "http": 429,
            "retry_after_ms": 250,
        },
        None,
    ),
    (
        "error with a partial answer",
        {
            "type": "error",
            **ID,
            "code": "cancelled",
            "message": "cancelled by the client",
            "retryable": False,
            "http": 499,
            "partial": {"text": "H", "token_ids": [5]},
        },
        None,
    ),
    (
        "error for a message without an id",
        {
            "type": "error",
            "id": None,
            "code": INVALID,
            "message": "type: Object missing required field `type`",
            "retryable": False,
            "http": 400,
            "field": "type",
        },
        None,
    ),
    ("cancel_ack", {"type": "cancel_ack", **ID, "found": True}, None),
    ("pong", {"type": "pong", "id": None}, None),
    (
        "info",
        {
            "type": "info",
            "id": "i",
            "protocol": 1,
            "server": "headway 0.1.0",
            "models": [MODEL],
            "limits": {"id_chars_max": 128},
            "state": "serving",
        },
        None,
    ),
    (
        "status",
        {
            "type": "status",
            "id": None,
            "state": "draining",
            "uptime_s": 12.5,
            "counters": {"requests": 3},
            "lanes": [{"model": "smollm2"}],
            "workers": [],
            "batches": [],
        },
        None,
    ),
    ("a field of a later server", {"type": "pong", "id": "1", "later": 1}, None),
]
