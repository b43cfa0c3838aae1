"""Microsoft Agent Framework: see ``agent.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(
    package="agent_framework", module="agentlightning_integrations.agent_framework.agent", extra="agent-framework"
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "agent-framework", f"{__name__}:READER", summary="Agent Framework's executors")]


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_AGENT_NAME: lambda span: span.attributes.get("executor.id")
}
