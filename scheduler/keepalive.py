"""How a connection whose other end vanished without a word is noticed: by the kernel, not by libzmq's heartbeats.

libzmq 4.3.5 aborts the whole process when a heartbeat's timer fires on a connection that broke while its input was
stopped at the high-water mark (`Assertion failed: !_io_error`): any client that sends much and goes away could end the
server. TCP keepalive does the same job without libzmq's timer. Local (ipc) connections need none: their end is seen.
"""

import zmq

IDLE_S, INTERVAL_S, PROBES = 10, 3, 3  # a silent host is given up after about 20 s


def keep_alive(socket: "zmq.Socket[bytes]") -> None:
    """Have the kernel probe this socket's TCP connections. Before bind or connect."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
