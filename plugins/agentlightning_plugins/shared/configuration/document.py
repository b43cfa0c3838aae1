"""A configuration file as data: its values, their line numbers, and the overrides from the command line."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import click
import yaml

from agentlightning.errors import ConfigError
from agentlightning.resources import SECRET_NAME
from agentlightning.run.directory import RECORD_NAME, read_record
from agentlightning_plugins.shared.token import is_key_file

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys from the root of the document to a value, as in ``("data", "train")``."""

_NO_SECRETS: Final = frozenset({"", "EMPTY", "none", "None", "dummy"})
_SHORT: Final = {("agent",): "target", ("data", "train"): "source", ("data", "val"): "source"}
"""For sections that may be a string: the key that the string sets. Below ``resources`` a string is a prompt, elsewhere
the ``name`` of a component."""
_REFERENCE: Final = re.compile(r"(?<!\$)\$\{\w+\}|os\.environ/\w+")


_MAX_NODES: Final = 1_000_000


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but ``1e-3`` is a number, and what aliases repeat is limited."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count_nodes(node, {}) > _MAX_NODES:
            raise yaml.composer.ComposerError(
                problem=f"its aliases repeat more than {_MAX_NODES} values", problem_mark=node.start_mark
            )
        return node


def _count_nodes(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Returns how many nodes there are if each alias is replaced; infinity if a node contains itself."""
    if node not in known:
        known[node] = math.inf
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[node] = 1 + sum(_count_nodes(each, known) for each in nodes)
    return known[node]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


@dataclass
class ConfigDocument:
    """The values of a configuration, and their lines for error messages."""

    name: str
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Line numbers, from 1."""
    overridden: dict[KeyPath, str] = field(default_factory=dict)
    """The overrides, as written on the command line."""

    def place(self, path: KeyPath) -> str:
        """Describes the location of a value for an error message."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.overridden:
                return f"command line, {self.overridden[path[:length]]}"
            if path[:length] in self.lines:
                return f"{self.name}, line {self.lines[path[:length]]}"
        return self.name

    def override(self, arguments: Sequence[str]) -> None:
        """Applies ``a.b=value`` arguments; values are read as YAML, texts of prompts as they are unless quoted."""
        for argument in arguments:
            key, separator, text = argument.partition("=")
            if not separator or not key:
                raise ConfigError(
                    f"command line, {argument}: an override is written key=value, as in algorithm.lr=1e-4"
                )
            path = tuple(key.split("."))
            node: Any = self.values
            for depth, part in enumerate(path[:-1]):
                child = node.get(part)
                if child is None:
                    child = node[part] = {}
                elif isinstance(child, str) and path[0] == "resources":
                    child = node[part] = {"resource_type": "prompt_template", "template": child}
                elif isinstance(child, str):  # the short form of a mapping
                    child = node[part] = {_SHORT.get(path[: depth + 1], "name"): child}
                elif not isinstance(child, dict):
                    shown = ".".join(path[: depth + 1])
                    raise ConfigError(f"command line, {argument}: {shown} = {child!r} has no keys to set")
                node = child
            is_prompt = path[0] == "resources" and (len(path) == 2 or path[-1] == "template")
            node[path[-1]] = _parse_prompt(text) if is_prompt else _parse_yaml(text, f"command line, {argument}")
            self.overridden[path] = argument


def read_document(path: Path) -> ConfigDocument:
    """Reads a YAML file; raises ConfigError with the place of the mistake."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist (working directory: {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: a configuration ends in .yaml or .yml")
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a mapping of settings is needed, got {type(values).__name__}")
    document = ConfigDocument(str(path), values)
    if (root := yaml.compose(text, Loader=_Loader)) is not None:
        _note_lines(root, (), document)
    return document


def enter_folder(config: Path) -> Callable[[str], str]:
    """Works in the folder of a configuration until the command ends, because the paths in the file start there.

    The copy in the directory of a run belongs to the folder in which the run works. Modules are looked for in the
    folder, then in the former working directory. Returns :func:`anchor` for paths of the command line, which start at
    the former working directory.
    """
    folder, start = config.parent.resolve(), Path.cwd()
    if (config.parent / RECORD_NAME).is_file():
        began_in = Path(read_record(config.parent).get("working_directory", folder))
        folder = began_in if began_in.is_dir() else folder
    sys.path += [path for path in (str(folder), str(start)) if path not in sys.path]
    click.get_current_context().with_resource(contextlib.chdir(folder))
    return str if folder == start else functools.partial(anchor, start)


def anchor(start: Path, text: str) -> str:
    """Makes a path that starts at ``start`` absolute: a file, a folder, ``file.py:attribute`` or the URL of a file.

    ``module:attribute``, ``hf:name`` and other URLs stay as they are.
    """
    scheme, separator, path = text.partition(":///" if text.startswith("sqlite:") else ":")
    if not separator or scheme.endswith(".py"):
        return str(start / text)
    return f"{scheme}{separator}{start / path}" if scheme == "sqlite" else text


def read_with_overrides(path: Path, overrides: Sequence[str]) -> ConfigDocument:
    """Reads a file, applies overrides, and rejects literal secrets: a run prints and stores its configuration."""
    document = read_document(path)
    document.override(overrides)
    for key, value in _walk(document.values, ()):
        if not isinstance(value, str) or _REFERENCE.search(value) or is_key_file(value):
            continue
        is_key = bool(key) and isinstance(key[-1], str) and SECRET_NAME.search(key[-1])
        if (is_key and value not in _NO_SECRETS) or re.match(r"\w+://[^/@:]*:[^/@]+@", value):
            where = ".".join(map(str, key))
            raise ConfigError(
                f"{document.place(key)}: {where} holds a secret; put it in an environment variable and write ${{NAME}}"
            )
    return document


def _walk(value: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        return [found for key, child in value.items() for found in _walk(child, (*path, key))]
    if isinstance(value, list):
        return [found for index, child in enumerate(value) for found in _walk(child, (*path, index))]
    return [(path, value)]


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 # a SafeLoader
    except RecursionError:
        raise ConfigError(f"{where}: it is nested too deep to be read") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: not YAML: {getattr(error, 'problem', None) or error}") from error


def _parse_prompt(text: str) -> Any:
    """Returns a resource as a mapping with its type, a quoted text, or null; any other text is the prompt itself."""
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 # a SafeLoader
    except yaml.YAMLError:
        return text
    is_resource = isinstance(value, dict) and "resource_type" in value
    return value if is_resource or value is None or isinstance(value, str) else text


def _note_lines(node: yaml.Node, path: KeyPath, document: ConfigDocument) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            below = (*path, key.value)
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{document.name}, line {line}: {'.'.join(map(str, below))} is given twice")
            seen.add(key.value)
            document.lines[below] = line
            _note_lines(value, below, document)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            document.lines[(*path, index)] = value.start_mark.line + 1
            _note_lines(value, (*path, index), document)
