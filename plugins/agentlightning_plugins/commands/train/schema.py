"""The JSON schema of a configuration, with the settings of every component that is installed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from agentlightning.errors import PluginError
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import setting_types
from agentlightning_plugins.shared.configuration.config import COMPONENTS, TrainConfig


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
