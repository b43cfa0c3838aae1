"""Agents that an agent hands over to, or uses as tools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from agents import FunctionTool, Handoff, RunConfig
from agents.run import AgentRunner
from agents.tool_context import ToolContext
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

run_config: ContextVar[RunConfig | None] = ContextVar("agentlightning_openai_agents_config", default=None)
"""The configuration of the rollout, for runs that tools start."""


def agent_behind(part: Any) -> Any:
    """Returns the agent of a handoff or of a tool, or None; before version 0.8 of the SDK, a closure holds it."""
    if isinstance(part, Handoff):
        reference = getattr(part, "_agent_ref", None)
        return _closed_over(part.on_invoke_handoff, "agent") if reference is None else reference()
    if isinstance(part, FunctionTool) and not hasattr(part, "_agent_instance"):
        return _closed_over(part.on_invoke_tool, "_on_invoke_tool_impl", "the_func", "self")
    return getattr(part, "_agent_instance", None)


def _closed_over(function: Any, *names: str) -> Any:
    """Follows variables of closures, by their names, from function to function."""
    for name in names:
        function = inspect.getclosurevars(function).nonlocals.get(name) if inspect.isfunction(function) else None
    return function


@functools.cache
def pass_configuration_on() -> None:
    """Makes agents used as tools run with the configuration of their rollout, as the SDK does since version 0.8.4."""
    if "run_config" in inspect.signature(ToolContext).parameters:
        return

    def run(wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "run_config": kwargs.get("run_config") or run_config.get()})

    wrap_function_wrapper(AgentRunner, "run", run)
