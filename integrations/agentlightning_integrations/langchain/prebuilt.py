"""Agents that are graphs of a fixed form: ``create_agent`` of LangChain and ``create_react_agent`` of LangGraph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from langchain_core.messages import SystemMessage

from agentlightning_plugins.shared.instrumentation import Patches

AGENT_NAME: Final = "lc_agent_name"
INTEGRATION: Final = "ls_integration"
CREATE_AGENT: Final = "langchain_create_agent"
"""The metadata that ``create_agent`` gives its runs since LangChain 1.2."""


def read_name(graph: Any) -> str | None:
    """The name that an agent was given; None for a graph of another kind."""
    if _model_node(graph) is None or graph.name == "LangGraph":  # the default name
        return None
    return str(graph.name)


def read_system_prompt(graph: Any) -> SystemMessage | str | None:
    """An agent's system prompt; None if it has none, or if a function makes it.

    A message is the very object that the agent sends, unless a middleware replaces it; a text becomes a new message.
    """
    function = _model_node(graph)
    if function is None:
        return None
    variables: Mapping[str, Any] = inspect.getclosurevars(function).nonlocals
    found = variables.get("system_message", variables.get("system_prompt"))  # a text before LangChain 1.1
    sequence = variables.get("static_model", variables.get("model_runnable"))  # of create_react_agent
    if (make_messages := getattr(getattr(sequence, "first", None), "func", None)) is not None:
        variables = inspect.getclosurevars(make_messages).nonlocals
        found = variables.get("_system_message", variables.get("prompt"))
    return found if isinstance(found, (SystemMessage, str)) else None


def _model_node(graph: Any) -> Callable[..., Any] | None:
    """The function that calls the model of an agent."""
    for name in ("model", "agent"):
        function = getattr(getattr(graph.nodes.get(name), "bound", None), "func", None)
        if inspect.isfunction(function) and function.__qualname__.startswith(("create_agent.", "create_react_agent.")):
            return function
    return None


def instrument() -> Callable[[], None]:
    """Adds the metadata of ``create_agent`` to the runs of every agent, whichever version built the agent."""
    from langgraph.pregel import Pregel

    def mark(wrapped: Callable[..., Any], graph: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _model_node(graph) is None or INTEGRATION in ((graph.config or {}).get("metadata") or {}):
            return wrapped(*args, **kwargs)
        given, config, *rest = args if len(args) > 1 else (args[0] if args else kwargs.pop("input"), None)
        config = kwargs.pop("config", None) or config or {}
        name = read_name(graph)
        mine = {INTEGRATION: CREATE_AGENT, **({} if name is None else {AGENT_NAME: name})}
        return wrapped(given, {**config, "metadata": {**(config.get("metadata") or {}), **mine}}, *rest, **kwargs)

    patches = Patches()
    for name in ("stream", "astream"):
        patches.wrap(Pregel, name, mark)
    return patches.undo
