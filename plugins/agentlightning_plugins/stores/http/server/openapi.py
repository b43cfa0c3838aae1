"""The OpenAPI document, generated from the route table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaWarningKind

from agentlightning import __version__
from agentlightning.store.check import RUN_ID
from agentlightning_plugins.stores.http.message import ERRORS, PREFIX, RUN_HEADER, ErrorAnswer
from agentlightning_plugins.stores.http.route import Route

_JSON: Final = "application/json"
_SCHEMAS: Final = "#/components/schemas/{model}"

Key = tuple[Route, str]
Operation = dict[str, Any]


class _Generator(GenerateJsonSchema):
    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Omits defaults that are not plain JSON, such as frozen lists, without a warning."""


def describe(routes: Sequence[Route], others: Mapping[tuple[str, str], Operation]) -> dict[str, Any]:
    """Makes the document.

    Args:
        routes: the route table.
        others: OpenAPI operations of the other routes, by method and full path.
    """
    wanted: list[tuple[Key, JsonSchemaMode, TypeAdapter[Any]]] = []
    for route in routes:
        if route.message is not None:
            wanted.append(((route, "message"), "validation", TypeAdapter(route.message)))
        answer = route.result if route.result_key is None else dict[str, route.result]  # type: ignore[name-defined] # made here
        wanted.append(((route, "answer"), "serialization", TypeAdapter(answer)))
    wanted.append(((routes[0], "error"), "serialization", TypeAdapter(ErrorAnswer)))
    schemas, definitions = TypeAdapter.json_schemas(wanted, ref_template=_SCHEMAS, schema_generator=_Generator)
    named = definitions.get("$defs", {})
    _let_rollouts_have_attempts(named)

    paths: dict[str, dict[str, Operation]] = {}
    for route in routes:
        operation = _operation(
            route, schemas.get(((route, "message"), "validation")), schemas[(route, "answer"), "serialization"], named
        )
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = operation
    for (method, path), described in others.items():
        operation = {"operationId": _operation_id(method, path), **described}
        operation["responses"] = {**described["responses"], **_errors(401, 403, 405, 422, 500, 503)}
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lightning store", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": named, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, message: Any, answer: Any, named: Mapping[str, Any]) -> Operation:
    operation: Operation = {
        "operationId": _operation_id(route.method, route.path),
        "summary": (route.function.__doc__ or "").strip().partition("\n")[0],
        "tags": [route.path.split("/")[1]],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in route.path_names
            ),
            {
                "name": RUN_HEADER,
                "in": "header",
                "description": "The run that the request is about; without this header, the run is `default`.",
                "schema": {"type": "string", "pattern": f"^{RUN_ID.pattern}$"},
            },
        ],
    }
    statuses = [401, 403, 405, 422, 500, 503]
    if message is not None and route.method == "GET":
        operation["parameters"] += _query_parameters(message, named)
    elif message is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": message}}}
    if message is not None:
        statuses.append(400)
    if route.method == "POST":
        statuses += [404, 409, 413]
    elif "{" in route.path or route.path.endswith("/latest"):
        statuses.append(404)
    operation["responses"] = {
        str(route.status): {"description": "Done.", "content": {_JSON: {"schema": answer}}},
        **_errors(*statuses),
    }
    return operation


def _query_parameters(message: Any, named: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    while "$ref" in message:
        message = named[message["$ref"].rpartition("/")[2]]
    for name, schema in message["properties"].items():
        given = [choice for choice in schema.get("anyOf", [schema]) if choice != {"type": "null"}]
        parameter: dict[str, Any] = {"name": name, "in": "query", "required": name in message.get("required", ())}
        (plain,) = given  # there are no other unions, and a query string has no null
        if plain.get("type") == "object":
            yield {**parameter, "content": {_JSON: {"schema": plain}}}
        else:
            yield {**parameter, "schema": plain}


def _errors(*statuses: int) -> dict[str, Any]:
    codes = {status: [code for code, (its, _) in ERRORS.items() if its == status] for status in statuses}
    codes[405] = ["no_route"]
    content = {_JSON: {"schema": {"$ref": _SCHEMAS.format(model=ErrorAnswer.__name__)}}}
    return {
        str(status): {"description": f"Error: {' or '.join(codes[status])}.", "content": content}
        for status in sorted(statuses)
    }


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])


def _let_rollouts_have_attempts(named: dict[str, Any]) -> None:
    """Adds ``attempt`` to Rollout: an answer includes the latest attempt if there is one (AttemptedRollout)."""
    for name, schema in named.items():
        if re.fullmatch(r"Rollout(-Output)?", name):
            attempt = next(other for other in named if re.fullmatch(r"Attempt(-Output)?", other))
            schema["properties"]["attempt"] = {"$ref": _SCHEMAS.format(model=attempt)}
