"""The placeholders of a prompt, such as ``{question}``: an edit must keep all of them and add no others."""

from __future__ import annotations

import re
import string
from collections.abc import Collection

from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate


def find_placeholders(prompt: PromptTemplate) -> frozenset[str]:
    """Returns the names of a prompt's placeholders.

    Raises:
        ConfigError: the text is not a template of its engine, or the engine is ``poml``, whose templates a model must
            not write.
    """
    if prompt.engine == "poml":
        raise ConfigError(
            "a prompt of engine 'poml' cannot be tuned, because POML runs JavaScript and a model would write it; use "
            "'jinja' or 'f-string', or name the other prompts in `prompts`"
        )
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


def show_text(prompt: PromptTemplate) -> str:
    """Returns the prompt as models read and edit it; ``fit`` converts it back.

    An f-string is shown with single braces, as the agent's model sees it: a model that reads ``{{"a": 1}}`` answers
    with either form of JSON. The template is shown unchanged if single braces would turn a literal brace into a
    placeholder, as in ``{{question}} {question}``.
    """
    plain = _unescape(prompt)
    return prompt.template if plain is None else plain


def fit(text: str, original: PromptTemplate) -> PromptTemplate:
    """Converts an edited ``show_text(original)`` to a template with the placeholders of the original.

    The white space around the original is kept. In an f-string that was shown with single braces, braces around
    anything but a placeholder are literal, as in an example of JSON. An answer that nevertheless doubles all its
    literal braces is read as a template.

    Raises:
        ConfigError: a placeholder is missing or new, or the text is not a template.
    """
    shown = show_text(original)
    body = shown.strip()
    start = shown.index(body)
    text = shown[:start] + text.strip() + shown[start + len(body) :]
    wanted = find_placeholders(original)
    plain = _unescape(original)
    if plain is not None and not ("{{" not in plain and "{{" in text and _is_template(text, original)):
        text = _escape(text, _tokens(original))
    edited = original.model_copy(update={"template": text})
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


def _unescape(prompt: PromptTemplate) -> str | None:
    """An f-string with single braces; None for another engine, or if it could not be read back."""
    if prompt.engine != "f-string":
        return None
    parts = _parts(prompt.template)
    plain = "".join(part if isinstance(part, str) else _written(part) for part in parts)
    return plain if _parts(_escape(plain, _tokens(prompt))) == parts else None


def _is_template(text: str, original: PromptTemplate) -> bool:
    """Whether a text is an f-string with the placeholders of the original."""
    try:
        fields = _fields(text)
    except ConfigError:
        return False
    names = {name for name, _ in fields}
    return names == find_placeholders(original) and {_written(field) for field in fields} <= _tokens(original)


def _fields(template: str) -> list[tuple[str, str]]:
    """Name and format of each placeholder of an f-string."""
    return [part for part in _parts(template) if not isinstance(part, str)]


def _parts(template: str) -> list[str | tuple[str, str]]:
    """The parts of an f-string in order: literal texts, and name and format of each placeholder."""
    parts: list[str | tuple[str, str]] = [""]
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            last = parts[-1]
            if isinstance(last, str):
                parts[-1] = last + literal
            if name is not None:
                parts += [(name, (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")), ""]
    except ValueError as error:
        raise ConfigError(f"not a template: {error}; write {{{{ for a literal brace") from error
    for part in parts:
        if not isinstance(part, str) and not part[0].isidentifier():
            raise ConfigError(f"not a template: {{{part[0]}}} is not a plain name; write {{{{ for a literal brace")
    return parts


def _written(field: tuple[str, str]) -> str:
    return f"{{{field[0]}{field[1]}}}"


def _tokens(prompt: PromptTemplate) -> set[str]:
    """How the placeholders of an f-string may be written: as in the prompt, or without their format."""
    return {written for field in _fields(prompt.template) for written in (_written(field), f"{{{field[0]}}}")}


def _escape(text: str, tokens: Collection[str]) -> str:
    """Doubles every brace except those of placeholders."""
    pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.sub(rf"({pattern or '(?!)'})|[{{}}]", lambda match: match[1] or match[0] * 2, text)
