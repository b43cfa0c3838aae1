"""Reads and validates the arguments of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import MultiMapping
from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from agentlightning_plugins.stores.http.message import MAX_ITEM_BYTES
from agentlightning_plugins.stores.http.route import Route
from agentlightning_plugins.stores.http.server.answer import JSON_RULES, RefusedError

_LIST_KEYS: Final = frozenset({"status_in", "rollout_id_in", "kinds"})
"""Keys that may be repeated in a query string."""
_JSON_KEYS: Final = frozenset({"metadata"})
"""Keys whose value in a query string is JSON."""
_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"0" * 9)


def make_reader(route: Route) -> Callable[[web.Request], Awaitable[dict[str, Any]]]:
    """The function that reads the validated arguments of a request of this route.

    It raises ValidationError or RefusedError for a body that is not JSON, not the message of the route, or too large.
    """
    if route.message is None:
        return _read_nothing
    validate = TypeAdapter(route.message).validate_python
    takes_resources = "resources" in route.parameters

    async def read_query_string(request: web.Request) -> dict[str, Any]:
        arguments: dict[str, Any] = validate(read_query(request.query))
        return arguments

    async def read_body(request: web.Request) -> dict[str, Any]:
        body = await request.read() or b"{}"
        parsed = _parse(body)
        content = validate(_wrap_bare(parsed) if takes_resources else parsed, strict=True)
        if len(body) > MAX_ITEM_BYTES:
            _refuse_large_items(content)
        return content if route.body is None else {"record": content}

    return read_query_string if route.method == "GET" else read_body


def _wrap_bare(content: Any) -> Any:
    """Accepts resources without the key ``resources`` around them, as the client of Agent Lightning 0.3 sends them."""
    values = list(content.values()) if isinstance(content, dict) else []
    types = [value.get("resource_type") if isinstance(value, dict) else None for value in values]
    return {"resources": content} if types and all(isinstance(name, str) for name in types) else content


async def _read_nothing(request: web.Request) -> dict[str, Any]:
    return {}


def read_query(query: MultiMapping[str]) -> dict[str, Any]:
    """A query string as a mapping; the values are not validated yet.

    Raises:
        RefusedError: a value that has to be JSON is not.
    """
    return {key: _query_value(query, key) for key in query}


def _query_value(query: MultiMapping[str], key: str) -> Any:
    if key in _LIST_KEYS:
        return query.getall(key)
    if key not in _JSON_KEYS:
        return query[key]
    return _parse(query[key].encode(errors="surrogateescape"), key)


def _parse(body: bytes, name: str = "the body") -> Any:
    """The JSON of a body, or of the value of a query string.

    orjson is several times as fast as pydantic's parser and refuses NaN and numbers that overflow a float. But it turns
    integers of more than 64 bits, which have 20 digits or more, into floats; these bodies go to pydantic's parser.

    Raises:
        RefusedError: it is not JSON.
    """
    try:
        content = orjson.loads(body)
    except ValueError as error:
        raise RefusedError("malformed", f"{name} is not JSON: {error}. {JSON_RULES}") from error
    # 20 digits in a row contain 4 in a row of every fifth character, which is quicker to search.
    is_suspect = b"0000" in body[::5].translate(_DIGITS_TO_ZERO) and b"0" * 20 in body.translate(_DIGITS_TO_ZERO)
    return from_json(body) if is_suspect else content


def _refuse_large_items(content: Any) -> None:
    values = content.values() if isinstance(content, dict) else [content]
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            size = len(to_json(item))
            if size > MAX_ITEM_BYTES:
                raise RefusedError(
                    "too_large",
                    f"one {type(item).__name__} has {size} bytes, and {MAX_ITEM_BYTES} are allowed; store large "
                    "content elsewhere and send its address",
                )
