"""Settings of components, checked against the constructor that will take them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError, suggest


def bind_settings(target: type[Any], settings: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Checks settings from a configuration against ``target``'s constructor, converting simple types.

    Args:
        target: the class that will be called with the result.
        settings: keyword arguments by name.
        owner: how error messages call the target, such as ``algorithm 'grpo'``.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    hints = get_type_hints(target.__init__)
    bound: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            raise ConfigError(f"{owner} has no setting {name!r}.{suggest(name, parameters)} Settings: {known}.")
        bound[name] = _check(value, hints.get(name, Any), f"{owner}: {name}")
    missing = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in bound
    ]
    if missing:
        raise ConfigError(f"{owner} needs the setting{'s' * (len(missing) > 1)} {', '.join(missing)}.")
    return bound


def _check(value: Any, annotation: Any, where: str) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except PydanticSchemaGenerationError:  # a class pydantic knows nothing of: an instance check is all there is
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        inner = "".join(f".{part}" for part in first["loc"])
        raise ConfigError(f"{where}{inner} = {first['input']!r}: {first['msg'].rstrip('.')}.") from error
