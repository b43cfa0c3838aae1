"""From a request to the validated message of its route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import MultiMapping
from pydantic import TypeAdapter
from pydantic_core import to_json

from agentlightning_plugins.store_message import MAX_ITEM_BYTES
from agentlightning_plugins.store_server.answer import JSON_RULES, RefusedError

_LIST_KEYS: Final = frozenset({"status_in", "rollout_id_in", "kinds"})
"""Keys that may stand several times in a query string."""
_JSON_KEYS: Final = frozenset({"metadata"})
"""Keys whose value in a query string is JSON."""


def body_reader(message: Any) -> Callable[[web.Request], Awaitable[Any]]:
    """What reads a body of this type.

    The reader raises ValidationError or RefusedError for one that is not JSON, not the message, or too large.
    """
    validate = TypeAdapter(message).validate_json

    async def read(request: web.Request) -> Any:
        body = await request.read() or b"{}"
        _check_json(body)
        content = validate(body, strict=True)
        if len(body) > MAX_ITEM_BYTES:
            _refuse_large_items(content)
        return content

    return read


def query_reader(message: Any) -> Callable[[web.Request], Awaitable[Any]]:
    """What reads a query string of this type; raises as ``body_reader``'s."""
    validate = TypeAdapter(message).validate_python

    async def read(request: web.Request) -> Any:
        return validate(read_query(request.query))

    return read


def read_query(query: MultiMapping[str]) -> dict[str, Any]:
    """A query string as a mapping whose values are not validated yet.

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
        return orjson.loads(query[key])
    except ValueError as error:
        raise RefusedError("malformed", f"{key}: not JSON: {error}") from error


def _check_json(body: bytes) -> None:
    """Refuses what pydantic would read although JSON has it not: NaN, and numbers that are infinite as a float."""
    try:
        orjson.loads(body)
    except ValueError as error:
        raise RefusedError("malformed", f"the body is not JSON: {error}. {JSON_RULES}") from error


def _refuse_large_items(content: Any) -> None:
    values = content.values() if isinstance(content, dict) else [content]
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            size = len(to_json(item))
            if size > MAX_ITEM_BYTES:
                raise RefusedError(
                    "too_large",
                    f"one {type(item).__name__} of {size} bytes is more than the {MAX_ITEM_BYTES} allowed; store large "
                    "content elsewhere and send its address",
                )
