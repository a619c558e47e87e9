"""What a user's engine may return: NumPy and torch values cross as plain ones, or are refused with their path."""

import math
from typing import Any

import msgspec
import pytest

from headway.scheduler.values import plain


def sent(value: object) -> Any:
    """As the client gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plain(value, "result")))


def same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def test_numpy() -> None:
    np = pytest.importorskip("numpy")
    made = sent({"i": np.int64(7), "f": np.float32(0.5), "b": np.bool_(True), "s": np.str_("é"), "z": np.array(3)})
    assert same(made["i"], 7)
    assert same(made["f"], 0.5)
    assert made["b"] is True
    assert same(made["s"], "é")
    assert same(made["z"], 3)
    assert sent([np.arange(4).reshape(2, 2), np.zeros((0, 3))]) == [[[0, 1], [2, 3]], []]
    assert sent({np.int64(50256): -100.0}) == {50256: -100.0}
    assert sent(np.uint64(2**64 - 1)) == 2**64 - 1
    assert math.isnan(sent(np.float32("nan")))


@pytest.mark.parametrize("name", ["complex64", "longdouble"])
def test_numpy_numbers_without_a_counterpart_are_refused(name: str) -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"^result\.x\[0\]: a"):
        plain({"x": [getattr(np, name)(1)]}, "result")


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.tensor(0.5, requires_grad=True)
    made = sent((weight, torch.tensor([1, 2]), torch.tensor(True), torch.ones(1, 2, dtype=torch.bfloat16)))
    assert same(made[0], 0.5)
    assert made[1:] == [[1, 2], True, [[1.0, 1.0]]]
    assert sent([weight * torch.ones(2)]) == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"scores": [1, 2, {3}]}, "result.scores[2]: a set cannot be sent; send a list"),
        ([[object()]], "result[0][0]: an object cannot be sent"),
        ({"n": 1 << 64}, "result.n: an integer of 65 bits cannot be sent"),
        ({1: {2.5: 0}}, "result[1][2.5]: a float cannot be a map's key"),
        (print, "result: a builtin_function_or_method cannot be sent"),
        (ValueError, "result: a type cannot be sent"),
    ],
)
def test_what_cannot_cross_is_refused_with_its_path(value: object, says: str) -> None:
    with pytest.raises(TypeError) as caught:
        plain(value, "result")
    assert str(caught.value).startswith(says)
