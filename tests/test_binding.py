"""Where a server may listen, and what happens when somebody is there already (ipc and tcp)."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from headway.scheduler.binding import BindError, Binding, check_private
from headway.scheduler.spec import Curve
from tests.live import Raw, live


@pytest.fixture
def router() -> "zmq.Socket[bytes]":
    context = zmq.Context()
    yield context.socket(zmq.ROUTER)  # type: ignore[misc]
    context.destroy(0)


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5555", "tcp://127.9.9.9:1", "tcp://[::1]:5", "tcp://localhost:5", "ipc:///tmp/x", "inproc://x"],
)
def test_private_addresses_need_nothing(address: str) -> None:
    check_private(address, curve=False, allow_public=False)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.7:5", "tcp://eth0:5"])
def test_public_addresses_need_curve_or_the_operators_word(address: str) -> None:
    with pytest.raises(BindError, match="curve"):
        check_private(address, curve=False, allow_public=False)
    check_private(address, curve=True, allow_public=False)
    check_private(address, curve=False, allow_public=True)


def test_a_second_server_on_an_ipc_path_is_told_who_is_there(tmp_path: Path, router: "zmq.Socket[bytes]") -> None:
    address = f"ipc://{tmp_path}/s"
    with live(bind=address) as server:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        with pytest.raises(BindError, match=rf"process {os.getpid()}.*{tmp_path}/s"):
            Binding(router, address)
        assert server.client().ask(type="call", id="1", payload=1)["value"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_second_server_on_a_tcp_port_is_told_so(router: "zmq.Socket[bytes]") -> None:
    with live() as server, pytest.raises(BindError, match=server.address):
        Binding(router, server.address)


def test_what_a_killed_server_left_does_not_block_the_next(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    command = [sys.executable, "-m", "headway", "serve", "--engine", "echo", "--name", "echo", "--bind", address]
    killed = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    client = Raw(address)
    client.wait_ready()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (tmp_path / "s").exists()
    with live(bind=address) as server:
        assert server.client().ask(type="call", id="1", payload=1)["value"] == 1
    client.close()
    assert list(tmp_path.iterdir()) == []


def test_a_regular_file_is_never_deleted(tmp_path: Path, router: "zmq.Socket[bytes]") -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(BindError, match="not a socket"):
        Binding(router, f"ipc://{path}")
    assert path.read_text() == "precious"


def test_somebody_elses_live_socket_is_left_alone(tmp_path: Path, router: "zmq.Socket[bytes]") -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(BindError, match="other program"):
            Binding(router, f"ipc://{path}")
    assert path.exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, router: "zmq.Socket[bytes]") -> None:
    with pytest.raises(BindError, match="does not exist"):
        Binding(router, f"ipc://{tmp_path}/no/s")


def test_too_long_a_path_is_refused_before_the_kernel_does(tmp_path: Path, router: "zmq.Socket[bytes]") -> None:
    with pytest.raises(BindError, match="107"):
        Binding(router, f"ipc://{tmp_path}/{'x' * 120}")


def test_curve_clients_with_the_key_are_served_and_others_are_not() -> None:
    public, secret = zmq.curve_keypair()
    keys = Curve(public=public.decode(), secret=secret.decode())
    with live(curve=keys, ready=False) as server:
        context = zmq.Context()
        good = context.socket(zmq.DEALER)
        good.curve_publickey, good.curve_secretkey = zmq.curve_keypair()
        good.curve_serverkey = public
        good.connect(server.address)
        plain = context.socket(zmq.DEALER)
        plain.connect(server.address)
        for sock in (good, plain):
            sock.setsockopt(zmq.LINGER, 0)
            sock.send(b"\x81\xa4type\xa4ping")
        assert good.poll(5000)
        assert not plain.poll(200)
        context.destroy(0)
