"""The walk over an unread payload agrees with really decoding it, and costs no memory whatever is sent."""

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.scheduler.payload import DEPTH_MAX, VALUES_MAX, NotPlainError, check

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=300)
)
keys = st.text() | st.integers(-(2**63), 2**64 - 1)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=40)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@given(values)
def test_every_plain_value_passes(value: object) -> None:
    check(msgpack.packb(value))


@given(st.binary(max_size=60))
def test_what_passes_is_one_whole_msgpack_value(data: bytes) -> None:
    try:
        check(data)
    except NotPlainError:
        return
    msgpack.unpackb(data, strict_map_key=False)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (msgpack.packb(msgpack.ExtType(1, b"x")), "extension"),
        (msgpack.packb([msgpack.ExtType(5, b"x" * 300)]), "extension"),
        (msgpack.packb(msgpack.Timestamp(1)), "extension"),
        (msgpack.packb({None: 1}), "map key"),
        (msgpack.packb({1.5: 1}), "map key"),
        (msgpack.packb({b"x": 1}), "map key"),
        (msgpack.packb({(1, 2): 1}), "map key"),
        (msgpack.packb(nested(DEPTH_MAX + 1)), "nested"),
        (b"\x91" * 1_000_000, "nested"),
        (msgpack.packb([0] * VALUES_MAX), "more than"),
        (b"\xa2\xff\xff", "UTF-8"),
        (b"", "middle"),
        (b"\x92\x01", "middle"),
        (b"\xdb\xff\xff\xff\xff", "middle"),
        (b"\xdd\xff\xff\xff\xff", "middle"),
        (b"\x01\x01", "after"),
        (b"\xc1", "extension"),
    ],
)
def test_what_is_not_plain_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(NotPlainError, match=says):
        check(data)


def test_the_edges_pass() -> None:
    check(msgpack.packb(nested(DEPTH_MAX)))
    check(msgpack.packb([0] * (VALUES_MAX - 1)))


def test_a_bomb_costs_no_memory() -> None:
    bomb = b"\xdd" + (8_000_000).to_bytes(4) + b"\x90" * 8_000_000
    tracemalloc.start()
    with pytest.raises(NotPlainError):
        check(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
