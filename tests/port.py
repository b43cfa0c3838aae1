"""A port whose number is known before a server listens on it."""

from __future__ import annotations

import socket
import sys


def reserve_port() -> int:
    """Returns a port of 127.0.0.1 for a server that gets the number, and may be restarted on it several times.

    Linux does not assign a port that a socket holds, neither to listen on nor to connect from. A server that asks for
    the number still gets it, because both set SO_REUSEADDR and this socket never listens; until a server listens,
    connections are refused. On other systems no socket holds the port, and it is only likely to stay free.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    if sys.platform == "linux":
        held.detach()  # stays open until this process ends
    else:
        held.close()
    return port
