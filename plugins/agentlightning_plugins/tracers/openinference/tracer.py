"""``OpenInferenceTracer``: records spans of OpenInference's instrumentors."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import ConfigError, suggest
from agentlightning_plugins.shared.instrumentation import OnImport, Undo, instrument_and_restore
from agentlightning_plugins.tracers.shared.tracer import OtelTracer

GROUP: Final = "openinference_instrumentor"
_MODULES: Final = {"langchain": "langchain_core", "llama_index": "llama_index.core", "openai_agents": "agents"}
"""The module that an instrumentor instruments, where the instrumentor has another name."""
_MAX_IMAGE_CHARS: Final = 2**30
"""Practically no limit: OpenInference's default cuts images out of prompts, which then cannot be trained on."""


class OpenInferenceTracer(OtelTracer):
    """Uses the installed ``openinference-instrumentation-*`` packages instead of our own plugins.

    Each is switched on when its library is imported, before or after ``init``. Combined with the gateway's spans of the
    same calls there is one triplet for each call, as with the default tracer.
    """

    def __init__(
        self,
        instrumentors: Sequence[str] | None = None,
        join_global_provider: bool = True,
        *,
        otlp_endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Takes names of instrumentors, such as ``["openai", "langchain"]``; default is all that are installed.

        The other arguments are as for ``OtelTracer``.

        Raises:
            ConfigError: an instrumentor is not installed, or as for ``OtelTracer``.
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
        for point in importlib.metadata.entry_points(group=GROUP):
            if point.name in self.instrumentors:
                module = _MODULES.get(point.name) or _find_module(point.name)
                start = functools.partial(_instrument, point, provider, module)
                yield (start() or _do_nothing) if module is None else OnImport(module, start).undo


def _find_module(name: str) -> str | None:
    """Returns the module that an instrumentor instruments; None if its name does not tell."""
    for module in (name, name.replace("_", ".")):  # google_adk instruments google.adk
        with contextlib.suppress(ImportError):
            if importlib.util.find_spec(module) is not None:
                return module
    return None


def _do_nothing() -> None: ...


def _instrument(point: importlib.metadata.EntryPoint, provider: TracerProvider, module: str | None) -> Undo | None:
    from openinference.instrumentation import TraceConfig

    instrumentor: Any = point.load()()
    if instrumentor.is_instrumented_by_opentelemetry:  # by the user, who undoes it
        return None
    config = TraceConfig(base64_image_max_length=_MAX_IMAGE_CHARS)
    start = functools.partial(instrumentor.instrument, tracer_provider=provider, config=config)
    # DSPy's removes decorators of DSPy, too.
    return instrument_and_restore(module or point.name, start, instrumentor.uninstrument)
