"""``FrameworkAgent``: what an integration of an agent framework supplies, and what it gets for free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from agentlightning.errors import ConfigError, suggest
from agentlightning.litagent.agent import LitAgent
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM, NamedResources, PromptTemplate, scope_to_attempt
from agentlightning.types import Rollout

A = TypeVar("A")


class FrameworkAgent(LitAgent[Any], Generic[A]):
    """A framework's own object as an agent. An integration overrides ``texts`` and one of ``run`` and ``run_async``.

    One instance serves many rollouts at once: what is changed for one of them, its endpoint and its prompts, must show
    in that rollout alone. The result of a rollout is the framework's, for the reward function; ``wrap`` drops it where
    there is none.
    """

    def __init__(self, agent: A, options: WrapOptions) -> None:
        """Takes the object.

        Args:
            agent: the framework's; never changed.
            options: what the user said about it.

        Raises:
            ConfigError: ``options.prompts`` names a text that the object does not have.
        """
        self.agent = agent
        texts = self.texts()
        self._prompts = {path: _read_prompt(path, value, texts) for path, value in options.prompts.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        from agentlightning.litagent import pickling

        return _restore, (type(self), pickling.dump(vars(self)))

    def texts(self) -> Mapping[str, str]:
        """The texts of the object that can be tuned, by path, such as ``writer.instructions``."""
        return {}

    def run(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the object on one task, in a thread of its own.

        Args:
            task: the rollout's input, or what ``task_to_input`` made of it.
            llm: where model calls go, the attempt's own endpoint; None leaves the object's models as they are.
            texts: what to use instead of the object's own texts, by path: those that are tuned.

        Returns:
            The framework's own result.
        """
        raise ConfigError(f"{type(self).__name__} defines neither run nor run_async; define one of them")

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """As ``run``, awaited, for frameworks that await."""
        return self.run(task, llm, texts)

    @property
    def prompts(self) -> dict[str, PromptTemplate]:
        """What the tuned texts begin as, by the name of their resource."""
        return dict(self._prompts.values())

    def is_async(self) -> bool:
        """Whether ``run_async`` is what the integration defines."""
        return type(self).run_async is not FrameworkAgent.run_async

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        """Runs the object with this rollout's endpoint and prompts; returns the framework's own result."""
        return self.run(task, *self._read(task, resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        """As ``rollout``, awaited."""
        return await self.run_async(task, *self._read(task, resources, rollout))

    def _read(self, task: Any, resources: NamedResources, rollout: Rollout) -> tuple[LLM | None, dict[str, str]]:
        texts = {}
        for path, (name, initial) in self._prompts.items():
            template = resources.get(name, initial)
            if not isinstance(template, PromptTemplate):
                kind = type(template).__name__
                raise ConfigError(f"prompt {path!r} comes from the resource {name!r}, which is a {kind}, no prompt")
            texts[path] = template.format(**{"task": task, **_fields(rollout.input), **_fields(task)})
        return _choose_llm(scope_to_attempt(resources, rollout)), texts


def _restore(cls: type[FrameworkAgent[Any]], state: bytes) -> FrameworkAgent[Any]:
    from agentlightning.litagent import pickling

    agent = cls.__new__(cls)
    vars(agent).update(pickling.load(state))
    return agent


def _read_prompt(path: str, value: str | PromptTemplate | None, texts: Mapping[str, str]) -> tuple[str, PromptTemplate]:
    """The name of the resource that a text comes from, and what it begins as."""
    if path not in texts:
        known = ", ".join(sorted(texts)) or "none"
        raise ConfigError(f"prompts: the object has no text {path!r}.{suggest(path, texts)} Its texts: {known}")
    if isinstance(value, PromptTemplate):
        return path, value
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"prompts[{path!r}] = {value!r}: give the text to begin with, the name of the resource that holds it, or "
            "None to begin with the object's own text"
        )
    if value is not None and len(value.split()) > 1:
        return path, PromptTemplate(value)
    own = texts[path].replace("{", "{{").replace("}", "}}")  # its braces are meant as they stand
    return value or path, PromptTemplate(own)


def _fields(task: Any) -> dict[str, Any]:
    """What a prompt may mention of a task, by name."""
    if not isinstance(task, Mapping):
        return {}
    return {name: value for name, value in task.items() if isinstance(name, str) and name != "self"}


def _choose_llm(resources: NamedResources) -> LLM | None:
    models = {name: resource for name, resource in resources.items() if isinstance(resource, LLM)}
    if "llm" in models or len(models) < 2:
        return models.get("llm") or next(iter(models.values()), None)
    raise ConfigError(
        f"{len(models)} models could be meant: {', '.join(sorted(models))}. Name the one for this agent 'llm'"
    )
