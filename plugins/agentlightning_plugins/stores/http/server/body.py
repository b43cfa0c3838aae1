"""Reads and validates the arguments of requests."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

import orjson
from aiohttp import web
from multidict import MultiMapping
from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from agentlightning_plugins.shared.web import request as web_body
from agentlightning_plugins.stores.http.message import MAX_BODY_BYTES, MAX_ITEM_BYTES
from agentlightning_plugins.stores.http.route import MAX_BATCH, Route
from agentlightning_plugins.stores.http.server.answer import JSON_RULES, RefusedError

T = TypeVar("T")


class Limits(NamedTuple):
    """Limits of the size of a request."""

    body_bytes: int
    """Maximum number of bytes, both before and after inflating."""
    values: int
    """Approximate maximum number of values in JSON."""
    messages: int
    """Maximum number of nested messages in protobuf."""
    batch: int
    """Maximum number of items in one list of the message."""


STORE_LIMITS: Final = Limits(MAX_BODY_BYTES, MAX_BODY_BYTES, MAX_BODY_BYTES, MAX_BATCH)
ATTEMPT_LIMITS: Final = Limits(16 * 2**20, 200_000, 50_000, 2_000)
"""Limits for the token of an attempt, which agents have: their requests must not occupy the store for long."""

Reader = Callable[[web.Request, Limits], Awaitable[dict[str, Any]]]

_MAX_DEPTH: Final = 1000
"""So high that it never applies: validation allows ``frozen.MAX_DEPTH`` levels and gives the better message."""
_UNREAD_BODY_BYTES: Final = 64 * 1024
"""Maximum size of the body of a request that needs none."""
_LIST_KEYS: Final = frozenset({"status_in", "rollout_id_in", "kinds"})
"""Keys that may be repeated in a query string."""
_JSON_KEYS: Final = frozenset({"metadata"})
"""Keys whose value in a query string is JSON."""
_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"0" * 9)


def make_reader(route: Route) -> Reader:
    """Returns the function that reads and validates the arguments of a request to this route.

    That function raises ValidationError, RefusedError or RequestRefused if the body is not JSON, is not a message of
    the route, or is too large.
    """
    message = route.message
    if message is None:
        return _read_nothing
    takes_resources = "resources" in route.parameters

    async def read_query_string(request: web.Request, limits: Limits) -> dict[str, Any]:
        arguments: dict[str, Any] = _adapter(message).validate_python(read_query(request.query))
        return arguments

    async def read_body(request: web.Request, limits: Limits) -> dict[str, Any]:
        body = await web_body.read_body(request, limits.body_bytes, limits.body_bytes) or b"{}"
        content = await web_body.parse_json(body, max_depth=_MAX_DEPTH, max_items=limits.values, loads=_parse)
        _refuse_long_lists(content, limits.batch)

        def check() -> Any:
            given = _wrap_bare(content) if takes_resources else content
            valid = _adapter(message).validate_python(given, strict=True)
            if len(body) > MAX_ITEM_BYTES:
                _refuse_large_items(valid)
            return valid

        content = await web_body.run_if_large(body, check)
        return content if route.body is None else {"record": content}

    return read_query_string if route.method == "GET" else read_body


@functools.cache
def _adapter(message: Any) -> TypeAdapter[dict[str, Any]]:
    """Returns the validator of a message, which takes milliseconds to build and so is built for its first request."""
    return TypeAdapter(message)


def _wrap_bare(content: Any) -> Any:
    """Accepts resources without the key ``resources`` around them, as the client of Agent Lightning 0.3 sends them."""
    values = list(content.values()) if isinstance(content, dict) else []
    types = [value.get("resource_type") if isinstance(value, dict) else None for value in values]
    return {"resources": content} if types and all(isinstance(name, str) for name in types) else content


async def _read_nothing(request: web.Request, limits: Limits) -> dict[str, Any]:
    await web_body.read_body(request, _UNREAD_BODY_BYTES, _UNREAD_BODY_BYTES)
    return {}


def read_query(query: MultiMapping[str]) -> dict[str, Any]:
    """Returns a query string as a mapping of values that are not validated yet.

    Raises:
        RefusedError: a value that has to be JSON is not.
    """
    return {key: _query_value(query, key) for key in query}


def _query_value(query: MultiMapping[str], key: str) -> Any:
    if key in _LIST_KEYS:
        return query.getall(key)
    if key not in _JSON_KEYS:
        return query[key]
    try:
        return _parse(query[key].encode(errors="surrogateescape"))
    except ValueError as error:
        raise RefusedError("malformed", f"{key}: not JSON: {error}") from error


def _parse(body: bytes) -> Any:
    """Parses the JSON of a body.

    orjson is several times as fast as pydantic's parser and refuses NaN and numbers that overflow a float. But it turns
    integers of more than 64 bits, which have 20 digits or more, into floats; such bodies go to pydantic's parser.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        content = orjson.loads(body)
    except ValueError as error:
        raise ValueError(f"{error}. {JSON_RULES}") from error
    # Every fifth character of 20 digits in a row is 4 digits in a row, which are faster to search for.
    is_suspect = b"0000" in body[::5].translate(_DIGITS_TO_ZERO) and b"0" * 20 in body.translate(_DIGITS_TO_ZERO)
    return from_json(body) if is_suspect else content


def _refuse_long_lists(content: Any, limit: int) -> None:
    """Refuses a list that is too long before its items are validated, each of which may be wrong in many ways."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, list) and len(value) > limit:
            raise RefusedError("invalid", f"{name:.50}: {len(value)} items, and {limit} are allowed in one request")


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
