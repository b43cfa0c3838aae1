"""Answers: results as JSON, and every exception as ``{code, message}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from agentlightning.errors import ConflictError, NotFoundError, QuotaError, StorageFullError, StoreError
from agentlightning.types import PaginatedResult, Record
from agentlightning_plugins.shared.web.request import RequestRefused
from agentlightning_plugins.stores.http.message import ERRORS, ErrorCode

logger = logging.getLogger("agentlightning")

_COMPRESS_FROM_BYTES: Final = 16 * 1024
_MAX_MESSAGE: Final = 1500
_CODES: Final[dict[int, ErrorCode]] = {403: "forbidden", 413: "too_large"}
_JSON: Final = {"content-type": "application/json"}


class RefusedError(Exception):
    """A request that the server refuses before it reaches the store."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode(result: Any) -> bytes:
    """Encodes the result of a store method as JSON."""
    if isinstance(result, Record):
        return result.__pydantic_serializer__.to_json(result)
    if isinstance(result, PaginatedResult):
        result = {field: getattr(result, field) for field in type(result).model_fields}
    return to_json(result, inf_nan_mode="null")


def json_response(body: bytes, status: int = 200) -> web.Response:
    """Makes an answer whose body is already JSON."""
    response = web.Response(body=body, status=status, headers=_JSON)
    if len(body) >= _COMPRESS_FROM_BYTES:
        response.enable_compression()  # if the client accepts it
    return response


def describe_error(request: web.Request, error: Exception) -> tuple[ErrorCode, str, int]:
    """Returns the code, message and HTTP status of an exception. Logs the server's own faults."""
    code, message = _explain(request, error)
    message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."  # it may quote the request
    status = error.status if code == "no_route" and isinstance(error, web.HTTPException) else ERRORS[code][0]
    return code, message, status


def error_response(request: web.Request, error: Exception) -> web.Response:
    """Makes the answer to a request that raised ``error``."""
    code, message, status = describe_error(request, error)
    response = json_response(to_json({"code": code, "message": message}), status)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["allow"] = ", ".join(sorted(error.allowed_methods))
    return response


def _explain(request: web.Request, error: Exception) -> tuple[ErrorCode, str]:
    match error:
        case RefusedError():
            return error.code, str(error)
        case RequestRefused():
            return _CODES.get(error.status, "malformed"), str(error)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return "no_route", f"{request.method} {request.path}: allowed methods are {allowed}"
        case web.HTTPException():
            return "no_route", f"{request.method} {request.path}: {error.reason}"
        case web.RequestPayloadError() | BadHttpMessage():
            return "malformed", f"the body cannot be read: {error}"
        case NotFoundError():
            return "not_found", str(error)
        case ConflictError():
            return "conflict", str(error)
        case StorageFullError():
            return "storage_full", str(error)
        case StoreError():  # the database is locked or unreachable; nothing was written
            # The backend logs an outage once; its client gets the error at each request.
            logger.info("%s %s: %s", request.method, request.path, error)
            return "store_failed", str(error)
        case QuotaError():
            return "over_quota", str(error)
        case ValidationError():
            return _explain_invalid(error)
        case PydanticSerializationError():
            logger.error("%s %s: the stored value is not JSON: %s", request.method, request.path, error)
            return "internal", f"the stored value cannot be sent because it is not JSON: {error}"
        case ValueError():
            return "invalid", str(error)
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return "internal", "the store failed; see its log"


def _explain_invalid(error: ValidationError) -> tuple[ErrorCode, str]:
    """Returns the first three problems, each with its place: ``rollouts.0.mode: Input should be ...``."""
    number = error.error_count()
    if number > _MAX_EXPLAINED:
        return "invalid", f"the message has {number} problems; send fewer items to see them"
    problems: list[Mapping[str, Any]] = [*error.errors(include_url=False, include_context=False, include_input=False)]
    if problems[0]["type"] == "json_invalid":
        return "malformed", f"the body is not JSON: {problems[0]['msg']}. {JSON_RULES}"
    shown = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:3])
    return "invalid", shown if len(problems) <= 3 else f"{shown}; and {len(problems) - 3} more"


_MAX_EXPLAINED: Final = 1000
"""Maximum number of problems that are described: each description takes memory."""
JSON_RULES: Final = "JSON is UTF-8 and has no NaN and no Infinity"
