"""Reads the HTTP requests of agents."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import HttpVersion11, web

from agentlightning_plugins.gateway.backends.upstream import Reply, refuse
from agentlightning_plugins.gateway.dialects.dialect import Dialect
from agentlightning_plugins.gateway.dialects.json_text import parse_json
from agentlightning_plugins.gateway.recording.call import AttemptKey, Call, TraceContext

MAX_BODY_BYTES: Final = 1 << 28
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> web.BaseRequest:
    """The request factory of ``aiohttp.web.Server``."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


async def read_call(request: web.BaseRequest, dialect: Dialect, attempt: AttemptKey | None) -> Call | Reply:
    """Reads the call of a request. Returns an error for the agent if the request contains none."""
    if request.method != "POST":
        return refuse(dialect, 405, f"{request.path} takes POST, not {request.method}", "method_not_allowed")
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version == HttpVersion11:
        await request.writer.write(_CONTINUE)  # curl, for example, waits for it before it sends a large body
        request.writer.output_size = 0
    try:
        text = await request.read()
        body = parse_json(text)
    except web.HTTPRequestEntityTooLarge:
        return refuse(dialect, 413, f"the request is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
    except ValueError as error:
        return refuse(dialect, 400, f"the request is not JSON: {error}", "invalid_json")
    model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(model, str):
        return refuse(dialect, 400, "the request is not an object with a 'model'", "invalid_request")
    trace = TraceContext.from_header(request.headers.get("traceparent"))
    return Call(attempt, dialect, text, body, model, trace, request.query_string)
