"""Reads the HTTP requests of agents."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from aiohttp import HttpVersion11, web

from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.call import ModelCall, TraceContext
from agentlightning_plugins.gateway.dialects.dialect import Dialect
from agentlightning_plugins.gateway.dialects.json_text import parse_json as load_json
from agentlightning_plugins.gateway.refusal import CallRefused
from agentlightning_plugins.shared.web.body import RequestRefused, parse_json, read_body

logger = logging.getLogger("agentlightning")
MAX_BODY_BYTES: Final = 32 * 2**20
"""Limit of a request's size, both before and after decompression."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_QUERY: Final = frozenset({"api-version", "beta"})
"""Query parameters of Azure and Anthropic that are passed on from the agent's URL."""
_CODES: Final = {413: "request_too_large", 415: "unsupported_encoding"}
_MAX_WARNINGS: Final = 100
_warned: Final[set[str]] = set()
"""Fields that were not passed on; each is logged once."""


async def read_call(request: web.BaseRequest, dialect: Dialect, attempt: AttemptKey | None) -> ModelCall:
    """Reads the call of a request; raises CallRefused if the request contains no call."""
    if request.method != "POST":
        raise CallRefused(405, f"{request.path} takes POST, not {request.method}", "method_not_allowed")
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version == HttpVersion11:
        await request.writer.write(_CONTINUE)  # curl, for example, waits for it before it sends a large body
        request.writer.output_size = 0
    try:
        text = await read_body(request, MAX_BODY_BYTES, MAX_BODY_BYTES)
        body = await parse_json(text, loads=load_json)
    except RequestRefused as error:
        raise CallRefused(error.status, str(error), _CODES.get(error.status, "invalid_json")) from None
    model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(model, str):
        raise CallRefused(400, "the request is not an object with a 'model'", "invalid_request")
    trace = TraceContext.from_header(request.headers.get("traceparent"))
    query = [(name, value) for name, value in request.query.items() if name in _QUERY] if request.query_string else ()
    return ModelCall(attempt, dialect, _keep_fields(body, dialect), model, trace, urlencode(query))


def _keep_fields(body: Mapping[str, Any], dialect: Dialect) -> Mapping[str, Any]:
    """Returns the fields of a request that are passed on."""
    if dialect.fields is None or body.keys() <= dialect.fields:
        return body
    for name in body.keys() - dialect.fields:
        if name not in _warned and len(_warned) < _MAX_WARNINGS:
            _warned.add(name)
            logger.warning(
                "the field %.100r of %s is not passed on to backends; if they need it, set it in the "
                "sampling_parameters of the model list",
                name,
                dialect.path,
            )
    return {name: value for name, value in body.items() if name in dialect.fields}
