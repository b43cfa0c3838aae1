"""Routes of the REST API: the messages of a route are derived from the signature of the function behind it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote, urlencode

from pydantic import ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.store.check import argument_type
from agentlightning.types import UNSET, AttemptedRollout, PaginatedResult, Record, Rollout, Unset

MAX_BATCH: Final = 100_000
"""Maximum number of rollouts, spans or ids in one request."""


@dataclass(frozen=True, eq=False)
class Route:
    """One route, described by the function that answers it.

    The function is a method of ``LightningStore``, or a handler of the server, whose first parameter is a ``Context``.
    Its other parameters are the names in the path and the keys of the message. An absent key means that the argument
    was not given, which differs from null. The first line of its docstring is the summary in the OpenAPI document.
    """

    method: str
    path: str
    """Path below the prefix, with ``{names}``. A ``run_id`` that is not a parameter is the run of the store."""
    function: Callable[..., Any]
    status: int = 200
    missing: str = ""
    """Message of the 404 that a getter answers instead of None."""
    result_key: str | None = None
    """The answer is an object with the result under this key; None: the answer is the result."""
    repeatable: bool = True
    """Whether the request is idempotent."""
    body: Any = None
    """Type of a body that is one record, which the function takes as ``record``."""
    for_attempts: bool = False
    """Whether an attempt's token allows the request if it is about that attempt."""

    @cached_property
    def path_names(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function except the first, with evaluated annotations."""
        hints = get_type_hints(self.function, include_extras=True)
        _, *others = inspect.signature(self.function).parameters.values()
        return {parameter.name: parameter.replace(annotation=hints[parameter.name]) for parameter in others}

    @cached_property
    def message(self) -> Any:
        """The type of the body, or of the query string for GET; None if there is neither."""
        if self.body is not None:
            return self.body
        fields: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if name not in self.path_names:
                kind = _json_type(name, parameter.annotation)
                fields[name] = kind if _is_required(parameter) else NotRequired[kind]
        if not fields:
            return None
        create: Any = TypedDict  # a type that only exists at run time
        message = create(self.function.__name__.title().replace("_", ""), fields)
        message.__pydantic_config__ = ConfigDict(extra="forbid")
        return message

    @cached_property
    def defaults(self) -> dict[str, None]:
        """None for each parameter that has no default in Python but may be absent from a message."""
        return {
            name: None
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty and not _is_required(parameter)
        }

    @cached_property
    def result(self) -> Any:
        """The type of the function's result, and of a successful answer unless there is a ``result_key``."""
        result = get_type_hints(self.function)["return"]
        return reduce(or_, [kind for kind in _members(result) if kind is not NoneType]) if self.missing else result

    @cached_property
    def read_result(self) -> Callable[[Any], Any]:
        """The function that makes the result from the JSON of an answer."""
        read = _reader(self.result)
        return read if self.result_key is None else lambda content: read(content[self.result_key])

    def encode(self, arguments: Mapping[str, Any], run_id: str) -> tuple[str, dict[str, Any] | None]:
        """Returns the path with its query string, and the body, for a call with these valid arguments."""
        given = {name: value for name, value in arguments.items() if value is not UNSET}
        names = {name: quote(str(given.pop(name, run_id)), safe="") for name in self.path_names}
        path = self.path.format(**names)
        if self.method == "GET":
            query = urlencode({name: value for name, value in given.items() if value is not None})
            return f"{path}?{query}" if query else path, None
        return path, given if self.message is not None else None


def read_rollout(content: dict[str, Any]) -> Rollout:
    """Makes a rollout from its JSON, with its attempt if there is one."""
    return read_record(AttemptedRollout if "attempt" in content else Rollout, content)


R = TypeVar("R", bound=Record)


def read_record(kind: type[R], content: dict[str, Any]) -> R:
    """Makes a record from its JSON, without the fields that only a newer server knows."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        for found in error.errors(include_url=False, include_input=False):
            if found["type"] != "extra_forbidden":
                raise
            *path, name = found["loc"]
            parent: Any = content
            for step in path:
                parent = parent[step]
            del parent[name]
        return kind.model_validate(content)


def _json_type(name: str, annotation: Any) -> Any:
    """Returns the type that a parameter with this annotation has in a message."""
    kinds = []
    for kind in _members(annotation):
        if get_origin(kind) is Sequence:
            kinds.append(Annotated[argument_type(name, kind), Field(max_length=MAX_BATCH)])
        elif kind is not Unset:
            kinds.append(kind)
    return argument_type(name, reduce(or_, kinds))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and NoneType not in _members(parameter.annotation)


def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns the function that makes a value of this type from its JSON."""
    if kind is Rollout:
        return read_rollout
    if get_origin(kind) is Sequence:
        read_item = _reader(get_args(kind)[0])
        return lambda content: [read_item(item) for item in content]
    if isinstance(kind, type) and issubclass(kind, PaginatedResult):
        read_one = _reader(kind.__pydantic_generic_metadata__["args"][0])
        return lambda content: kind.model_construct(
            **{**content, "items": [read_one(item) for item in content["items"]]}
        )
    if isinstance(kind, type) and issubclass(kind, Record):
        return partial(read_record, kind)
    return lambda content: content
