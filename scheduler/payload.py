"""Looks through a msgpack value that is passed on unread: plain, not too deep, not too many values.

Decoding would be the simple way to look, but a few bytes on the wire can become a hundred in memory (eight million
empty lists are 8 MB of message and gigabytes of objects, and seconds of a blocked loop). So this walks over the
encoding and builds nothing; its work is bounded by VALUES_MAX, whatever is sent.

Source: the msgpack specification, format table.
"""

DEPTH_MAX = 16  # nesting: a scalar is not nested, [1] once
VALUES_MAX = 1 << 17  # keys and values in one payload: about 40 ms of looking; send bytes for large arrays

_NIL_FALSE_TRUE = frozenset({0xC0, 0xC2, 0xC3})
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
NUMBERS = frozenset([*range(0x80), *range(0xE0, 0x100), *_NIL_FALSE_TRUE, *_NUMBERS])  # first bytes of whole scalars
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}  # first byte -> bytes of the length
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_INTEGER_KEYS = frozenset(_NUMBERS) - {0xCA, 0xCB}


class NotPlainError(ValueError):
    """What is wrong with the payload, as the end of a sentence."""


def check(data: bytes) -> None:
    """Raises NotPlainError unless `data` is one plain value within the limits, with str or int map keys."""
    left = [1]  # how many values each open container still owes; a map owes keys and values
    keyed = [False]
    at = count = 0
    try:
        while left:
            if not left[-1]:
                left.pop()
                keyed.pop()
                continue
            left[-1] -= 1
            count += 1
            if count > VALUES_MAX:
                raise NotPlainError(f"has more than {VALUES_MAX} values; send large arrays as bytes")
            byte = data[at]
            at += 1
            if keyed[-1] and left[-1] & 1 and not _may_be_key(byte):
                raise NotPlainError("has a map key that is neither text nor an integer")
            at, children, is_map = _one(data, at, byte)
            if children is not None:
                if len(left) > DEPTH_MAX:
                    raise NotPlainError(f"is nested deeper than {DEPTH_MAX}")
                left.append(children)
                keyed.append(is_map)
    except IndexError:
        raise NotPlainError("ends in the middle of a value") from None
    if at != len(data):
        raise NotPlainError("has bytes after its value")


def _may_be_key(byte: int) -> bool:
    return byte <= 0x7F or byte >= 0xE0 or 0xA0 <= byte <= 0xBF or byte in _STRINGS or byte in _INTEGER_KEYS


def _one(data: bytes, at: int, byte: int) -> tuple[int, int | None, bool]:
    """One value that begins with `byte`: where it ends, and how many values it holds if it is a container."""
    if byte <= 0x7F or byte >= 0xE0 or byte in _NIL_FALSE_TRUE:
        return at, None, False
    if byte <= 0x8F:
        return at, 2 * (byte & 15), True
    if byte <= 0x9F:
        return at, byte & 15, False
    if byte <= 0xBF:
        return _text(data, at, byte & 31), None, False
    if byte in _NUMBERS:
        return _past(data, at + _NUMBERS[byte]), None, False
    for table, container in ((_STRINGS, ""), (_BYTES, ""), (_LISTS, "list"), (_MAPS, "map")):
        width = table.get(byte)
        if width is None:
            continue
        size = int.from_bytes(data[at : _past(data, at + width)])
        at += width
        if container:
            return at, size * (2 if container == "map" else 1), container == "map"
        return (_text(data, at, size) if table is _STRINGS else _past(data, at + size)), None, False
    raise NotPlainError("holds an extension type; send plain msgpack values")


def _text(data: bytes, at: int, size: int) -> int:
    end = _past(data, at + size)
    try:
        data[at:end].decode()
    except UnicodeDecodeError:
        raise NotPlainError("holds text that is not UTF-8") from None
    return end


def _past(data: bytes, end: int) -> int:
    if end > len(data):
        raise IndexError
    return end
