"""A file that is only ever added to: a plain msgpack stream, one value after the other and nothing between.

What is put is written at the end of the loop's turn, in one go, so that a process that dies leaves all but its last
turn, and at worst half a value at the end. Half a value that an earlier process left is cut off before anything is
added. A disk that is full, or a file that has grown past its bound, ends the recording and is said once; the service
goes on.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgpack
import msgspec

from headway.scheduler.config import ConfigError

log = logging.getLogger("headway.scheduler")

BYTES_MAX = 64 << 30  # of one file: past it somebody has forgotten that it is recorded
HELD_BYTES_MAX = 1 << 20  # held back within one turn
READ_BYTES = 1 << 20


class Tape:
    """Opened for adding; made if it is not there. Raises ConfigError if it cannot be."""

    def __init__(self, path: str, *, bytes_max: int = BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._held = bytearray()
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = whole_bytes(Path(path))
            os.ftruncate(self._file, self._size)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written to: {error.strerror or error}") from None

    def __repr__(self) -> str:
        return f"<Tape {self.path} {self._size + len(self._held)} bytes>"

    def put(self, value: object) -> None:
        """One more value; anything that msgspec can encode."""
        if self._file is not None:
            self._held += self._encode(value)
            if len(self._held) > HELD_BYTES_MAX:
                self.flush()

    def flush(self) -> None:
        """Write what was put. Never raises."""
        if not self._held or self._file is None:
            return
        held, self._held = self._held, bytearray()
        if self._size + len(held) > self._bytes_max:
            self._end(f"it has reached {self._bytes_max} bytes")
            return
        try:
            while held:
                written = os.write(self._file, held)
                self._size += written
                del held[:written]
        except OSError as error:
            self._end(error.strerror or str(error))

    def _end(self, why: str) -> None:
        log.error("%s is recorded no further: %s", self.path, why)
        self.close()

    def close(self) -> None:
        """Write what is left, and give the file back. Idempotent."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def whole_bytes(path: Path) -> int:
    """How much of the file is whole values. Raises ConfigError for one that is no recording at all."""
    with path.open("rb") as file:
        begin = file.read(1)
        if begin and not 0x80 <= begin[0] <= 0x8F and begin[0] not in (0xDE, 0xDF):
            raise ConfigError(f"{path} is no recording; it will not be added to, nor overwritten")
        file.seek(0)
        return max(ends(file, str(path)), default=0)


def ends(file: BinaryIO, name: str) -> Iterator[int]:
    """Where each whole value of the stream ends. Raises ConfigError where it is none."""
    unpacker = msgpack.Unpacker(file, read_size=READ_BYTES, max_buffer_size=0)
    while True:
        try:
            unpacker.skip()
        except msgpack.OutOfData:
            return
        except Exception as error:  # the library's own kinds, and ValueError
            raise ConfigError(f"{name}, byte {unpacker.tell()}: no msgpack ({error})") from None
        yield unpacker.tell()
