"""What can be sent is made plain; what cannot is refused where it is made, with its path (public report B28)."""

import enum
import math
from collections import OrderedDict
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from headway.scheduler.values import INT_MAX, INT_MIN, plain
from headway.scheduler.wire import DEPTH_MAX


class Colour(enum.IntEnum):
    RED = 3


class Shade(enum.StrEnum):
    DARK = "dark"


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, None),
        (True, True),
        (INT_MAX, INT_MAX),
        (INT_MIN, INT_MIN),
        (0.5, 0.5),
        ("é\x00🙂", "é\x00🙂"),
        (b"\x00", b"\x00"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        ((1, (2,)), [1, [2]]),
        ({"a": {1: "b"}}, {"a": {1: "b"}}),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": (1,)}), {"a": [1]}),
        (Colour.RED, 3),
        (Shade.DARK, "dark"),
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
        (np.array(3), 3),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        ({np.int64(5): np.float16(1)}, {5: 1.0}),
        (np.zeros((0, 3)), []),
    ],
)
def test_made_plain(given: object, made: object) -> None:
    found = plain(given)
    assert found == made
    assert type(found) is type(made)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == made


def test_a_tensor_is_known_without_its_package() -> None:
    torch = pytest.importorskip("torch")
    assert plain({"a": torch.tensor(2.5), "b": torch.tensor([[1, 2]]), "c": torch.ones(1, dtype=torch.bfloat16)}) == {
        "a": 2.5,
        "b": [[1, 2]],
        "c": [1.0],
    }


def test_not_a_number_is_a_float() -> None:
    found = plain(np.float32("nan"))
    assert isinstance(found, float)
    assert math.isnan(found)


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("nobody may call this")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"scores": [1, 2, {3}]}, "payload.scores[2]: a set cannot be sent; send a list"),
        ({"a": {7: frozenset()}}, "payload.a[7]: a frozenset cannot be sent; send a list"),
        (1 << 64, "payload: an integer of 65 bits cannot be sent; the limit is 64 bits"),
        ([-(1 << 63) - 1], "payload[0]: an integer of 64 bits cannot be sent; the limit is 64 bits"),
        ({"x": 1j}, "payload.x: a complex cannot be sent; send [real, imag]"),
        ({"x": object()}, "payload.x: an object cannot be sent; send numbers, text, bytes, lists and maps"),
        ({"x": np.array([1, {2}], dtype=object)}, "payload.x[1]: a set cannot be sent; send a list"),
        ({1.5: 0}, "payload[1.5]: a float cannot be a map's key; use text or an integer"),
        ({True: 0}, "payload[True]: a bool cannot be a map's key; use text or an integer"),
        ({None: 0}, "payload[a NoneType]: a NoneType cannot be a map's key; use text or an integer"),
        ({(1,): 0}, "payload[a tuple]: a tuple cannot be a map's key; use text or an integer"),
        ({"x": "\ud800"}, "payload.x: this text has a lone surrogate, so it is not valid Unicode"),
        ({"\ud800": 0}, "payload.\\ud800: this text has a lone surrogate, so it is not valid Unicode"),
        (int, "payload: a type cannot be sent; send numbers, text, bytes, lists and maps"),
    ],
)
def test_refused_with_its_path(given: object, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        plain(given)
    assert str(caught.value) == text


def test_refused_values_are_not_shown() -> None:
    with pytest.raises(TypeError, match=r"^value\.a: a .*Odd cannot be sent"):
        plain({"a": Odd()}, at="value")
    with pytest.raises(TypeError, match=r"^value\[a .*Odd\]: a .*Odd"):
        plain({Odd(): 1}, at="value")


def test_a_longdouble_has_no_python_counterpart() -> None:
    with pytest.raises(TypeError, match=r"longdouble cannot be sent"):
        plain(np.longdouble(1))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_the_wires_and_a_loop_ends() -> None:
    assert plain(nested(DEPTH_MAX)) == nested(DEPTH_MAX)
    with pytest.raises(TypeError, match=r"^payload(\[0\]){16}: nested deeper than 16"):
        plain(nested(DEPTH_MAX + 1))
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        plain(loop)


def test_the_result_shares_nothing_with_the_input() -> None:
    given = {"a": [1]}
    made = plain(given)
    given["a"].append(2)
    assert made == {"a": [1]}
