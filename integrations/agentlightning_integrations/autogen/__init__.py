"""AutoGen: see ``agent.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(package="autogen_agentchat", module="agentlightning_integrations.autogen.agent", extra="autogen")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "autogen", f"{__name__}:READER", summary="names of AutoGen's agents")]


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_AGENT_NAME: lambda span: span.attributes.get("recipient_agent_type")
}
