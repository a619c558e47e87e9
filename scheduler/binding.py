"""Where a server may listen, and who listens there already.

Loopback and ipc are private to the machine and need nothing. Anything else needs CURVE, or the operator's word. libzmq
would let a second server take an ipc path away from the first without a sound; here a lock beside the path, which dies
with its holder, tells the second one who is there. A path that is not a socket is never deleted.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Any

import zmq

from headway.scheduler.spec import Curve

IPC_PATH_MAX = 107  # the kernel's limit for a socket path


class BindError(Exception):
    """A server cannot listen where it was told to; the message says why and what to do."""


def check_private(address: str, *, curve: bool, allow_public: bool) -> None:
    """Raises BindError if `address` is reachable from elsewhere and nothing protects it."""
    if curve or allow_public or address.startswith(("ipc://", "inproc://")):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("localhost", "::1") or host.startswith("127."):
        return
    raise BindError(
        f"{address} can be reached from other machines and would be unprotected: bind to 127.0.0.1, or set curve "
        "keys, or say allow_public if the network itself is private"
    )


class Binding:
    """A bound address that is released by `close`. Raises BindError naming address and holder."""

    def __init__(
        self, sock: "zmq.Socket[bytes]", address: str, *, curve: Curve | None = None, allow_public: bool = False
    ) -> None:
        _check_form(address)
        check_private(address, curve=curve is not None, allow_public=allow_public)
        if curve is not None:
            sock.curve_server = True
            sock.curve_secretkey = curve.secret.encode()
            sock.curve_publickey = curve.public.encode()
        self._lock: int | None = None
        self._bound = False  # the path is ours to remove
        self._path = Path(address.removeprefix("ipc://")) if _is_path(address) else None
        if self._path is not None:
            self._claim(self._path)
        try:
            sock.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise BindError(f"cannot listen on {address}: {error.strerror}. {_advice(error)}") from None
        self._bound = True
        if self._path is not None:
            os.chmod(self._path, 0o600)
        endpoint: Any = sock.getsockopt(zmq.LAST_ENDPOINT)
        self.address = endpoint.rstrip(b"\0").decode()

    @property
    def _lock_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".lock")

    def _claim(self, path: Path) -> None:
        """Become the one holder of an ipc path, clearing away what a dead holder left."""
        if len(os.fsencode(path)) > IPC_PATH_MAX:
            raise BindError(f"the path {path} is longer than {IPC_PATH_MAX} bytes; choose a shorter one")
        if not path.parent.is_dir():
            raise BindError(f"the folder {path.parent} of the socket {path} does not exist; make it first")
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BindError(f"cannot make {self._lock_path}: {error.strerror}; choose a writable folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 64).decode() or "unknown"
            os.close(lock)
            raise BindError(f"another server (process {holder}) listens on ipc://{path}; stop it first") from None
        self._lock = lock
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        try:
            self._clear(path)
        except BindError:
            self.close()
            raise

    @staticmethod
    def _clear(path: Path) -> None:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise BindError(f"{path} is there and is not a socket; it was left alone, choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # nobody listens: left behind by a server that was killed
                return
            except OSError as error:
                raise BindError(f"cannot look at {path}: {error.strerror}") from None
        raise BindError(f"some other program listens on ipc://{path}; stop it first")

    def close(self) -> None:
        """Release the address and remove its files. The socket itself is closed by its owner."""
        if self._lock is None:
            return
        assert self._path is not None
        if self._bound:
            self._path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None


def _check_form(address: str) -> None:
    """libzmq takes port numbers modulo 65536, and says little about the rest."""
    if address.startswith(("ipc://", "inproc://")):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not (port in "*" or (port.isdigit() and int(port) < 1 << 16)):
        raise BindError(f"{address!r} is no address: say tcp://host:port (port up to 65535) or ipc:///path/to/socket")


def _is_path(address: str) -> bool:
    """An ipc address that is a file: not one of Linux' abstract names, nor a wildcard that libzmq fills in."""
    return address.startswith("ipc://") and not address.startswith(("ipc://@", "ipc://*"))


def _advice(error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return "Another program listens there: stop it, or choose another port"
    return "Choose another address, such as tcp://127.0.0.1:5555 or ipc:///tmp/headway.sock"
