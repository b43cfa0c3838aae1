"""Generates the pages of the reference, as Markdown, from the code and from running servers."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import functools
import importlib
import inspect
import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

import agentlightning as agl
from agentlightning import errors, event, semconv
from agentlightning.cli import _SECTIONS, add_plugin_commands, cli
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.shared.configuration.config import config_schema

USUAL = ("401", "403", "405", "422", "500", "503")
"""Answers that any request may get."""
_PACKAGES = ("agentlightning", "agentlightning_plugins", "agentlightning_integrations", "agentlightning_algorithms")


def pages() -> Iterator[tuple[str, str, str, str]]:
    """Yields place, title, summary and content of each page."""
    rest, store_metrics, gateway_metrics = asyncio.run(_ask_servers())
    yield from _python()
    yield "reference/commands.md", "Commands", "Every command of `agl`, with its arguments and options.", _commands()
    yield "reference/configuration.md", "Configuration", "Every key of a configuration file.", _configuration()
    yield "reference/rest.md", "REST", "The HTTP API of a store, which also serves it as `/openapi.json`.", _rest(rest)
    text = "What a store and a gateway report to Prometheus at `/metrics`."
    yield "reference/metrics.md", "Metrics of servers", text, _metrics(store=store_metrics, gateway=gateway_metrics)
    yield "reference/events.md", "Events", "What `store.subscribe`, trackers and `/v1/agl/events` deliver.", _events()
    yield (
        "reference/spans.md",
        "Span attributes",
        "Names of spans and attributes, in `agl.semconv`.",
        _span_attributes(),
    )
    text = "Every error that Lightning raises, by its text; three dots stand for what depends on the case."
    yield "reference/errors.md", "Error messages", text, _errors()
    yield "reference/components.md", "Components", "What `agl plugins` lists: each part and its name.", _components()


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [header, re.sub(r"[^|]+", "---", header)]
    lines += [
        "| " + " | ".join(re.sub(r"\s*\n\s*", " ", str(cell)).replace("|", "\\|") for cell in row) + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n\n" if len(lines) > 2 else ""


def code(text: object) -> str:
    return f"`{text}`" if text not in (None, "") else ""


def escape(text: str) -> str:
    """Keeps Markdown from taking `<n>` for HTML, outside code."""
    return re.sub(r"(`[^`]*`)|<", lambda match: match[1] or "&lt;", text)


def prose(text: str | None) -> str:
    """Returns a docstring as Markdown: its sections are lists."""
    lines, is_section = [], False
    for line in inspect.cleandoc(text or "").replace("``", "`").splitlines():
        if section := re.fullmatch(r"(Args|Returns|Yields|Raises|Attributes):", line):
            lines.append(f"\n**{section[1].replace('Args', 'Arguments')}**\n")
            is_section = True
        elif is_section and (item := re.fullmatch(r"    (\*{0,2}\w+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            is_section = is_section and (not line or line.startswith(" "))
            lines.append(f"  {line.strip()}" if is_section else line)
    return escape("\n".join(lines))


# Python


def _python() -> Iterator[tuple[str, str, str, str]]:
    """Yields a page of all names, and one for each module that the stub file of ``agentlightning`` imports from."""
    stub = Path(agl.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    names: dict[str, list[str]] = {}
    for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE):
        names.setdefault(module, []).append(name)
    overview, below = [], []
    public: dict[int, str] = {}
    for name in (name for found in names.values() for name in found):
        public.setdefault(id(getattr(agl, name)), name)
    for module, found in names.items():
        page, about = (
            module.removeprefix("agentlightning.").replace("agentlightning", "agl"),
            importlib.import_module(module),
        )
        summary = prose(about.__doc__).partition("\n\n")[0].replace("\n", " ")
        links = [f"[{name}](python/{page}.md#agl{name.lower()})" for name in found]
        overview.append(f"## {module}\n\n{summary}\n\n{', '.join(links)}\n")
        parts = [f"## agl.{name}\n\n{_describe(name, getattr(agl, name), public)}" for name in found]
        below.append((f"reference/python/{page}.md", page, summary, "\n".join(parts)))
    yield (
        "reference/python.md",
        "Python",
        "Every public name of `agentlightning`, with its signature.",
        "\n".join(overview),
    )
    yield from below


def _describe(name: str, found: Any, public: dict[int, str]) -> str:
    """Describes a public name; ``public`` has all by the identity of their objects."""
    if public[id(found)] != name:
        return f"Another name of `agl.{public[id(found)]}`.\n"
    if inspect.ismodule(found):
        return f"The module `{found.__name__}`. {prose(found.__doc__)}\n"
    if inspect.isfunction(inspect.unwrap(found)):
        return _signature(found, name) + prose(found.__doc__) + "\n"
    if not inspect.isclass(found) or not found.__module__.startswith("agentlightning"):
        return f"```python\n{name} = {re.sub(r'(typing|agentlightning[.a-z_]*)[.]', '', str(found))}\n```\n"
    above = [base for base in found.__mro__[1:] if id(base) in public]
    ours = [
        base
        for base in reversed(found.__mro__)
        if base.__module__.startswith("agentlightning") and not any(issubclass(each, base) for each in above)
    ]
    parts = [_signature(found, name), prose(found.__doc__) + "\n"]
    if above:
        parts.append(f"It is a `{public[id(above[0])]}`, and has what that has.\n")
    parts.append(table("| field | type | default | |", _fields(ours)))
    if "__init__" in vars(found) and not hasattr(found, "model_fields") and inspect.isfunction(found.__init__):
        parts.append(prose(found.__init__.__doc__) + "\n")
    for method, function in _methods(ours).items():
        if above and hasattr(above[0], method):
            continue
        signature = "" if isinstance(function, property) else _signature(function, method)
        parts.append(f"### {name}.{method}\n\n{signature}{prose(inspect.getdoc(function))}\n")
    return "\n".join(parts)


@functools.cache
def _definitions(module: str) -> dict[str, Any]:
    """Returns the classes and functions of a module by qualified name, as syntax trees."""
    found: dict[str, Any] = {}

    def visit(node: Any, path: str) -> None:
        for each in node.body:
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[path + each.name] = each
            if isinstance(each, ast.ClassDef | ast.If):  # an overload comes before what it stands for
                visit(each, f"{path}{each.name}." if isinstance(each, ast.ClassDef) else path)

    visit(ast.parse(inspect.getsource(sys.modules[module])), "")
    return found


def _parse(found: Any) -> Any:
    """Returns the syntax tree of a class or function."""
    found = inspect.unwrap(found)
    return _definitions(found.__module__)[found.__qualname__]


def _signature(found: Any, name: str = "") -> str:
    """Returns the head of a class or function as its source has it; a class has the parameters of its constructor."""
    node = _parse(found)
    arguments, result = None, ""
    if isinstance(node, ast.ClassDef):
        head = f"class {name or node.name}"
        written = not (dataclasses.is_dataclass(found) or hasattr(found, "model_fields"))
        if written and inspect.isfunction(found.__init__) and found.__init__.__module__.startswith("agentlightning"):
            arguments = _parse(found.__init__).args
    else:
        head = f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {name or node.name}"
        arguments, result = node.args, f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if isinstance(node, ast.ClassDef) and arguments is None:
        return f"```python\n{head}\n```\n"
    parts = _split(ast.unparse(arguments))
    parts = [part for part in parts if part not in ("self", "cls", "")]
    text = f"{head}({', '.join(parts)}){result}"
    if len(text) > 88:
        text = "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){result}"])
    return f"```python\n{text}\n```\n"


def _split(text: str) -> list[str]:
    """Splits parameters at the commas outside brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [re.sub(r"^(\w+: [^=]+[^ =])=(?! )", r"\1 = ", part.strip()) for part in parts]


def _methods(classes: Iterable[type]) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for name, value in (item for each in classes for item in vars(each).items()):
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if not name.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
            methods[name] = function
    return {name: function for name, function in methods.items() if inspect.getdoc(function)}


def _fields(classes: Iterable[type]) -> list[tuple[str, str, str, str]]:
    """Returns name, type, default and meaning of the annotated attributes in the source of classes."""
    found = {}
    for body in (_parse(each).body for each in classes):
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_":
                default = ast.unparse(field.value) if field.value else ""
                default = match[1] if (match := re.match(r"Field\(default=([^,)]+)", default)) else default
                default = re.sub(r"Field\(default_factory=(\w[\w.]*).*\)|Field\(.*\)", r"\1", default)
                meaning = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
                kind = re.sub(r"^Annotated\[(.*), .*\]", r"\1", ast.unparse(field.annotation))
                found[field.target.id] = (code(field.target.id), code(kind), code(default), prose(meaning))
    return list(found.values())


# Commands


def _commands() -> str:
    add_plugin_commands(get_manager())
    left = dict(cli.commands)
    lines = []
    for section, names in _SECTIONS.items():
        lines += [f"## {section}\n"]
        for name in names.split():
            lines += _command(f"agl {name}", left.pop(name), "###")
    return "\n".join(lines)


def _command(path: str, command: click.Command, level: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"{level} {path}\n\n```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    yield re.sub(r"\n?\x08\n((?:.+\n?)+)", r"\n```text\n\1\n```\n", inspect.cleandoc(command.help or "")) + "\n"
    records = [each.get_help_record(context) for each in command.params]
    yield table(
        "| option | |", [(code(each[0]), escape(each[1])) for each in records if each and "--help" not in each[0]]
    )
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command(f"{path} {name}", below, level + "#")


# Configuration and REST: JSON schemas


def _configuration() -> str:
    schema = config_schema()
    named = {"The file": schema, **schema["$defs"]}
    return "".join(_model(title, model) for title, model in named.items())


def _model(title: str, schema: dict[str, Any]) -> str:
    lines = [f"## {title}\n\n{prose(schema.get('description'))}\n\n"]
    required = schema.get("required", ())
    rows = [
        (
            code(name),
            _type(field),
            "required" if name in required else code(json.dumps(field["default"]) if "default" in field else ""),
            prose(field.get("description")),
        )
        for name, field in schema.get("properties", {}).items()
    ]
    return "".join(
        [
            *lines,
            table("| key | type | default | |", rows),
            _type(schema) + "\n\n" if "properties" not in schema else "",
        ]
    )


def _type(schema: dict[str, Any]) -> str:
    """Returns the type that a JSON schema describes, with links to the models of the page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[word]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(each)) for each in schema["enum"])
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"list of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {_type(schema['additionalProperties'])}"
    limits = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if abs(schema.get(key, 2**63)) < 2**53
    ]
    return " ".join([str(kind), *limits])


def _rest(document: dict[str, Any]) -> str:
    lines = [
        "A request carries `Authorization: Bearer TOKEN` if the store has tokens, and the header `agl-run` if it is "
        "about another run than `default`. Every request may be answered with 401 (no token, or an unknown one), 403 "
        "(the token does not allow it), 405, 422 (an invalid value), 500 or 503 (the database does not answer); other "
        "errors are named.\n"
    ]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation.get("tags", ["others"])[0], []).append(_operation(method, path, operation))
    for tag, operations in by_tag.items():
        lines += [f"## {tag}\n", *operations]
    lines += ["## Models\n"]
    lines += [
        _model(name, schema).replace("## ", "### ", 1) for name, schema in document["components"]["schemas"].items()
    ]
    return "\n".join(lines)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    def body_of(described: dict[str, Any]) -> str:
        return ", ".join(
            f"{_type(each.get('schema', {}))}" if kind == "application/json" else code(kind)
            for kind, each in described.get("content", {}).items()
        )

    lines = [f"### {method.upper()} {path}\n\n{prose(operation.get('summary'))}\n\n"]
    if operation.get("description"):
        lines.append(prose(operation["description"]) + "\n\n")
    rows = [
        (
            code(each["name"]),
            each["in"],
            _type(each.get("schema") or each["content"]["application/json"]["schema"]),
            each.get("description", ""),
        )
        for each in operation.get("parameters", ())
        if each["name"] != "agl-run"
    ]
    lines.append(table("| parameter | in | type | |", rows))
    if "requestBody" in operation:
        lines.append(f"Body: {body_of(operation['requestBody'])}. ")
    good = [
        f"{status}: {body_of(answer) or answer['description']}"
        for status, answer in operation["responses"].items()
        if status < "400"
    ]
    bad = [
        f"{status} ({answer['description'].removeprefix('Error: ').rstrip('.')})"
        for status, answer in operation["responses"].items()
        if status >= "400" and status not in USUAL
    ]
    lines.append(f"Answer {'; '.join(good)}. {'Errors: ' * bool(bad)}{', '.join(bad)}{'.' * bool(bad)}\n")
    return "".join(lines)


# Servers


async def _ask_servers() -> tuple[dict[str, Any], str, str]:
    """Returns the OpenAPI document of a store, and the metrics of a store and a gateway."""

    def read(url: str) -> Callable[[], str]:
        return lambda: urllib.request.urlopen(url).read().decode()  # noqa: S310 our own server

    store = agl.InMemoryLightningStore()
    server = agl.LightningStoreServer(store, port=0)
    gateway = agl.LLMProxy(port=0, model_list=[], store=store)
    await server.start()
    await gateway.start()
    try:
        document = await asyncio.to_thread(read(f"{server.endpoint}/openapi.json"))
        metrics = [
            await asyncio.to_thread(read(f"{each.endpoint.removesuffix('/v1')}/metrics")) for each in (server, gateway)
        ]
    finally:
        await gateway.stop()
        await server.stop()
    return json.loads(document), *metrics


def _metrics(**texts: str) -> str:
    lines, seen = [], set()
    for server, text in texts.items():
        rows = []
        for family in text_string_to_metric_families(text):
            name = family.name + "_total" * (family.type == "counter" and not family.name.endswith("_total"))
            if name not in seen:
                seen.add(name)
                rows.append((code(name), family.type, family.documentation))
        lines.append(f"## {server.capitalize()}\n\n{table('| metric | type | |', rows)}")
    return "\n".join(lines) + "\nA gateway also reports the metrics of its process.\n"


# Events, attributes, components


def _events() -> str:
    kinds = [
        each
        for each in vars(event).values()
        if inspect.isclass(each) and each.__module__ == event.__name__ and each.__name__[0] != "_"
    ]
    return "\n".join(
        f"## {each.__name__}\n\n{prose(each.__doc__)}\n\n{table('| field | type | default | |', _fields([each]))}"
        for each in kinds
    )


def _span_attributes() -> str:
    source = inspect.getsource(semconv)
    rows = [
        (
            code(found["value"]),
            code(f"semconv.{found['name']}"),
            (found["comment"] or found["text"] or "").strip().replace("``", "`"),
        )
        for found in re.finditer(
            r'^(?P<name>[A-Z][A-Z_]+): Final = "(?P<value>[^"]+)"(?:  # (?P<comment>.*))?(?:\n"""(?P<text>[^"]+)""")?',
            source,
            re.MULTILINE,
        )
    ]
    return table("| span or attribute | name in Python | |", rows)


def _errors() -> str:
    """Lists what the source raises."""
    folders = [Path(importlib.import_module(name).__path__[0]) for name in _PACKAGES]
    kinds = {name for name, each in vars(errors).items() if inspect.isclass(each)} | {"CallRefused"}
    rows = set()
    for folder, file in [(each, file) for each in folders for file in each.rglob("*.py")]:
        module = ".".join(file.with_suffix("").relative_to(folder).parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind, texts = ast.unparse(node.exc.func), [_text(each) for each in node.exc.args]
                if kind in kinds and len(text := max(texts, key=len)) > 12:
                    rows.add((escape(text), code(kind), code(module.removesuffix(".__init__"))))
    return table("| message | error | raised in |", sorted(rows, key=lambda row: row[0].lower().lstrip("… `'")))


def _text(node: ast.AST) -> str:
    """Returns the text that an expression makes, as far as it is known."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
    return "…"


def _components() -> str:
    manager = get_manager()
    lines = []
    for kind in sorted(manager.kinds.values(), key=lambda each: each.name):
        rows = [(code(each.name), each.summary, code(each.extra)) for each in manager.components(kind.name).values()]
        lines += [
            f"## {kind.name}\n\n{kind.summary}. Each is {code(kind.expects)}.\n\n",
            table("| name | | extra |", sorted(rows)),
        ]
    return "".join(lines)
