"""A port that is known before anything listens there."""

from __future__ import annotations

import socket
import sys


def reserve_port() -> int:
    """A port of 127.0.0.1 for a server that is told its number, also one that is started there again and again.

    Linux does not reuse a port that a socket holds, neither to listen on nor to connect from. A server that is told the
    number still gets it, because both set SO_REUSEADDR and this socket never listens; until one does, connections are
    refused. On other systems nothing holds the port, and it is only likely to stay free.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    if sys.platform == "linux":
        held.detach()  # it stays open as long as this process
    else:
        held.close()
    return port
