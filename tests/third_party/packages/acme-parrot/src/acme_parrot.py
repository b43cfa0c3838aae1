"""Parrot, an agent framework: its integration, an agent with settings, callbacks, and its files of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.plugin import Component, FrameworkAgent, WrapOptions, hookimpl

plugin_interface = 1
instrumented: list[Any] = []


class Parrot:
    """An object of the framework."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    def say(self, words: str, callbacks: list[Callable[[str], None]] | None = None) -> str:
        for callback in callbacks or []:
            callback(words)
        return f"{self.greeting} {words}"


class WrappedParrot(FrameworkAgent[Parrot]):
    def texts(self) -> Mapping[str, str]:
        return {"greeting": self.agent.greeting}

    def run(self, task: Any, llm: agl.LLM | None, texts: Mapping[str, str]) -> Any:
        return Parrot(texts.get("greeting", self.agent.greeting)).say(str(task))


class ParrotAgent(agl.LitAgent[Any]):
    """An agent that is built from settings, for configurations."""

    returns_output = True

    def __init__(self, *, greeting: str = "Polly") -> None:
        self.parrot = Parrot(greeting)

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        return self.parrot.say(str(task))


def make_callback(tracer_provider: Any) -> Callable[[str], None]:
    tracer = tracer_provider.get_tracer("parrot")

    def callback(words: str) -> None:
        tracer.start_span("parrot.say", attributes={"words": words}).end()

    return callback


def read_seeds(source: str, *, limit: int | None = None) -> list[str]:
    """Reads ``.seeds`` files: a task in each line."""
    return Path(source).read_text().splitlines()[:limit]


@hookimpl
def wrap_agent(agent: Any, options: WrapOptions) -> agl.LitAgent[Any] | None:
    return WrappedParrot(agent, options) if isinstance(agent, Parrot) else None


@hookimpl
def instrument(tracer_provider: Any) -> Callable[[], None]:
    instrumented.append(tracer_provider)
    return lambda: instrumented.remove(tracer_provider)


@hookimpl
def components() -> list[Component]:
    return [
        Component("agent", "parrot", f"{__name__}:ParrotAgent", summary="repeats the task"),
        Component("handler", "parrot", f"{__name__}:make_callback", summary="Parrot's words as spans"),
        Component("dataset", "seeds", f"{__name__}:read_seeds", summary="a task in each line"),
    ]
