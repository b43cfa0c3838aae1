"""A server of the Model Context Protocol: ``python mcp_server.py [PORT]``, over stdin and stdout or HTTP."""

from __future__ import annotations

import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # release 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("stones")
taken: list[int] = []


@server.tool()
def take(count: int) -> str:
    """Take stones; returns how many were taken so far."""
    taken.append(count)
    return f"taken: {sum(taken)}"


@server.tool()
def die() -> str:
    """Ends the process of the server."""
    print("the server is about to end", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(3600)
    return "late"


@server.tool()
def fail() -> str:
    """Raises an error."""
    raise ValueError("stones are out")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    elif hasattr(server, "settings") and hasattr(server.settings, "port"):
        server.settings.port = int(sys.argv[1])
        server.run("streamable-http")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
