"""Exports spans to Jaeger, Phoenix, Langfuse or any other OTLP endpoint, in addition to the store."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger("agentlightning")

_DISTRIBUTION: Final = "opentelemetry-exporter-otlp-proto-http"
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MAX_QUEUED: Final = 16384
"""Spans that may wait for a slow endpoint. The exporter drops further ones with a warning; the store keeps them."""
_MAX_SHUTDOWN_S: Final = 5.0


class Target(NamedTuple):
    """An OTLP endpoint."""

    endpoint: str | None
    """None: OpenTelemetry's own environment variables name it."""
    headers: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Target({self.endpoint!r}, {len(self.headers)} headers)"  # headers hold keys


def find_target(endpoint: str | None, headers: Mapping[str, str] | None) -> Target | None:
    """Finds the endpoint that gets spans in addition to the store: the given one, else the environment's, else None.

    Raises:
        ConfigError: ``endpoint`` is not a URL, or headers are given without it.
        PluginError: the exporter is not installed.
    """
    if endpoint:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"otlp_endpoint = {endpoint!r}: give an http(s) URL such as http://127.0.0.1:4318/v1/traces"
            )
        if url.path in ("", "/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        if not _is_installed():
            raise PluginError(f"otlp_endpoint needs {_DISTRIBUTION}. Install with: pip install 'lightning[otlp]'")
        return Target(endpoint, tuple(sorted((headers or {}).items())))
    if headers:
        raise ConfigError("headers are sent to otlp_endpoint: give otlp_endpoint too")
    variable = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if endpoint is not None or variable is None:
        return None
    if not _is_installed():
        logger.warning("%s is set, but spans are not exported: pip install 'lightning[otlp]'", variable)
        return None
    return Target(None)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def open_exporter(target: Target) -> SpanProcessor:
    """Creates an exporter, which sends in its own thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=target.endpoint, headers=dict(target.headers) or None)
    return BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED, schedule_delay_millis=500)


def close_exporter(exporter: SpanProcessor) -> None:
    """Sends the remaining spans, for a few seconds at most."""
    # BatchSpanProcessor.shutdown takes no timeout, and its exporter may retry for a minute.
    closing = threading.Thread(target=exporter.shutdown, name="agl-otlp-shutdown", daemon=True)
    closing.start()
    closing.join(_MAX_SHUTDOWN_S)
    if closing.is_alive():
        logger.warning("the OTLP endpoint did not take the last spans in time; the store has them")
