"""Resources: what an algorithm tunes and an agent uses, such as model endpoints and prompts.

A resource is a frozen record that names its type in ``resource_type``; a ``ResourcesUpdate`` is one version of a named
set of resources.
"""

from __future__ import annotations

import math
import os
import re
import string
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, WithJsonSchema, field_validator

from agentlightning.errors import ConfigError, suggest
from agentlightning.frozen import FrozenDict, FrozenList
from agentlightning.records import DEFAULT_RUN_ID, AttemptedRollout, JsonObject, Record, Rollout
from agentlightning.store.url import hide_password

ATTEMPT_KEY: Final = "agentlightning"
"""Placeholder ``api_key`` of a ProxyLLM, which the runner replaces with the attempt's key. It grants no access, but
clients require a key, and without a placeholder they would send the user's own."""


SECRET_NAME: Final = re.compile(
    r"(^|[_.])(api_key|password|secret|auth_token|access_token|secret_access_key)$|(^|\.)token$|(?-i:[A-Z0-9]_TOKEN$)",
    re.IGNORECASE,
)
"""Matches names of secret fields, also at the end of a dotted path, and of variables such as ``HF_TOKEN``."""
_REFERENCE: Final = re.compile(r"\$\{(\w+)\}")


class Resource(Record):
    """Base of all resources. A subclass declares ``resource_type: Literal["its_name"] = "its_name"``."""

    by_type: ClassVar[dict[str, type[Resource]]] = {}
    """The resource classes imported so far, by type name."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        field = cls.model_fields.get("resource_type")
        if field is not None and isinstance(field.default, str):
            Resource.by_type[field.default] = cls


_RANGES: Final[Mapping[str, tuple[str, Callable[[float], bool]]]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n"), ("a whole number of at least 1", lambda x: x >= 1)),
    "top_k": ("a whole number of at least -1", lambda x: x >= -1),
    "temperature": ("a number of at least 0", lambda x: 0 <= x < math.inf),
    "top_p": ("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
}
"""The values of sampling parameters that model servers accept."""


def check_sampling_ranges(name: str, sampling: Mapping[str, Any]) -> None:
    """Raises ConfigError, which begins with ``name``, for a sampling parameter that no model server accepts.

    Parameters without a range, and values of None, are not checked.
    """
    for key, (needed, accepts) in _RANGES.items():
        value = sampling.get(key)
        kinds = int if "whole" in needed else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not accepts(value)):
            raise ConfigError(f"{name}: {key} = {value!r}; {needed} is needed.")


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """Base URL as the ``openai`` client takes it, usually ending in ``/v1``."""
    model: str
    api_key: str | None = Field(default=None, repr=False)
    """The key, or ``${NAME}`` to read it from the environment of the process that runs the agent. The store keeps this
    value unchanged, so use ``${NAME}`` unless the store may hold the key."""
    sampling_parameters: JsonObject = Field(default_factory=FrozenDict)
    """Keyword arguments for ``chat.completions.create``, such as ``temperature``."""

    @field_validator("sampling_parameters")
    @classmethod
    def _check_sampling(cls, sampling: JsonObject) -> JsonObject:
        more = sampling.get("extra_body")
        check_sampling_ranges("sampling_parameters", {**sampling, **(more if isinstance(more, Mapping) else {})})
        return sampling

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Returns the URL for a client; takes the ids only for compatibility with ``ProxyLLM``."""
        _check_pair(rollout_id, attempt_id)
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the gateway, which attributes each call to the rollout and attempt in its URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # type: ignore[assignment] # the subclass names itself

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Inserts ``/rollout/{rollout_id}/attempt/{attempt_id}`` before a trailing ``/v1``.

        Raises:
            ValueError: one id was given without the other.
        """
        _check_pair(rollout_id, attempt_id)
        if not rollout_id:
            return self.endpoint
        root = self.endpoint.rstrip("/")
        version = "/v1" if root.endswith("/v1") else ""
        return f"{root.removesuffix('/v1')}/rollout/{rollout_id}/attempt/{attempt_id}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Returns a plain LLM whose endpoint belongs to this attempt, for the agent."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
        )


def _check_pair(rollout_id: str | None, attempt_id: str | None) -> None:
    if bool(rollout_id) != bool(attempt_id):
        raise ValueError(f"give rollout_id and attempt_id together, got {rollout_id!r} and {attempt_id!r}")


class _ValuesOnlyFormatter(string.Formatter):
    """``str.format`` with plain names as fields: no attributes or items, and no nested or huge format specs."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        if not field_name.isidentifier():
            raise ConfigError(
                f"prompt field {{{field_name}}} is not a plain name; use {{name}} and give name=..., or write "
                "{{ and }} for literal braces, as in JSON"
            )
        if field_name not in kwargs:
            given = ", ".join(sorted(kwargs)) or "none"
            raise ConfigError(f"prompt field {{{field_name}}} got no value; values given: {given}")
        return kwargs[field_name], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4}", format_spec):
            raise ConfigError(f"prompt format spec {format_spec!r} is too wide; at most 999")
        return str(format(value, format_spec))


class TemplateEngine(Protocol):
    """Renders templates of one language; a plugin offers it as a component of kind ``template_engine``."""

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Returns the text; raises ConfigError for a wrong template or a missing value."""


class PromptTemplate(Resource):
    """A tunable text with placeholders. A template can use the values it is given, but no attributes or code."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: str = "f-string"
    """``f-string``, or the name of a component of kind ``template_engine``, such as ``jinja`` (sandboxed)."""

    def __init__(self, template: str, engine: str = "f-string", **data: Any) -> None:
        super().__init__(**{"template": template, "engine": engine, **data})

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: str) -> str:
        if engine == "f-string":
            return engine
        from agentlightning.plugin.registry import get_manager

        known = ["f-string", *get_manager().components("template_engine")]
        if engine not in known:
            raise ConfigError(f"unknown template engine {engine!r}.{suggest(engine, known)} Known: {', '.join(known)}")
        return engine

    def format(self, **values: Any) -> str:
        """Fills the placeholders; raises ConfigError for a missing value or an invalid or forbidden expression."""
        if self.engine == "f-string":
            try:
                return _ValuesOnlyFormatter().vformat(self.template, (), values)
            except ConfigError:
                raise
            except (TypeError, ValueError) as error:
                message = f"prompt template cannot be formatted: {error}. Write {{{{ for a literal brace"
                raise ConfigError(message) from error
        from agentlightning.plugin.registry import get_manager

        engine: TemplateEngine = get_manager().create("template_engine", self.engine)
        return engine.render(self.template, values)


def _read_resource(value: Any) -> Any:
    if isinstance(value, Resource):
        return value
    if isinstance(value, str):
        return PromptTemplate(value)
    if isinstance(value, Mapping) and isinstance(name := value.get("resource_type"), str):
        cls = Resource.by_type.get(name)
        if cls is None:
            from agentlightning.plugin.registry import get_manager

            offered = get_manager().components("resource")
            if name not in offered:
                known = ", ".join(sorted({*Resource.by_type, *offered}))
                raise ValueError(f"unknown resource_type {name!r}; known: {known}")
            cls = get_manager().get("resource", name)
        try:
            return cls.model_validate(value)
        except TypeError as error:  # raised by the resource's own constructor, which lacks an argument
            raise ValueError(f"{name}: {error}") from error
    raise ValueError(f"a resource is a Resource, a str (a prompt) or a mapping with resource_type, not {value!r}")


# Without this, the schema of a response would forbid the fields that a subclass adds.
_DUMPED: Final = {
    "title": "Resource",
    "type": "object",
    "properties": {"resource_type": {"type": "string"}},
    "required": ["resource_type"],
}
AnyResource: TypeAlias = Annotated[
    SerializeAsAny[Resource], BeforeValidator(_read_resource), WithJsonSchema(_DUMPED, mode="serialization")
]
NamedResources: TypeAlias = Mapping[str, Resource]
"""The resources of a rollout by name. As an argument, a plain ``str`` means ``PromptTemplate(str)``."""


class ResourcesUpdate(Record):
    """One immutable version of a named set of resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int = Field(ge=1)
    resources: Annotated[dict[str, AnyResource], AfterValidator(FrozenDict)]
    run_id: str = DEFAULT_RUN_ID

    @property
    def version_id(self) -> str:
        """A ``resources_id`` that names this version, such as ``rs-1@3``; ``rs-1`` names the newest version."""
        return f"{self.resources_id}@{self.version}"


_VERSION_ID: Final = re.compile(r"(.+)@([1-9][0-9]{0,17})", re.DOTALL)


def split_version_id(resources_id: str, version: int | None = None) -> tuple[str, int | None]:
    """Splits an id such as ``rs-1@3``; version None is the newest. Raises ConfigError if two versions are given."""
    match = _VERSION_ID.fullmatch(resources_id)
    if match is None:
        return resources_id, version
    named = int(match[2])
    if version is not None and version != named:
        raise ConfigError(f"resources_id={resources_id!r} names version {named}, but version={version!r} was given")
    return match[1], named


def read_resources(resources: Mapping[str, Resource | str | Mapping[str, Any]]) -> dict[str, Resource]:
    """Converts resources that users give as resources, strings or JSON; raises ConfigError for other values."""
    result: dict[str, Resource] = {}
    for name, value in resources.items():
        try:
            result[name] = _read_resource(value)
        except ValueError as error:
            raise ConfigError(f"resource {name!r}: {error}") from error
    return result


def scope_to_attempt(resources: Mapping[str, Resource], rollout: Rollout) -> dict[str, Resource]:
    """Gives every ProxyLLM the URL of this attempt, so that the agent's calls are attributed to it."""
    if not isinstance(rollout, AttemptedRollout):
        return dict(resources)
    return {
        name: resource.with_attempted_rollout(rollout) if isinstance(resource, ProxyLLM) else resource
        for name, resource in resources.items()
    }


def with_attempt_key(resources: Mapping[str, Resource], key: str) -> dict[str, Resource]:
    """Replaces ``ATTEMPT_KEY`` in every ProxyLLM with the attempt's key."""
    return {
        name: resource.model_copy(update={"api_key": key})
        if isinstance(resource, ProxyLLM) and resource.api_key == ATTEMPT_KEY
        else resource
        for name, resource in resources.items()
    }


def resolve_secrets(resources: Mapping[str, Resource]) -> Mapping[str, Resource]:
    """Replaces ``${NAME}`` in secret fields, at any depth, with that environment variable.

    Raises:
        ConfigError: the variable is not set.
    """
    return {
        name: resource.model_copy(
            update={
                field: _resolve(value, bool(SECRET_NAME.search(field)), f"resource {name!r}: {field}")
                for field, value in resource.__dict__.items()
            }
        )
        for name, resource in resources.items()
    }


def _resolve(value: Any, is_secret: bool, path: str) -> Any:
    if is_secret and isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
        if match[1] not in os.environ:
            raise ConfigError(
                f"{path} is {value}, but the environment variable {match[1]} is not set in the process that runs the "
                "agent; set it there"
            )
        return os.environ[match[1]]
    if isinstance(value, FrozenDict):
        return FrozenDict(
            {
                key: _resolve(child, is_secret or bool(SECRET_NAME.search(key)), f"{path}.{key}")
                for key, child in value.items()
            }
        )
    if isinstance(value, FrozenList):
        return FrozenList([_resolve(child, is_secret, f"{path}[{number}]") for number, child in enumerate(value)])
    return value


_SECRET_HEADER: Final = re.compile(r"(^|[-.])(authorization|api-key)$", re.IGNORECASE)


def hide_secrets(value: Any) -> Any:
    """Replaces secret settings, and passwords in URLs, by ``***``; ``value`` consists of JSON types."""
    if isinstance(value, dict):
        secret = {name for name in value if SECRET_NAME.search(name) or _SECRET_HEADER.search(name)}
        return {name: "***" if child and name in secret else hide_secrets(child) for name, child in value.items()}
    if isinstance(value, list):
        return [hide_secrets(child) for child in value]
    return hide_password(value) if isinstance(value, str) else value
