"""The schema of a configuration file. Each field is an argument of ``Trainer``, or says where to load one from."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentlightning.errors import ConfigError, suggest
from agentlightning_plugins.commands.configuration.document import Document, KeyPath


def _check_component(value: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(value, dict) and not isinstance(value.get("name"), str):
        raise ValueError("a component with settings needs its 'name' among them")
    return value


ComponentSpec: TypeAlias = Annotated[str | dict[str, Any], AfterValidator(_check_component)]
"""A registered name (``agl plugins`` lists them), or ``{name: ..., **settings}``."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class AgentConfig(_Section):
    """An agent written in Python."""

    target: str
    """``module:attribute`` or ``file.py:attribute`` of a function, a LitAgent or a framework's object."""
    reward: str | None = None
    """``module:attribute`` of ``reward(task, output, rollout) -> float``, when the agent returns no reward."""
    task_to_input: str | None = None
    """``module:attribute`` of ``task_to_input(task)``, for framework objects."""
    prompts: dict[str, str] | None = None
    """Tunable texts of a framework's object: path of the text -> name of the prompt resource."""


class CommandConfig(_Section):
    """An agent that is a command."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    command: list[str]
    """Program and arguments. Further settings are those of ``agl.CommandAgent``."""
    reward: str | None = None
    """``module:attribute`` of ``reward(task, output, rollout) -> float``."""


class DatasetConfig(_Section):
    """The source of tasks, and a selection from it."""

    source: str
    """A file (.jsonl, .json, .csv, .parquet), ``module:attribute``, or ``hf:name``."""
    split: str | None = None
    """The split of a Hugging Face data set."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of tasks, applied after shuffling."""
    shuffle_seed: int | None = None
    """Seed for shuffling; None keeps the order."""


class DataConfig(_Section):
    """The tasks of a run."""

    train: str | DatasetConfig | None = None
    """Tasks for training."""
    val: str | DatasetConfig | None = None
    """Tasks for validation."""


class TrainConfig(_Section):
    """A run."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.\-]*$")
    """Name of the run; default is the name of the file."""
    run_dir: str | None = None
    """Directory of the run; default ``runs/<name>``, with a number if that exists."""
    agent: str | AgentConfig | CommandConfig
    """The agent: ``module:attribute``, or a mapping with ``target`` or ``command``."""
    data: DataConfig = Field(default_factory=DataConfig)
    """The tasks."""
    algorithm: ComponentSpec | None = None
    """The algorithm. `agl train` requires it."""
    store: str | None = None
    """URL of the store; default is ``sqlite://`` in the run's directory."""
    resources: dict[str, Any] | None = None
    """Initial resources by name. A string is a prompt; other resources are mappings with
    ``resource_type``."""
    adapter: ComponentSpec | None = None
    """Converts spans to training data; default is the algorithm's own."""
    tracer: ComponentSpec | None = None
    """Records spans; default ``otel``."""
    strategy: ComponentSpec | None = None
    """Execution strategy; default ``cs``."""
    gateway: ComponentSpec | None = None
    """The LLM gateway; algorithms that need one create it."""
    n_runners: int = Field(default=1, ge=1)
    """Number of runners."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Concurrent rollouts of each runner."""
    max_rollouts: int | None = Field(default=None, ge=1)
    """Number of rollouts after which a runner stops."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the served store; default is a free one."""
    seed: int = 0
    """Random seed of algorithms that have no seed setting of their own."""
    trackers: list[ComponentSpec] | None = None
    """Trackers; default ``console`` and ``jsonl``."""
    hooks: list[str] | None = None
    """``module:attribute`` of ``Hook`` objects or classes."""


def read_config(document: Document) -> TrainConfig:
    """Checks a document against ``TrainConfig``.

    Raises:
        ConfigError: names file, line, key and value, and the closest known key.
    """
    try:
        return TrainConfig.model_validate(document.values)
    except ValidationError as error:
        raise ConfigError(_explain(document, error)) from error


_UNION_TAGS: Final = frozenset({"str", "AgentConfig", "CommandConfig", "DatasetConfig", "dict[str,any]"})


def _explain(document: Document, error: ValidationError) -> str:
    """Describes the first error, for the branch of a union that matches the type of the given value."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] == "missing")  # a misspelt key misses another
    chosen = next((p for p in problems if not _is_other_branch(document.values, p["loc"])), problems[0])
    path: KeyPath = tuple(part for part in chosen["loc"] if not _is_tag(part))
    shown = ".".join(map(str, path))
    place = document.place(path)
    if chosen["type"] == "missing":
        return f"{document.place(path[:-1])}: {shown} is missing"
    if chosen["type"] == "extra_forbidden":
        known = _fields_at(path[:-1])
        return f"{place}: unknown key {shown!r}.{suggest(str(path[-1]), known)} Keys here: {', '.join(known)}"
    return f"{place}: {shown} = {chosen['input']!r}: {chosen['msg'].removeprefix('Value error, ')}"


def _is_tag(part: str | int) -> bool:
    return isinstance(part, str) and (part in _UNION_TAGS or part.startswith(("function-", "dict[")))


def _is_other_branch(values: Mapping[str, Any], location: tuple[str | int, ...]) -> bool:
    """Whether pydantic tried a branch of a union that the value's shape rules out."""
    value: Any = values
    for part in location:
        if part == "str" and isinstance(value, Mapping):
            return True
        if part in ("AgentConfig", "CommandConfig") and (
            not isinstance(value, Mapping) or ("command" in value) != (part == "CommandConfig")
        ):
            return True
        if part == "DatasetConfig" and not isinstance(value, Mapping):
            return True
        if not _is_tag(part):
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return False
    return False


def _fields_at(path: KeyPath) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        choices = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else ()
        models = [each for each in (annotation, *choices) if isinstance(each, type) and issubclass(each, BaseModel)]
        model = models[0]
    return list(model.model_fields)
