"""The end of a stream for an agent."""

from __future__ import annotations

import asyncio

from aiohttp import web


async def end_stream(request: web.BaseRequest, response: web.StreamResponse, last: bytes, limit_s: float) -> None:
    """Writes the end of a stream; closes the connection if the agent does not read it in time."""
    try:
        async with asyncio.timeout(limit_s):
            await response.write_eof(last)
    except (TimeoutError, ConnectionResetError, asyncio.CancelledError):  # the last by aiohttp, after a cancelled write
        if request.transport is not None:
            request.transport.abort()
