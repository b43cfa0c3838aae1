"""Commands as agents, and the sandboxes that they run in."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, Kind, hookimpl

_PACKAGE = "agentlightning_plugins.agents.command"
_SANDBOX = "agentlightning_plugins.shared.sandbox.sandbox"


@hookimpl
def kinds() -> list[Kind]:
    return [Kind("sandbox", f"{_SANDBOX}:Sandbox", "limits of the processes of an attempt")]


@hookimpl
def components() -> list[Component]:
    return [
        Component("agent", "command", f"{_PACKAGE}.agent:CommandAgent", summary="a command line in any language"),
        Component("sandbox", "subprocess", f"{_SANDBOX}:SubprocessSandbox", summary="limits of the system"),
        Component("sandbox", "docker", f"{_PACKAGE}.docker:DockerSandbox", summary="a container of docker or podman"),
    ]
