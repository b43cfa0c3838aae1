"""``AgentOpsTracer``: AgentOps' instrumentation and decorators, without its cloud.

AgentOps 0.4.21 is not initialised: that would replace ``print`` and ``__import__``, set up an exporter that breaks with
OpenTelemetry 1.45, and call home. Its instrumentors report to our provider instead, and its core is lent this provider,
so that ``@agent``, ``@operation`` and their like are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Final

from opentelemetry.sdk.trace import TracerProvider

from agentlightning_plugins.tracers.opentelemetry.library_source import Library, Methods
from agentlightning_plugins.tracers.opentelemetry.pipeline import Undo
from agentlightning_plugins.tracers.opentelemetry.tracer import OtelTracer

_BROKEN: Final = frozenset({"langgraph"})
"""AgentOps' instrumentor of LangGraph makes ``create_agent`` fail; the models it calls are recorded all the same."""


class AgentOpsTracer(OtelTracer):
    """Records what AgentOps' instrumentors and decorators see, instead of our own plugins; nothing leaves the machine.

    Each library is switched on when it is imported, before us or after. Do not call ``agentops.init``: it signs in to
    AgentOps' cloud.
    """

    def __init__(
        self,
        join_global_provider: bool = True,
        *,
        otlp_endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """As ``OtelTracer`` takes them; its decorators need ``join_global_provider``."""
        super().__init__(join_global_provider, otlp_endpoint=otlp_endpoint, headers=headers)

    def _source(self) -> Hashable:
        return "agentops"

    def _instrument(self, provider: TracerProvider) -> Iterator[Undo]:
        from agentops.instrumentation import AGENTIC_LIBRARIES, PROVIDERS

        yield _lend(provider)
        for module, config in {**PROVIDERS, **AGENTIC_LIBRARIES}.items():
            if module not in _BROKEN:
                yield Library(module, _beginning(module, config, provider)).turn_off


def _lend(provider: TracerProvider) -> Undo:
    """Makes AgentOps' core believe that it was initialised with our provider."""
    import agentops.sdk.core as core

    tracer: Any = core.tracer
    before = tracer.provider, tracer._initialized, core.log_trace_url
    tracer.provider, tracer._initialized = provider, True
    core.log_trace_url = _say_nothing

    def undo() -> None:
        if tracer.provider is provider:
            tracer.provider, tracer._initialized, core.log_trace_url = before

    return undo


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of printing the address of a page in AgentOps' cloud that will never be there."""


def _beginning(package: str, config: Mapping[str, Any], provider: TracerProvider) -> Callable[[], Undo | None]:
    def begin() -> Undo | None:
        from agentops.instrumentation import InstrumentorLoader
        from opentelemetry.metrics import NoOpMeterProvider

        loader = InstrumentorLoader(**config)
        if not loader.should_activate:  # another version than it knows
            return None
        methods = Methods(package)  # AgentOps leaves its wrappers behind
        instrumentor: Any = loader.get_instance()
        instrumentor.instrument(tracer_provider=provider, meter_provider=NoOpMeterProvider())
        methods.compare()
        return functools.partial(methods.restore, instrumentor.uninstrument)

    return begin
