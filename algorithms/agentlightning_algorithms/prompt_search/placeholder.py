"""The placeholders of a prompt, such as ``{question}``: an edit must keep all of them and add no others."""

from __future__ import annotations

import re
import string

from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate


def find_placeholders(prompt: PromptTemplate) -> frozenset[str]:
    """The names of the values that fill a prompt.

    Raises:
        ConfigError: it is not a template of its engine.
    """
    if prompt.engine == "f-string":
        return frozenset(name for name, _ in _fields(prompt.template))
    if prompt.engine == "jinja":
        from jinja2 import TemplateError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment()
        try:
            return frozenset(meta.find_undeclared_variables(environment.parse(prompt.template)))
        except TemplateError as error:
            raise ConfigError(f"not a jinja template: {error}") from error
    return frozenset(re.findall(r"\{\{\s*(\w+)", prompt.template))


def fit(text: str, original: PromptTemplate) -> PromptTemplate:
    """Makes a template of an edited text with the placeholders of the original.

    In an f-string, braces around anything else are literal, as in an example of JSON, and are doubled.

    Raises:
        ConfigError: a placeholder is missing or new, or the text is not a template.
    """
    edited = original.model_copy(update={"template": text})
    wanted = find_placeholders(original)
    if original.engine == "f-string":
        try:
            fields = set(_fields(text))
            plain = fields <= {(name, "") for name in wanted} | set(_fields(original.template))
        except ConfigError:
            plain = False
        if not plain:
            edited = original.model_copy(update={"template": _escape(text, wanted)})
    found = find_placeholders(edited)
    if missing := wanted - found:
        raise ConfigError(f"it lost the placeholders {_show(original, missing)}")
    if unknown := found - wanted:
        raise ConfigError(f"it has unknown placeholders {_show(original, unknown)}")
    return edited


def show_placeholders(prompt: PromptTemplate) -> str:
    """The placeholders as they are written in the prompt."""
    return _show(prompt, find_placeholders(prompt)) or "none"


def _show(prompt: PromptTemplate, names: frozenset[str]) -> str:
    left, right = ("{", "}") if prompt.engine == "f-string" else ("{{ ", " }}")
    return ", ".join(f"{left}{name}{right}" for name in sorted(names))


def _fields(template: str) -> list[tuple[str, str]]:
    """Name and format of each placeholder of an f-string."""
    try:
        parsed = [
            (name, (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else ""))
            for _, name, spec, conversion in string.Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        raise ConfigError(f"not a template: {error}; write {{{{ for a literal brace") from error
    for name, _ in parsed:
        if not name.isidentifier():
            raise ConfigError(f"not a template: {{{name}}} is not a plain name; write {{{{ for a literal brace")
    return parsed


def _escape(text: str, wanted: frozenset[str]) -> str:
    """Doubles every brace except those around a wanted name."""
    names = "|".join(map(re.escape, sorted(wanted))) or r"(?!)"
    return re.sub(rf"\{{(?:{names})\}}|[{{}}]", lambda match: match[0] if len(match[0]) > 1 else match[0] * 2, text)
