"""Environments as agents, and their kinds and addresses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from agentlightning.environment import Environment
from agentlightning.errors import ConfigError, suggest
from agentlightning.litagent import LitAgent, wrap
from agentlightning.plugin.hookspecs import Component, WrapOptions, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import bind_settings
from agentlightning_plugins.shared.configuration.sources import load_attribute

_OF_LOOP: Final = ("action", "instructions", "max_turns", "seeds", "timeout_s")
"""The settings of every environment."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:make_agent"
    return [Component("agent", "environment", target, extra="openai", summary="plays episodes of an environment")]


@hookimpl
def wrap_agent(agent: Any, options: WrapOptions) -> Any:
    if not isinstance(agent, Environment):
        return None
    get_manager().get("agent", "environment")  # its extra is installed
    from agentlightning_plugins.shared.environments.agent import EnvironmentAgent

    return EnvironmentAgent(agent, options)


def make_agent(
    environment: Environment | str | Mapping[str, Any], *, prompts: Sequence[str] | Mapping[str, str | None] = ()
) -> LitAgent[Any]:
    """Makes the agent of an environment.

    Args:
        environment: the environment; the name of a kind and its address, such as ``gymnasium:FrozenLake-v1``;
            ``module:attribute`` of an Environment; or a mapping of one kind to its address (``{"mcp": ["my-server"]}``)
            with settings of this kind, and ``action``, ``instructions``, ``max_turns``, ``seeds`` and ``timeout_s`` of
            any (see ``agl.Environment``).
        prompts: as in ``agl.wrap``; the only text is ``instructions``.

    Raises:
        ConfigError: there is no such kind, or a setting is invalid.
    """
    if not isinstance(environment, Environment):
        given = dict(environment) if isinstance(environment, Mapping) else {}
        prompts = given.pop("prompts", prompts)
        environment = make_environment(given or environment)
    return wrap(environment, prompts=prompts or None)


def make_environment(spec: str | Mapping[str, Any]) -> Environment:
    """Makes an environment from its address, alone or with settings, as in ``make_agent``."""
    manager = get_manager()
    kinds = manager.components("environment")
    settings = dict(spec) if isinstance(spec, Mapping) else {}
    of_loop = {key: settings.pop(key) for key in _OF_LOOP if key in settings}
    (name, address), *_ = [(key, settings[key]) for key in ("target", *kinds) if key in settings] or [("", None)]
    settings.pop(name, None)
    if isinstance(spec, str):
        name, _, address = spec.partition(":")
        name, address = (name, address) if name in kinds and address else ("target", spec)
    if not name:
        raise ConfigError(
            f"environment = {spec!r}: name a kind with its address; the kinds: {', '.join(kinds)}; or a target"
        )
    if name != "target":
        environment: Environment = manager.create("environment", {"name": name, "address": address, **settings})
    else:
        environment = _load(address, settings, kinds)
    for key, value in of_loop.items():
        setattr(environment, key, value)
    return environment


def _load(target: Any, settings: Mapping[str, Any], kinds: Collection[str]) -> Environment:
    """Returns the environment ``module:attribute``, or one of this class."""
    try:
        found = load_attribute(str(target))
    except ConfigError as error:
        hint = suggest(str(target).partition(":")[0], kinds)
        raise ConfigError(f"environment = {error}.{hint} Kinds of environments: {', '.join(kinds)}.") from error
    if callable(found):
        found = found(**bind_settings(found, settings, f"the environment {target!r}"))
    elif settings:
        given = ", ".join(settings)
        raise ConfigError(f"the environment {target!r} is an object and takes no settings; remove {given}")
    if not isinstance(found, Environment):
        raise ConfigError(f"{target!r} is a {type(found).__name__}, not an agl.Environment")
    return found
