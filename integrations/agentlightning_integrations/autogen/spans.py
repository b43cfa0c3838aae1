"""Reads the names of agents from AutoGen's spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.records import Span

READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_AGENT_NAME: lambda span: span.attributes.get("recipient_agent_type")
}
