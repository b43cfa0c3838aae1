"""``AgentOpsTracer``: AgentOps' instrumentation and decorators, without its cloud.

AgentOps 0.4.21 is not initialised: that would replace ``print`` and ``__import__``, set up an exporter that breaks with
OpenTelemetry 1.45, and send data to its cloud. Instead, its instrumentors and its core use our provider, so that
``@agent``, ``@operation`` and the other decorators are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

from opentelemetry.sdk.trace import TracerProvider

from agentlightning_plugins.shared.instrumentation import OnImport, Undo, instrument_and_restore
from agentlightning_plugins.tracers.shared.tracer import OtelTracer

_BROKEN: Final = frozenset({"langgraph"})
"""AgentOps' instrumentor of LangGraph breaks ``create_agent``; without it the model calls are still recorded."""


class AgentOpsTracer(OtelTracer):
    """Uses AgentOps' instrumentors and decorators instead of our own plugins; nothing leaves the machine.

    Each instrumentor is switched on when its library is imported, before or after ``init``. Do not call
    ``agentops.init``: it signs in to AgentOps' cloud. The decorators need ``join_global_provider``.
    """

    name = "agentops"

    def _source(self) -> Hashable:
        return self.name

    def _instrument(self, provider: TracerProvider) -> Iterator[Undo]:
        from agentops.instrumentation import AGENTIC_LIBRARIES, PROVIDERS

        yield _set_provider(provider)
        for module, config in {**PROVIDERS, **AGENTIC_LIBRARIES}.items():
            if module not in _BROKEN:
                yield OnImport(module, functools.partial(_instrument, module, config, provider)).undo


def _set_provider(provider: TracerProvider) -> Undo:
    """Makes AgentOps' core use our provider as if AgentOps had been initialised."""
    import agentops.sdk.core as core

    tracer: Any = core.tracer
    before = tracer.provider, tracer._initialized, core.log_trace_url
    tracer.provider, tracer._initialized = provider, True
    core.log_trace_url = lambda *args, **kwargs: None  # the page in AgentOps' cloud does not exist

    def undo() -> None:
        if tracer.provider is provider:
            tracer.provider, tracer._initialized, core.log_trace_url = before

    return undo


def _instrument(package: str, config: Mapping[str, Any], provider: TracerProvider) -> Undo | None:
    from agentops.instrumentation import InstrumentorLoader
    from opentelemetry.metrics import NoOpMeterProvider

    loader = InstrumentorLoader(**config)
    if not loader.should_activate:  # AgentOps does not support the installed version
        return None
    instrumentor: Any = loader.get_instance()
    instrument = functools.partial(
        instrumentor.instrument, tracer_provider=provider, meter_provider=NoOpMeterProvider()
    )
    return instrument_and_restore(package, instrument, instrumentor.uninstrument)
