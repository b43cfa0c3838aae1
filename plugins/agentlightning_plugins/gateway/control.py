"""The endpoints other than model calls: the list of models, health, metrics, status, and pauses."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from aiohttp import web

from agentlightning.store.span_writer import AttemptKey, SpanWriter
from agentlightning_plugins.gateway.access import Authenticator
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.call import ModelCall
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.gateway.dialects.wire import dump_json
from agentlightning_plugins.gateway.limits import Admission
from agentlightning_plugins.gateway.recorder import GatewayMetrics, count_by_backend
from agentlightning_plugins.shared.web.metrics import CONTENT_TYPE
from agentlightning_plugins.shared.web.request import RequestRefused, parse_json, read_body

CONTROL_PATHS: Final = ("health", "metrics", "status", "pause", "drain", "resume")
_CHANGES: Final = ("pause", "drain", "resume")
_MAX_BODY: Final = 10_000
_DRAIN_S: Final = 60.0
_MAX_DRAIN_S: Final = 600.0


class Controls:
    """Answers requests that are not model calls."""

    def __init__(
        self,
        authenticator: Authenticator,
        admission: Admission,
        metrics: GatewayMetrics,
        status: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._authenticator = authenticator
        self._admission = admission
        self._metrics = metrics
        self._status = status

    async def answer(
        self,
        request: web.BaseRequest,
        path: str,
        named: AttemptKey | None,
        models: Sequence[str],
        routes: Iterable[str],
    ) -> web.Response:
        """Answers a request for a path below the attempt ``named``; errors list ``routes``, the paths of model calls.

        Raises:
            CallRefused: the client may not send the request, or it is malformed, or its path is unknown.
        """
        listed = list_models(path, models)
        if listed is not None:
            if not self._authenticator.is_operator(request.headers):
                self._authenticator.authenticate(request.headers, named)
            return json_response(listed)
        if path == "health":
            return json_response({"status": "paused" if self._admission.is_paused else "ok"})
        if path not in CONTROL_PATHS:
            known = ", ".join(f"/{known}" for known in (*routes, "v1/models", *CONTROL_PATHS))
            raise CallRefused(404, f"no endpoint {request.method} {request.path}; endpoints: {known}", "not_found")
        if not self._authenticator.is_operator(request.headers, always=path in _CHANGES):
            raise CallRefused(401, f"/{path} requires the token of the gateway's store, or its own key", "wrong_key")
        if path == "status":
            return json_response(await self._status())
        if path == "metrics":
            return web.Response(body=await self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
        if request.method != "POST":
            raise CallRefused(405, f"/{path} takes POST, not {request.method}", "method_not_allowed")
        if request.content_type != "application/json":  # web pages cannot send it to another origin without permission
            raise CallRefused(415, f"/{path} takes JSON with Content-Type: application/json", "invalid_request")
        try:
            return await self._change(path, await parse_json(await read_body(request, _MAX_BODY, _MAX_BODY) or b"{}"))
        except RequestRefused as error:
            raise CallRefused(error.status, f"/{path}: {error}", "invalid_request") from None
        except (ValueError, AttributeError) as error:
            raise CallRefused(400, f"/{path}: {error}", "invalid_request") from None

    async def _change(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "drain":
            timeout_s = body.get("timeout_s", _DRAIN_S)
            if type(timeout_s) not in (int, float) or not 0 <= timeout_s <= _MAX_DRAIN_S:
                raise ValueError(f"timeout_s is {timeout_s!r}; give seconds from 0 to {_MAX_DRAIN_S:g}")
            return json_response({"drained": await self._admission.drain(timeout_s)})
        if path == "pause":
            self._admission.pause()
        else:
            version = body.get("weight_version")
            if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
                raise ValueError(f"weight_version is {version!r}; give a whole number, or leave it out")
            self._admission.resume(version)
        return json_response(await self._status())


def describe_status(
    models: ModelTable, admission: Admission, running: Iterable[ModelCall], writer: SpanWriter
) -> dict[str, Any]:
    """Returns the state of a gateway as JSON, without keys: the content of ``/status``."""
    in_flight = count_by_backend(running)
    return {
        "backends": [
            {
                "model": backend.model,
                "endpoint": backend.endpoint,
                "served_model": backend.served_model,
                "provider": backend.provider.name,
                "weight": backend.weight,
                "up": backend.is_up,
                "failure": backend.failure,
                "in_flight": in_flight[backend.identity],
            }
            for backend in models.backends
        ],
        "paused": admission.is_paused,
        "in_flight": admission.in_flight,
        "waiting": admission.waiting,
        "weight_version": admission.weight_version,
        "spans_queued": writer.queued,
        "spans_lost": writer.lost,
    }


def json_response(value: Any) -> web.Response:
    return web.Response(body=dump_json(value), content_type="application/json")


_PATH: Final = re.compile(r"(anthropic/)?v1/models(?:/(.+))?")


def list_models(path: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Answers ``v1/models`` and ``v1/models/NAME``, also below ``anthropic/``; None for other paths and names."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    form = _anthropic_model if match[1] else _openai_model
    if match[2] is not None:
        return form(match[2]) if match[2] in names else None
    data = [form(name) for name in names]
    if not match[1]:
        return {"object": "list", "data": data}
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
