"""The hooks. Lightning imports this module in every process, so it imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from agentlightning import LitAgent
from agentlightning.plugin import Component, WrapOptions, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [Component("store", "folder", "lightning_acme.store:FolderStore", summary="a folder, for small runs")]


@hookimpl
def wrap_agent(agent: Any, options: WrapOptions) -> LitAgent[Any] | None:
    framework = sys.modules.get("acme_agents")  # an assistant exists only where its module has been imported
    if framework is None or not isinstance(agent, framework.Assistant):
        return None
    from lightning_acme.integration import AssistantAgent

    return AssistantAgent(agent, options)
