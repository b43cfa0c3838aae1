"""Builds the parts of a run from a validated configuration."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

import agentlightning as agl
from agentlightning.algorithm.algorithm import Algorithm, RunContext
from agentlightning.errors import ConfigError, LightningError
from agentlightning.execution import ExecutionStrategy
from agentlightning.litagent import LitAgent, wrap
from agentlightning.litagent.function import first_resources
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import bind_settings, read_spec
from agentlightning.resources import LLM, SECRET_NAME, PromptTemplate, Resource, read_resources, resolve_secrets
from agentlightning.run.directory import make_directory
from agentlightning.runner import Hook
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.trainer import Trainer, never_called
from agentlightning.types import Dataset, Run
from agentlightning_plugins.shared.configuration.config import (
    COMPONENTS,
    AgentConfig,
    CommandConfig,
    ComponentSpec,
    DatasetConfig,
    NamedAgentConfig,
    TrainConfig,
    read_config,
)
from agentlightning_plugins.shared.configuration.document import ConfigDocument, KeyPath, enter_folder, read_document
from agentlightning_plugins.shared.configuration.sources import load_attribute, load_dataset, mix

T = TypeVar("T")
_REFERENCE: Final = r"(?<!\$)\$\{(\w+)\}"


@dataclass(frozen=True)
class Parts:
    """The loaded parts of a run."""

    agent: LitAgent[Any]
    train: Dataset[Any] | None
    val: Dataset[Any] | None
    resources: dict[str, Resource] | None
    components: dict[str, Any]
    """Components by argument of ``Trainer``; contains only those that the configuration names."""


def load_parts(config: TrainConfig, document: ConfigDocument) -> Parts:
    """Loads all parts that a configuration names. Starts and writes nothing.

    Raises LightningError, with the location in the configuration, if a part cannot be loaded.
    """
    config = _move_comparison(config, document)

    def load(path: KeyPath, loader: Callable[[Any], T], value: Any) -> T | None:
        with _located(document, path):
            return None if value is None else loader(value)

    with _located(document, ("plugin_settings",)):
        get_manager().configure(expand(config.plugin_settings or {}))
    with _located(document, ("agent" if config.environment is None else "environment",)):
        spec = config.algorithm  # without an algorithm, a command runs the agent
        runs_agent = spec is None or getattr(_find_class(document, "algorithm", spec), "runs_agent", True)
        agent = load_agent(config.agent) if config.agent is not None or runs_agent else wrap(never_called)
    train = load(("data", "train"), load_data, config.data.train)
    val = load(("data", "val"), load_data, config.data.val)
    if train is None and val is None:
        train, val = agent.own_tasks("train"), agent.own_tasks("val")
    resources = load(("resources",), load_resources, config.resources)
    components: dict[str, Any] = {}
    for kind in COMPONENTS:
        spec = _complete_strategy(config, document) if kind == "strategy" else getattr(config, kind)
        if spec is not None:
            components[kind] = _component(document, (kind,), kind, spec)
    if config.trackers is not None:
        components["trackers"] = [
            _component(document, ("trackers", index), "tracker", spec) for index, spec in enumerate(config.trackers)
        ]
    if config.hooks is not None:
        components["hooks"] = [load(("hooks", index), _load_hook, hook) for index, hook in enumerate(config.hooks)]
    return Parts(agent, train, val, resources, components)


def _move_comparison(config: TrainConfig, document: ConfigDocument) -> TrainConfig:
    """Gives the algorithm the reward with ``compare: group``, because an agent does not see the group of its attempt.

    It becomes the reward shaping of the same name.
    """
    reward = getattr(config.agent, "reward", None)
    if config.algorithm is None or not isinstance(reward, Mapping) or reward.get("compare") != "group":
        return config
    name, settings = _split(config.algorithm)
    experience = dict(settings.get("experience") or {})
    if name != "grpo" or experience.get("reward_shaping") is not None:
        place = document.place(("agent" if config.environment is None else "environment", "reward"))
        raise ConfigError(f"{place}: compare: group needs the algorithm grpo without a reward_shaping, not {name!r}")
    shaping = {key: value for key, value in reward.items() if key != "compare"}
    if "api_key" in shaping:  # stays a reference, because settings of the algorithm are recorded
        shaping["api_key"] = re.sub(_REFERENCE, r"$${\1}", str(shaping["api_key"]))
    experience["reward_shaping"] = shaping
    return config.model_copy(update={"algorithm": {"name": name, **settings, "experience": experience}})


def compose_algorithm(config: TrainConfig, document: ConfigDocument) -> Any:
    """Returns the algorithm's resolved settings as plain values; None if the algorithm does not resolve any.

    Values from the environment stay references, because they may be secrets.
    """
    config = _move_comparison(config, document)
    if config.algorithm is None:
        return None
    if _find_class(document, "algorithm", config.algorithm).print_config is Algorithm.print_config:
        return None
    algorithm = _component(document, ("algorithm",), "algorithm", config.algorithm)
    names = [name for name in re.findall(_REFERENCE, repr(config.algorithm)) if os.environ[name]]

    def hide(text: str) -> str:
        for name in names:
            text = text.replace(os.environ[name], f"${{{name}}}")
        return text

    return _map_text(yaml.safe_load(algorithm.print_config()), hide)


def make_trainer(config: TrainConfig, parts: Parts, directory: Path, *, resume: bool) -> Trainer:
    """Returns the trainer for a run in ``directory``."""
    components = dict(parts.components)
    return Trainer(
        algorithm=components.pop("algorithm"),
        llm_proxy=components.pop("gateway", None),
        store=open_store(config, directory),
        initial_resources=parts.resources,
        n_runners=config.n_runners,
        max_concurrency=config.max_concurrency,
        max_rollouts=config.max_rollouts,
        port=config.port,
        run_dir=directory,
        resume=resume,
        seed=config.seed,
        **components,
    )


def check_setup(config: TrainConfig, parts: Parts) -> Sequence[LLM]:
    """Runs the algorithm's own checks of the setup; returns the endpoints that the algorithm calls.

    Raises ConfigError if a part is missing or incompatible.
    """
    strategy: ExecutionStrategy | None = parts.components.get("strategy")
    if strategy is not None and strategy.role == "runner":  # the algorithm runs elsewhere
        return ()
    algorithm: Algorithm = parts.components["algorithm"]
    context = RunContext(
        # A memory store replaces the configured store, because opening that store may create a file.
        store=None if config.store is None else create_store("memory://"),
        adapter=parts.components.get("adapter"),
        llm_proxy=parts.components.get("gateway"),
        train_dataset=parts.train,
        val_dataset=parts.val,
        initial_resources=first_resources(parts.agent, parts.resources),
        seed=config.seed,
    )
    return algorithm.check_setup(context)


def fit(trainer: Trainer, parts: Parts) -> Run:
    """Runs a trainer of ``make_trainer`` and closes its store."""
    try:
        return trainer.fit(parts.agent, parts.train, parts.val)
    finally:
        if trainer.store is not None:
            asyncio.run(trainer.store.close())


def open_store(config: TrainConfig, directory: Path) -> LightningStore:
    """Opens the store of a run. In a shared store, the run has the name of its directory."""
    if config.store is None:
        make_directory(directory)
        return create_store(f"sqlite:///{directory}/store.db")
    return create_store(expand(config.store), run=directory.name)


def load_agent(spec: str | AgentConfig | CommandConfig | NamedAgentConfig | None) -> LitAgent[Any]:
    """Loads the agent that a configuration names; raises ConfigError if it names none."""
    if spec is None:
        raise ConfigError("agent is missing; give it, as in `agent: agent.py:my_agent`")
    if isinstance(spec, str):
        is_name = spec in get_manager().components("agent")
        return wrap(get_manager().create("agent", spec) if is_name else load_attribute(spec))
    reward = _load_reward(spec)
    if isinstance(spec, NamedAgentConfig):
        made = get_manager().create("agent", {"name": spec.name, **expand(spec.model_extra or {})})
        return wrap(made, reward)
    if isinstance(spec, CommandConfig):
        settings = {**expand(spec.model_extra or {}), "argv": spec.command}
        return agl.CommandAgent(**bind_settings(agl.CommandAgent, settings, "a command agent"), reward=reward)
    task_to_input = None if spec.task_to_input is None else load_attribute(spec.task_to_input)
    return wrap(load_attribute(spec.target), reward, task_to_input, spec.prompts)


def _load_reward(spec: AgentConfig | CommandConfig | NamedAgentConfig) -> Any:
    """Returns a function, a component, or the place where a command reports its reward, such as ``stdout``."""
    reward = spec.reward
    if isinstance(reward, list):
        return reward
    if isinstance(reward, str):
        if ":" in reward:
            return load_attribute(reward)
        if isinstance(spec, CommandConfig) and reward not in get_manager().components("reward"):
            return reward
    return None if reward is None else get_manager().create("reward", expand(reward))


def is_config_file(argument: str) -> bool:
    """Whether the argument AGENT of a command is a configuration file of ``agl train``."""
    return Path(argument).suffix in (".yaml", ".yml")


def load_agent_argument(argument: str, reward: str | None) -> LitAgent[Any]:
    """Loads the argument AGENT of a command: ``module:attribute``, or a configuration file of ``agl train``.

    Raises ConfigError if that fails, or if both the configuration and ``reward`` define the reward.
    """
    if not is_config_file(argument):
        return load_agent(AgentConfig(target=argument, reward=reward))
    document = read_document(Path(argument))
    from_start = enter_folder(Path(argument))
    agent = read_config(document).agent
    if isinstance(agent, str):
        agent = AgentConfig(target=agent)
    if agent is not None and reward is not None:
        if agent.reward is not None:
            raise ConfigError(f"agent.reward of {argument} defines the reward; remove --reward or agent.reward")
        agent = agent.model_copy(update={"reward": from_start(reward)})
    return load_agent(agent)


def load_data(spec: str | DatasetConfig | list[str | DatasetConfig]) -> Dataset[Any]:
    """Loads the tasks that a configuration names; several sources are mixed."""
    if isinstance(spec, list):
        weights = [None if isinstance(each, str) else each.weight for each in spec]
        alone = [each if isinstance(each, str) else each.model_copy(update={"weight": None}) for each in spec]
        return mix(list(map(load_data, alone)), weights)
    if isinstance(spec, str):
        return load_dataset(expand(spec))
    if spec.weight is not None:
        raise ConfigError(f"weight = {spec.weight}: a weight is for a list of sources; write several, or remove it")
    return load_dataset(
        expand(spec.source),
        reader=expand(spec.reader),
        split=spec.split,
        limit=spec.limit,
        shuffle_seed=spec.shuffle_seed,
    )


def load_resources(given: Mapping[str, Any]) -> dict[str, Resource]:
    """Expands references except those in texts of prompts, and secrets.

    The store saves resources, so runners expand secrets (``resolve_secrets``).
    """

    def expand_but_secrets(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                name: child
                if SECRET_NAME.search(str(name)) or (name == "template" and isinstance(child, str))
                else expand_but_secrets(child)
                for name, child in value.items()
            }
        if isinstance(value, list):
            return [expand_but_secrets(child) for child in value]
        if isinstance(value, str) and re.search(r"://[^/@\s:]*:(?=[^/@\s]*+@)[^/@\s]*?\$\{\w+\}", value):
            raise ConfigError("a URL of a resource has a password, which the store would keep; use api_key")
        return expand(value)

    resources = read_resources(
        {
            name: value
            if isinstance(value, str)
            else _read_text(name, value)
            if isinstance(value, Mapping) and "file" in value
            else expand_but_secrets(value)
            for name, value in given.items()
        }
    )
    resolve_secrets(resources)  # a check: runners on this machine need the same variables
    return resources


def _read_text(name: str, spec: Mapping[str, Any]) -> PromptTemplate:
    """Returns the text of a file, in which braces are text unless an engine is given."""
    if unknown := spec.keys() - {"file", "engine"}:
        raise ConfigError(
            f"resource {name!r}: unknown key {min(unknown)!r}; a text has file and, as a template, engine"
        )
    try:
        text = Path(expand(str(spec["file"]))).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"resource {name!r}: {spec['file']} cannot be read: {error}") from error
    if "engine" in spec:
        return PromptTemplate(template=text, engine=spec["engine"])
    return PromptTemplate(template=text.replace("{", "{{").replace("}", "}}"))


def expand(value: Any) -> Any:
    """Replaces ``${NAME}`` with the environment variable in all strings of a nested value, and ``$${`` with ``${``."""
    return _map_text(value, lambda text: re.sub(_REFERENCE, _from_environment, text).replace("$${", "${"))


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_text(child, change) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(child, change) for child in value]
    return change(value) if isinstance(value, str) else value


def _from_environment(match: re.Match[str]) -> str:
    value = os.environ.get(match[1])
    if value is None:
        raise ConfigError(f"the environment variable {match[1]} is not set, but the configuration uses it")
    return value


@contextlib.contextmanager
def _located(document: ConfigDocument, path: KeyPath) -> Iterator[None]:
    """Prefixes the messages of our own errors with the location of the value that caused them."""
    try:
        yield
    except LightningError as error:
        setting = error.setting if isinstance(error, ConfigError) else None
        place = document.place(path if setting is None else (*path, setting))
        raise type(error)(f"{place}: {error}") from error


def _split(spec: ComponentSpec) -> tuple[str, dict[str, Any]]:
    """Returns the name of a component and its settings."""
    settings = read_spec(spec)
    return settings.pop("name"), settings


def find_class(kind: str, name: str) -> Any:
    """Returns the class of a component: a registered name, ``module:Class`` or ``file.py:Class``."""
    return load_attribute(name) if ":" in name else get_manager().get(kind, name)


def _find_class(document: ConfigDocument, kind: str, spec: ComponentSpec, path: KeyPath | None = None) -> Any:
    with _located(document, (*(path or (kind,)), "name")):
        return find_class(kind, _split(spec)[0])


def _component(document: ConfigDocument, path: KeyPath, kind: str, spec: ComponentSpec) -> Any:
    cls = _find_class(document, kind, spec, path)
    name, settings = _split(spec)
    with _located(document, path):
        return cls(**bind_settings(cls, expand(settings), f"{kind} {name!r}"))


def _complete_strategy(config: TrainConfig, document: ConfigDocument) -> ComponentSpec | None:
    """Adds ``n_runners`` and ``port`` to the strategy's settings; None if no strategy is configured."""
    if config.strategy is None:
        return None
    name, settings = _split(config.strategy)
    known = inspect.signature(_find_class(document, "strategy", config.strategy)).parameters
    for key, setting in (("n_runners", "n_runners"), ("port", "server_port")):
        if key not in config.model_fields_set:
            continue
        place = document.place((key,))
        if setting not in known:
            raise ConfigError(f"{place}: the strategy {name!r} has no setting {setting}; remove {key}")
        if setting in settings:
            raise ConfigError(f"{place}: {key} is given twice; the strategy has {setting} = {settings[setting]!r}")
        settings[setting] = getattr(config, key)
    return {"name": name, **settings}


def _load_hook(target: str) -> Hook:
    hook = load_attribute(target)
    hook = hook() if isinstance(hook, type) else hook
    if not isinstance(hook, Hook):
        raise ConfigError(f"{target!r} is a {type(hook).__name__}, not an agl.Hook")
    return hook
