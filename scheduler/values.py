"""Values that can cross the wire: plain Python ones, made of whatever the caller or an engine has.

A value is refused where it is made, with its path, not where some encoder meets it later. NumPy scalars, arrays and
tensors are known by their `tolist`, so nothing here imports NumPy or torch. The result shares no container with the
input, so that a caller who changes a list afterwards changes nothing that was sent.
"""

from collections.abc import Callable, Mapping
from typing import Final

from headway.scheduler.wire import DEPTH_MAX

INT_MIN: Final = -(1 << 63)  # msgpack's signed range below zero
INT_MAX: Final = (1 << 64) - 1  # and its unsigned range above

_ADVICE: Final = {set: "a list", frozenset: "a list", complex: "[real, imag]"}


def plain(value: object, at: str = "payload") -> object:
    """`value` as None, bool, int, float, str, bytes, list and dict (with str or int keys) only.

    Tuples, arrays and tensors become lists, their scalars Python scalars. NaN and infinities pass: they are floats.
    `at` names the value in the error. Raises TypeError naming the path: sets, other objects, integers past 64 bits,
    text that is not valid Unicode, nesting deeper than wire.DEPTH_MAX.
    """
    try:
        return _plain(value, 1)
    except _RefusedError as refused:
        raise TypeError(f"{at}{refused.path}: {refused.why}") from None


class _RefusedError(Exception):
    """Why a value cannot go; its path is put together on the way out, so that good values pay nothing for it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path = ""


def _plain(value: object, depth: int) -> object:
    make = _MAKERS.get(type(value))
    if make is not None:
        return make(value, depth)
    for kind, make in _MAKERS.items():
        if isinstance(value, kind):
            return make(value, depth)
    if isinstance(value, Mapping):
        return _map(dict(value), depth)
    tolist = getattr(value, "tolist", None)
    if callable(tolist) and not isinstance(value, type):
        return _array(value, tolist, depth)
    raise _RefusedError(_why_not(value))


def _same(value: object, _depth: int) -> object:
    return value


def _int(value: object, _depth: int) -> int:
    assert isinstance(value, int)
    number = int(value)
    if not INT_MIN <= number <= INT_MAX:
        raise _RefusedError(f"an integer of {number.bit_length()} bits cannot be sent; the limit is 64 bits")
    return number


def _float(value: object, _depth: int) -> float:
    assert isinstance(value, float)
    return float(value)


def _str(value: object, _depth: int) -> str:
    assert isinstance(value, str)
    text = str.__str__(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _RefusedError("this text has a lone surrogate, so it is not valid Unicode") from None
    return text


def _bytes(value: object, _depth: int) -> bytes:
    assert isinstance(value, (bytes, bytearray, memoryview))
    return bytes(value)


def _list(value: object, depth: int) -> list[object]:
    assert isinstance(value, (list, tuple))
    _check_depth(depth)
    made: list[object] = []
    try:
        for item in value:
            made.append(_plain(item, depth + 1))  # noqa: PERF401 - the length tells where it stopped
    except _RefusedError as refused:
        refused.path = f"[{len(made)}]{refused.path}"
        raise
    return made


def _map(value: object, depth: int) -> dict[object, object]:
    assert isinstance(value, dict)
    _check_depth(depth)
    made: dict[object, object] = {}
    for key, item in value.items():
        try:
            made[_key(key)] = _plain(item, depth + 1)
        except _RefusedError as refused:
            refused.path = _shown(key) + refused.path
            raise
    return made


def _key(key: object) -> str | int:
    made = _plain(key, DEPTH_MAX + 1) if not isinstance(key, tuple) else key
    if isinstance(made, bool) or not isinstance(made, (str, int)):
        raise _RefusedError(f"{_a(key)} cannot be a map's key; use text or an integer")
    return made


def _shown(key: object) -> str:
    """`key` as a step of a path, without running anybody's `repr`."""
    if isinstance(key, str):
        return f".{key.encode(errors='backslashreplace').decode()}"
    return f"[{key}]" if type(key) in (int, float, bool) else f"[{_a(key)}]"


def _array(value: object, tolist: Callable[[], object], depth: int) -> object:
    try:
        made = tolist()
    except Exception as error:
        raise _RefusedError(f"{_a(value)} did not become a list: {error}") from None
    if type(made) is type(value):  # numpy.longdouble has no Python counterpart
        raise _RefusedError(_why_not(value))
    return _plain(made, depth)


def _check_depth(depth: int) -> None:
    if depth > DEPTH_MAX:
        raise _RefusedError(f"nested deeper than {DEPTH_MAX}, or it contains itself")


def _why_not(value: object) -> str:
    advice = _ADVICE.get(type(value), "numbers, text, bytes, lists and maps")
    return f"{_a(value)} cannot be sent; send {advice}"


def _a(value: object) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


_MAKERS: Final[dict[type, Callable[[object, int], object]]] = {
    str: _str,
    bool: _same,  # before int, its base
    int: _int,
    float: _float,
    type(None): _same,
    list: _list,
    tuple: _list,
    dict: _map,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
}
