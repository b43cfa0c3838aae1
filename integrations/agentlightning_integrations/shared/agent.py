"""``FrameworkAgent``: the base class of agents that wrap an object of a framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Generic, TypeVar

from agentlightning import semconv
from agentlightning.errors import ConfigError, suggest
from agentlightning.litagent.agent import LitAgent
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM, NamedResources, PromptTemplate, scope_to_attempt
from agentlightning.types import Rollout
from agentlightning_integrations.shared.object_copy import dump, load

A = TypeVar("A")


class FrameworkAgent(LitAgent[Any], Generic[A]):
    """An object of a framework as an agent. An integration overrides ``texts`` and one of ``run`` and ``run_async``.

    One instance serves many rollouts concurrently: the endpoint and prompts of one rollout must not leak into another.
    A rollout returns the framework's own result, which the reward function receives.
    """

    returns_output: ClassVar[bool] = True

    def __init__(self, agent: A, options: WrapOptions) -> None:
        """Wraps the object.

        Args:
            agent: the framework's object; never changed.
            options: the options of ``agl.wrap``.

        Raises:
            ConfigError: ``options.prompts`` names a text that the object lacks, or a path with several different texts.
        """
        self.agent = agent
        texts = self.texts()
        self._prompts = {path: _read_prompt(path, value, texts) for path, value in options.prompts.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dump(vars(self)))

    def texts(self) -> Mapping[str, str | None]:
        """Returns the texts of the object that can be tuned, by path, such as ``writer.instructions``.

        None stands for a path with several different texts, which cannot be tuned; ``by_path`` finds such paths. Omit
        a path that has no text.
        """
        return {}

    def run(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the object on one task, in a separate thread.

        Args:
            task: the rollout's input, or the result of ``task_to_input``.
            llm: the attempt's own endpoint for model calls; None leaves the object's models as they are.
            texts: the tuned texts by path, to use instead of the object's own.

        Returns:
            The framework's own result.
        """
        raise ConfigError(f"{type(self).__name__} defines neither run nor run_async; define one of them")

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the object on one task, as ``run`` does, for async frameworks."""
        return self.run(task, llm, texts)

    def initial_prompts(self) -> dict[str, PromptTemplate]:
        return dict(self._prompts.values())

    def is_async(self) -> bool:
        """Whether the integration defines ``run_async``."""
        return type(self).run_async is not FrameworkAgent.run_async

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        return self.run(task, *self._read(task, resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        return await self.run_async(task, *self._read(task, resources, rollout))

    def _read(self, task: Any, resources: NamedResources, rollout: Rollout) -> tuple[LLM | None, dict[str, str]]:
        texts = {}
        for path, (name, initial) in self._prompts.items():
            template = resources.get(name, initial)
            if not isinstance(template, PromptTemplate):
                kind = type(template).__name__
                raise ConfigError(f"prompt {path!r} comes from the resource {name!r}, which is a {kind}, not a prompt")
            texts[path] = template.format(**{"task": task, **_fields(rollout.input), **_fields(task)})
        return _choose_llm(scope_to_attempt(resources, rollout)), texts


def _restore(cls: type[FrameworkAgent[Any]], state: bytes) -> FrameworkAgent[Any]:
    agent = cls.__new__(cls)
    vars(agent).update(load(state))
    return agent


def by_path(found: Iterable[tuple[str, str | None]]) -> dict[str, str | None]:
    """Returns texts by path; None for different texts with the same path, such as texts of agents with the same name.

    ``found`` has None for a part whose text is missing or made by code: the text of another part must not replace it.
    """
    texts: dict[str, set[str | None]] = {}
    for path, text in found:
        texts.setdefault(path, set()).add(text)
    return {path: own.pop() if len(own) == 1 else None for path, own in texts.items() if own != {None}}


def _read_prompt(
    path: str, value: str | PromptTemplate | None, texts: Mapping[str, str | None]
) -> tuple[str, PromptTemplate]:
    """Returns the name of the resource that holds a text, and its initial value."""
    if path not in texts:
        known = ", ".join(sorted(texts)) or "none"
        raise ConfigError(
            f"prompts: the object has no text {path!r}.{suggest(path, texts)} Its texts: {known}. To tune a text "
            "that code makes, such as callable instructions, write a function with @agl.rollout and the parameter "
            "prompt: agl.PromptTemplate"
        )
    text = texts[path]
    if text is None:
        raise ConfigError(
            f"prompts: the object has different texts at {path!r}, because several of its parts have the same name "
            "(no text, or one that code makes, counts as different). Give each agent, and each task of a crew, its own "
            "name (in CrewAI an agent's name is its role)"
        )
    if isinstance(value, PromptTemplate):
        return path, value
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"prompts[{path!r}] = {value!r}: give the initial text, the name of the resource that holds it, or None "
            "for the object's own text"
        )
    if value is not None and len(value.split()) > 1:
        return path, PromptTemplate(value)
    own = text.replace("{", "{{").replace("}", "}}")  # its braces are literal
    return value or path, PromptTemplate(own)


def _fields(task: Any) -> dict[str, Any]:
    """Returns the fields of a task that a prompt may use."""
    if not isinstance(task, Mapping):
        return {}
    return {name: value for name, value in task.items() if isinstance(name, str) and name != "self"}


def _choose_llm(resources: NamedResources) -> LLM | None:
    models = {name: resource for name, resource in resources.items() if isinstance(resource, LLM)}
    if "llm" in models or len(models) < 2:
        return models.get("llm") or next(iter(models.values()), None)
    raise ConfigError(
        f"{len(models)} models match: {', '.join(sorted(models))}. Give the model of this agent the name 'llm'"
    )


_FIELDS: Final = ("question", "input", "prompt", "messages")


def read_input(task: Any, taker: str) -> Any:
    """Returns the text or the list of messages in a task.

    Args:
        task: a mapping with one of the fields ``question``, ``input``, ``prompt`` and ``messages``, whose other fields,
            such as the expected answer, are for the reward function. Anything else is returned unchanged.
        taker: the recipient of the input, named in the error, such as ``an agent of AutoGen``.

    Raises:
        ConfigError: the mapping has none or several of the fields, or the value is neither a text nor a list.
    """
    if not isinstance(task, Mapping):
        return task
    found = [name for name in _FIELDS if name in task]
    if len(found) == 1 and isinstance(task[found[0]], (str, list)):
        return task[found[0]]
    fields = ", ".join(map(repr, task)) or "none"
    raise ConfigError(
        f"{taker} takes a text or messages, but the task is a mapping with the fields {fields}; exactly one of "
        f"{', '.join(_FIELDS)} must be a text or a list. Otherwise use agl.wrap(agent, task_to_input=lambda task: ...)"
    )


def message_text(message: Any) -> tuple[str, str]:
    """Returns role and text of a chat message in OpenAI's format.

    Raises:
        ConfigError: the message has no text.
    """
    content = semconv.join_texts(message.get("content")) if isinstance(message, Mapping) else None
    if not isinstance(content, str):
        raise ConfigError(f"message {message!r:.200} has no text; convert the task with task_to_input")
    return str(message.get("role", "user")), content
