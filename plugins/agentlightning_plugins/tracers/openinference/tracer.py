"""``OpenInferenceTracer``: OpenInference's instrumentation as the source of spans."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import ConfigError, suggest
from agentlightning_plugins.tracers.opentelemetry.library_source import Library
from agentlightning_plugins.tracers.opentelemetry.pipeline import Undo
from agentlightning_plugins.tracers.opentelemetry.tracer import OtelTracer

GROUP: Final = "openinference_instrumentor"
_MODULES: Final = {
    "langchain": "langchain_core",
    "llama_index": "llama_index.core",
    "openai_agents": "agents",
}
"""The module of a library where its instrumentor has another name."""
_LONGEST_IMAGE: Final = 2**30
"""Characters; OpenInference cuts images out of prompts by default, and a cut prompt cannot be trained on."""


class OpenInferenceTracer(OtelTracer):
    """Records what the installed ``openinference-instrumentation-*`` packages see, instead of our own plugins.

    Each is switched on when its library is imported, before us or after. With the gateway's spans of the same calls
    there is a triplet for each call, as with the default tracer.
    """

    def __init__(
        self,
        instrumentors: Sequence[str] | None = None,
        join_global_provider: bool = True,
        *,
        otlp_endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Makes a tracer.

        Args:
            instrumentors: names of those to use, such as ``["openai", "langchain"]``; default is all that are
                installed.
            join_global_provider: as ``OtelTracer`` takes it.
            otlp_endpoint: as ``OtelTracer`` takes it.
            headers: as ``OtelTracer`` takes them.

        Raises:
            ConfigError: an instrumentor that is not installed, or as ``OtelTracer``.
        """
        super().__init__(join_global_provider, otlp_endpoint=otlp_endpoint, headers=headers)
        installed = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
        for name in instrumentors or ():
            if name not in installed:
                known = ", ".join(sorted(installed)) or "none"
                raise ConfigError(
                    f"no OpenInference instrumentor {name!r}.{suggest(name, installed)} Installed: {known}. Each comes "
                    "with a package openinference-instrumentation-<name>"
                )
        self.instrumentors = tuple(sorted(installed if instrumentors is None else instrumentors))

    def _source(self) -> Hashable:
        return ("openinference", self.instrumentors)

    def _instrument(self, provider: TracerProvider) -> Iterator[Undo]:
        points = importlib.metadata.entry_points(group=GROUP)
        for point in points:
            if point.name in self.instrumentors:
                yield Library(_MODULES.get(point.name, point.name), _beginning(point, provider)).turn_off


def _beginning(point: importlib.metadata.EntryPoint, provider: TracerProvider) -> Callable[[], Undo | None]:
    def begin() -> Undo | None:
        from openinference.instrumentation import TraceConfig

        instrumentor: Any = point.load()()
        if instrumentor.is_instrumented_by_opentelemetry:  # by the user, and then it is theirs to undo
            return None
        instrumentor.instrument(tracer_provider=provider, config=TraceConfig(base64_image_max_length=_LONGEST_IMAGE))
        undo: Undo = instrumentor.uninstrument
        return undo

    return begin
