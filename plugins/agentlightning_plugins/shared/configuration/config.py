"""The schema of a configuration file. Each field is an argument of ``Trainer``, or the source to load it from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.functional_validators import model_validator

from agentlightning.errors import ConfigError, PluginError, suggest
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import setting_types
from agentlightning_plugins.shared.configuration.document import ConfigDocument, KeyPath

COMPONENTS: Final[tuple[str, ...]] = ("algorithm", "adapter", "tracer", "strategy", "gateway")
"""The components of a run that have a key of their kind in the configuration."""

# Tags of the branches of a union. Pydantic adds them to the locations of errors; they are not keys of a configuration.
_TEXT, _LIST, _MAPPING = Tag("<text>"), Tag("<list>"), Tag("<mapping>")
_COMMAND, _COMPONENT = Tag("<command>"), Tag("<component>")


def _check_component(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("name"), str):
        raise ValueError("a component with settings needs the key 'name'")
    return value


def _text_or_mapping(value: Any) -> str:
    return _MAPPING.tag if isinstance(value, Mapping) else _TEXT.tag


def _agent_branch(value: Any) -> str:
    given = value if isinstance(value, Mapping) else {}
    if "command" in given or "preset" in given:
        return _COMMAND.tag
    return _COMPONENT.tag if "name" in given and "target" not in given else _text_or_mapping(value)


ComponentSpec: TypeAlias = Annotated[
    Annotated[str, _TEXT] | Annotated[dict[str, Any], AfterValidator(_check_component), _MAPPING],
    Discriminator(_text_or_mapping),
]
"""A registered name (``agl plugins`` lists them), ``module:Class`` or ``file.py:Class``; or ``{name: ..., **settings}``
with one of these."""


PromptsSpec: TypeAlias = Annotated[
    Annotated[list[str], _LIST] | Annotated[dict[str, str | None], _MAPPING],
    Discriminator(lambda value: _LIST.tag if isinstance(value, list) else _MAPPING.tag),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class AgentConfig(_Section):
    """An agent written in Python."""

    target: str
    """``module:attribute`` or ``file.py:attribute`` of a function, a LitAgent or a framework's object."""
    reward: ComponentSpec | None = None
    """Used if the agent returns no reward: ``module:attribute`` of ``reward(task, output, rollout) -> float``, or a
    component such as ``judge``."""
    task_to_input: str | None = None
    """``module:attribute`` of ``task_to_input(task)``, for framework objects."""
    prompts: PromptsSpec | None = None
    """Tunable texts of a framework's object: a list of paths, or a mapping from paths to the initial text, the name of
    the prompt resource, or null for the object's own text."""


class CommandConfig(_Section):
    """An agent that is a command, such as a coding agent."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    command: list[str] | None = None
    """Program and arguments; needed without a ``preset``. All other keys are settings of ``agl.CommandAgent``."""
    reward: (
        Annotated[
            Annotated[list[str], _LIST] | Annotated[ComponentSpec, _TEXT],
            Discriminator(lambda value: _LIST.tag if isinstance(value, list) else _TEXT.tag),
        ]
        | None
    ) = None
    """``module:attribute`` of ``reward(task, output, rollout) -> float``, a component such as ``judge``, the place
    where the command reports it (``stdout``, ``file`` or ``exit_code``), or a command that rates the workspace."""


class NamedAgentConfig(_Section):
    """An agent that a plugin offers under a name."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    name: str
    """Name of a component of the kind ``agent``. All other keys are its settings."""
    reward: ComponentSpec | None = None
    """As in ``AgentConfig``."""


class DatasetConfig(_Section):
    """The source of tasks, and a selection from it."""

    source: str
    """A file (.jsonl, .json, .csv, .parquet), ``module:attribute``, ``hf:name``, the directory of a saved data set of
    Hugging Face, or what a plugin reads."""
    reader: ComponentSpec | None = None
    """The component of the kind ``dataset`` that reads the source. By default the one that is named like the source's
    ending or its prefix before a colon, if a plugin offers one."""
    split: str | None = None
    """The split of a Hugging Face data set."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of tasks, applied after shuffling."""
    shuffle_seed: int | None = None
    """Seed for shuffling; None keeps the order."""
    weight: float | None = Field(default=None, gt=0)
    """In a list of sources: the share of the rows that come from this one; None in all: each row once."""


AgentSpec: TypeAlias = Annotated[
    Annotated[str, _TEXT]
    | Annotated[AgentConfig, _MAPPING]
    | Annotated[CommandConfig, _COMMAND]
    | Annotated[NamedAgentConfig, _COMPONENT],
    Discriminator(_agent_branch),
]
EnvironmentSpec: TypeAlias = Annotated[
    Annotated[str, _TEXT] | Annotated[dict[str, Any], _MAPPING], Discriminator(_text_or_mapping)
]
SourceSpec: TypeAlias = Annotated[
    Annotated[str, _TEXT] | Annotated[DatasetConfig, _MAPPING], Discriminator(_text_or_mapping)
]
DatasetSpec: TypeAlias = Annotated[
    Annotated[SourceSpec, _TEXT] | Annotated[list[SourceSpec], Field(min_length=1), _LIST],
    Discriminator(lambda value: _LIST.tag if isinstance(value, list) else _TEXT.tag),
]


class DataConfig(_Section):
    """The tasks of a run."""

    train: DatasetSpec | None = None
    """Tasks for training; a list of sources is mixed."""
    val: DatasetSpec | None = None
    """Tasks for validation."""


class TrainConfig(_Section):
    """A run."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.\-]*$")
    """Name of the run; default is the name of the file."""
    run_dir: str | None = None
    """Directory of the run; default ``runs/<name>``, with a number if that exists."""
    agent: AgentSpec | None = None
    """The agent: ``module:attribute``, a component, or a mapping with ``target``, ``command`` or ``name``. Algorithms
    that run no agent, such as ``sft``, need none."""
    environment: EnvironmentSpec | None = None
    """In place of an agent: the kind of an environment and its address, such as ``gymnasium:FrozenLake-v1``, or
    ``module:attribute``; or a mapping that begins with both (``{mcp: [my-server]}``) and goes on with settings."""
    data: DataConfig = Field(default_factory=DataConfig)
    """The tasks; an environment may have its own."""
    algorithm: ComponentSpec | None = None
    """The algorithm. `agl train` requires it."""
    store: str | None = None
    """URL of the store; default is ``sqlite://`` in the run's directory."""
    resources: dict[str, Any] | None = None
    """Initial resources by name. A string is a prompt; other resources are mappings with
    ``resource_type``."""
    adapter: ComponentSpec | None = None
    """Converts spans to training data; default is the algorithm's adapter."""
    tracer: ComponentSpec | None = None
    """Records spans; default ``otel``."""
    strategy: ComponentSpec | None = None
    """Execution strategy; default ``cs``."""
    gateway: ComponentSpec | None = None
    """The LLM gateway; algorithms that need one create it. A URL names one that `agl gateway` serves over the same
    store: ``http://127.0.0.1:4000``."""
    n_runners: int = Field(default=1, ge=1)
    """Number of runners."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Concurrent rollouts of each runner."""
    max_rollouts: int | None = Field(default=None, ge=1)
    """Number of rollouts after which a runner stops."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the served store; default is a free port."""
    seed: int = 0
    """Random seed of algorithms that have no seed setting of their own."""
    trackers: list[ComponentSpec] | None = None
    """Trackers; default ``console`` and ``jsonl``."""
    plugins: list[str] | None = None
    """Plugins that are not installed: files such as ``mine.py``, or folders that are packages."""
    disabled_plugins: list[str] | None = None
    """Plugins to switch off: names of plugins or distributions, as `agl plugins` shows them."""
    plugin_settings: dict[str, dict[str, Any]] | None = None
    """Settings of plugins whose hooks take them, by the name of the plugin."""
    hooks: list[str] | None = None
    """``module:attribute`` of ``Hook`` objects or classes."""

    @model_validator(mode="after")
    def _environment_is_an_agent(self) -> TrainConfig:
        if self.environment is not None:
            if self.agent is not None:
                raise ValueError("agent and environment are given, and the environment is the agent; remove one")
            given = self.environment if isinstance(self.environment, dict) else {}
            spec: Any = {name: value for name, value in given.items() if name != "reward"} or self.environment
            self.agent = NamedAgentConfig.model_validate(
                {"name": "environment", "environment": spec, "reward": given.get("reward")}
            )
        return self


def read_config(document: ConfigDocument) -> TrainConfig:
    """Checks a document against ``TrainConfig``; loads its plugins and switches others off.

    Raises:
        ConfigError: a key or value is invalid; the message has file, line, key, value and the closest known key.
        PluginError: a plugin does not exist or is broken.
    """
    try:
        config = TrainConfig.model_validate(document.values)
    except ValidationError as error:
        raise ConfigError(_explain(document, error)) from error
    get_manager().disable(config.disabled_plugins or ())
    get_manager().load_files(config.plugins or ())
    if config.store is None and isinstance(config.gateway, str) and "://" in config.gateway:
        raise ConfigError(
            f"{document.place(('gateway',))}: a gateway elsewhere cannot see the run's own store; "
            "give the store that it records in, as in `store: http://127.0.0.1:4747`"
        )
    return config


_SECTIONS: Final[dict[KeyPath, type[_Section]]] = {
    (): TrainConfig,
    ("agent",): AgentConfig,
    ("data",): DataConfig,
    ("data", "train"): DatasetConfig,
    ("data", "val"): DatasetConfig,
}


def _explain(document: ConfigDocument, error: ValidationError) -> str:
    """Describes the first error, but missing keys last, because a misspelt key also counts as a missing key."""
    first = min(error.errors(), key=lambda problem: problem["type"] == "missing")
    path: KeyPath = tuple(part for part in first["loc"] if not str(part).startswith("<"))
    shown = ".".join(map(str, path))
    if first["type"] == "missing":
        return f"{document.place(path[:-1])}: {shown} is missing"
    if first["type"] == "extra_forbidden":
        known = list(_SECTIONS[path[:2] if path[0] == "data" and len(path) > 2 else path[:-1]].model_fields)
        hint = suggest(str(path[-1]), known)
        return f"{document.place(path)}: unknown key {shown!r}.{hint} Keys here: {', '.join(known)}"
    return f"{document.place(path)}: {shown} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def config_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of ``TrainConfig``; a component's settings come from its constructor."""
    schema = TrainConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Lightning configuration"
    fields = schema["properties"]
    for kind in COMPONENTS:
        fields[kind] = {"description": fields[kind].get("description", ""), "anyOf": list(_choices(kind))}
    fields["trackers"]["anyOf"] = [{"type": "array", "items": {"anyOf": list(_choices("tracker"))}}, {"type": "null"}]
    return schema


def _choices(kind: str) -> Iterator[dict[str, Any]]:
    manager = get_manager()
    names = list(manager.components(kind))
    yield {"enum": names}
    if "remote" in names:
        yield {"type": "string", "pattern": "^https?://", "description": "URL of a service that runs elsewhere."}
    for name in names:
        try:
            cls = manager.get(kind, name)
        except PluginError:  # not installed: its name is known, its settings are not
            continue
        yield _settings_schema(name, cls)


def _settings_schema(name: str, cls: type[Any]) -> dict[str, Any]:
    hints = setting_types(cls)
    properties: dict[str, Any] = {"name": {"const": name}}
    required = ["name"]
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        properties[parameter.name] = _value_schema(hints.get(parameter.name, Any))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    summary = inspect.getdoc(cls)
    return {
        "type": "object",
        "description": summary.splitlines()[0] if summary else "",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value_schema(annotation: Any) -> dict[str, Any]:
    try:
        schema = TypeAdapter(annotation).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):  # an object that a file cannot hold
        return {}
    return {} if "$defs" in schema else schema
