"""The operator's endpoints: health, metrics and status, and pausing while weights change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.access.authentication import Authenticator
from agentlightning_plugins.gateway.backends.backend import ModelTable
from agentlightning_plugins.gateway.dialects.json_text import dump_json
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.limits.admission import Admission
from agentlightning_plugins.gateway.recording.call import Call
from agentlightning_plugins.gateway.recording.metric import CONTENT_TYPE, GatewayMetrics, count_by_backend
from agentlightning_plugins.http_request import RequestError, parse_json, read_body

CONTROL_PATHS: Final = ("health", "metrics", "status", "pause", "drain", "resume")
_CHANGES: Final = ("pause", "drain", "resume")
_MAX_BODY: Final = 10_000
_DRAIN_S: Final = 60.0
_MAX_DRAIN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Controls:
    """Answers requests to ``CONTROL_PATHS``."""

    authenticator: Authenticator
    admission: Admission
    metrics: GatewayMetrics
    status: Callable[[], Awaitable[dict[str, Any]]]

    async def answer(self, request: web.BaseRequest, path: str) -> web.Response:
        if path == "health":
            return json_response({"status": "paused" if self.admission.is_paused else "ok"})
        if not self.authenticator.is_operator(request.headers, always=path in _CHANGES):
            return _refuse(401, f"/{path} requires the token of the gateway's store, or its own key", "wrong_key")
        if path == "status":
            return json_response(await self.status())
        if path == "metrics":
            return web.Response(body=await self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
        if request.method != "POST":
            return _refuse(405, f"/{path} takes POST, not {request.method}", "method_not_allowed")
        if request.content_type != "application/json":  # web pages cannot send it to another origin without permission
            return _refuse(415, f"/{path} takes JSON with Content-Type: application/json", "invalid_request")
        try:
            return await self._change(path, await parse_json(await read_body(request, _MAX_BODY, _MAX_BODY) or b"{}"))
        except RequestError as error:
            return _refuse(error.status, f"/{path}: {error}", "invalid_request")
        except (ValueError, AttributeError) as error:
            return _refuse(400, f"/{path}: {error}", "invalid_request")

    async def _change(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "drain":
            timeout_s = body.get("timeout_s", _DRAIN_S)
            if type(timeout_s) not in (int, float) or not 0 <= timeout_s <= _MAX_DRAIN_S:
                raise ValueError(f"timeout_s is {timeout_s!r}; give seconds from 0 to {_MAX_DRAIN_S:g}")
            return json_response({"drained": await self.admission.drain(timeout_s)})
        if path == "pause":
            self.admission.pause()
        else:
            version = body.get("weight_version")
            if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
                raise ValueError(f"weight_version is {version!r}; give a whole number, or leave it out")
            self.admission.resume(version)
        return json_response(await self.status())


def describe_status(
    models: ModelTable, admission: Admission, running: Iterable[Call], writer: SpanWriter
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


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=dump_json(value), content_type="application/json")


def _refuse(status: int, message: str, code: str) -> web.Response:
    return json_response(CHAT.error_body(status, message, code), status)
