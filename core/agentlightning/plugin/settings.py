"""Checks the settings of components against their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError, suggest


def require_least(least: float, **settings: float | None) -> None:
    """Raises ConfigError for settings below ``least``; None means not set."""
    wrong = [f"{name} = {value}" for name, value in settings.items() if value is not None and not value >= least]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: at least {least:g} is needed")


def read_spec(spec: Any) -> dict[str, Any]:
    """Returns the ``name`` and settings of a component; a URL stands for ``remote``, a service that runs elsewhere."""
    if isinstance(spec, Mapping):
        return dict(spec)
    return {"name": "remote", "url": spec} if isinstance(spec, str) and "://" in spec else {"name": spec}


def settings_of(target: Callable[..., Any], call: inspect.Signature | None = None) -> dict[str, inspect.Parameter]:
    """Returns the parameters that are settings, by name.

    Args:
        target: a class or a function.
        call: the signature with which the component is called, if ``target`` is that component and not its class: these
            parameters are not settings.

    Raises:
        ConfigError: ``target`` cannot be called like that.
    """
    parameters = list(inspect.signature(target).parameters.values())
    if call is not None and not inspect.isclass(target):
        try:
            given = inspect.signature(target).bind_partial(
                *[name for name, each in call.parameters.items() if each.kind is not each.KEYWORD_ONLY],
                **{name: None for name, each in call.parameters.items() if each.kind is each.KEYWORD_ONLY},
            )
        except TypeError as error:
            message = f"is called with {call}, and takes {inspect.signature(target)}: {error}"
            raise ConfigError(message) from None
        parameters = [parameter for parameter in parameters if parameter.name not in given.arguments]
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def bind_settings(
    target: Callable[..., Any], settings: Mapping[str, Any], owner: str, call: inspect.Signature | None = None
) -> dict[str, Any]:
    """Checks settings from a configuration against the ``settings_of`` a target, converting simple types.

    Raises ConfigError for an unknown or missing setting or a wrong type; the message calls the target ``owner``.
    """
    try:
        parameters = settings_of(target, call)
    except ConfigError as error:
        raise ConfigError(f"{owner} {error}") from None
    hints = setting_types(target)
    bound: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                hint = _suggest_setting(name, parameters, hints)
                raise ConfigError(f"{owner} has no setting {name!r}.{hint} Settings: {known}.")
            bound[name] = _check(value, hints.get(name, Any), f"{owner}: {name}")
        except ConfigError as error:
            error.setting = name
            raise
    missing = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in bound
    ]
    if missing:
        raise ConfigError(f"{owner} needs the setting{'s' * (len(missing) > 1)} {', '.join(missing)}.")
    return bound


def bind_fields(settings: Any, owner: str, *, leave: Iterable[str] = ()) -> None:
    """Checks and converts the fields of a dataclass of settings in place, as if they came from a file.

    Skips the fields in ``leave``. Raises ConfigError for a wrong type.
    """
    hints = setting_types(type(settings))
    for each in fields(settings):
        if each.init and each.name not in leave:
            value = _check(getattr(settings, each.name), hints.get(each.name, Any), f"{owner}: {each.name}")
            object.__setattr__(settings, each.name, value)


def _suggest_setting(name: str, known: Iterable[str], hints: Mapping[str, Any]) -> str:
    """Suggests a known setting, or a key of a group of settings, such as ``update.lr`` for ``lr``."""
    import difflib  # slow to import and rarely needed

    keys = {key: f"{group}.{key}" for group in known for key in _keys_of(hints.get(group))}
    paths = {**keys, **{path: path for path in keys.values()}, **{setting: setting for setting in known}}
    match = difflib.get_close_matches(name, paths, n=1, cutoff=0.6)
    return f" Did you mean {paths[match[0]]!r}?" if match else ""


def setting_types(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of a component's settings by name."""
    # The annotations of a dataclass belong to the modules of its bases, which its constructor does not name.
    annotated = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    try:
        return get_type_hints(annotated)
    except (NameError, TypeError):  # a name that is imported for type checkers only; a partial, or a callable object
        return {}


def _check(value: Any, annotation: Any, where: str) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except PydanticSchemaGenerationError:  # a class unknown to pydantic: only an instance check is possible
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        inner = "".join(f".{part}" for part in first["loc"])
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            known = _keys_of(annotation)
            hint = suggest(str(first["loc"][-1]), known)
            raise ConfigError(f"{where} has no key {inner[1:]!r}.{hint} Keys: {', '.join(known)}.") from error
        raise ConfigError(f"{where}{inner} = {first['input']!r}: {first['msg'].rstrip('.')}.") from error


def _keys_of(annotation: Any) -> list[str]:
    """Returns the fields of the dataclass, model or TypedDict in an annotation, which may be a union."""
    for choice in (annotation, *get_args(annotation)):
        fields = getattr(choice, "__dataclass_fields__", None) or getattr(choice, "model_fields", None)
        fields = fields or getattr(choice, "__annotations__", None)
        if isinstance(choice, type) and fields:
            return list(fields)
    return []
