"""A server of the Model Context Protocol: ``python mcp_server.py [PORT]``, over stdin and stdout or HTTP."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

server: Any
try:
    from mcp.server.mcpserver import MCPServer

    server, by_http = MCPServer("stones"), lambda port: server.run("streamable-http", port=port)
except ImportError:  # release 1
    from mcp.server.fastmcp import FastMCP

    def by_http(port: int) -> None:
        server.settings.port = port
        server.run("streamable-http")

    server = FastMCP("stones", log_level="ERROR")


@server.tool()
def take(have: int, count: int) -> str:
    """Take stones; returns how many are left."""
    return f"{have - count} stones"


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
    raise ValueError("the stones are out")


if __name__ == "__main__":
    by_http(int(sys.argv[1])) if len(sys.argv) > 1 else server.run()
