"""Pickles jobs for other processes, including globals of the user's script that pickle cannot handle."""

from __future__ import annotations

import ast
import io
import logging
import pickle
import runpy
import sys
import types
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle

from agentlightning.errors import ConfigError

logger = logging.getLogger("agentlightning")
_UNPICKLABLE: Final = (TypeError, ValueError, AttributeError, pickle.PicklingError, RuntimeError)


class _Global(NamedTuple):
    """A global variable that a function uses."""

    name: str
    value: Any
    function: Any
    """A ``types.FunctionType``, which mypy would mistake for a method of this class."""


def dump_job(job: Any) -> bytes:
    """Pickles a job.

    A global of the user's script that cannot be pickled, such as ``client = OpenAI()``, is created again in the other
    process by evaluating the expression that the script assigns to it. Raises ConfigError if there is none.

    A job with functions of a script that has ``if __name__ == "__main__":`` names the script, and ``load_job`` imports
    it, as ``multiprocessing`` does: what else the script does, such as ``gym.register``, must happen there too.
    """
    expressions: dict[int, tuple[str, str]] = {}
    while True:
        file = io.BytesIO()
        pickler = _JobPickler(file, expressions)
        try:
            pickler.dump(job)
        except _UNPICKLABLE as error:
            found = _find_cause(pickler.functions, expressions)
            if found is None:
                raise
            expression = _find_expression(found)
            if expression is None:
                raise ConfigError(_explain(found, error)) from error
            logger.warning(
                "the global %s of %s cannot be sent to another process; each runner creates its own: %s",
                *(found.name, found.function.__code__.co_filename, expression),
            )
            expressions[id(found.value)] = found.name, expression
        else:
            uses_script = any(function.__module__ == "__main__" for function in pickler.functions)
            return pickle.dumps(_find_importable_script() if uses_script else None) + file.getvalue()


def load_job(data: bytes) -> Any:
    """Unpickles a job that ``dump_job`` pickled in a trusted process."""
    file = io.BytesIO(data)
    script: str | None = pickle.load(file)  # noqa: S301 # see the docstring
    if script is not None and Path(script).is_file():
        try:
            runpy.run_path(script, run_name="__mp_main__")
        except (Exception, SystemExit) as error:  # isolation point: a script may raise anything
            logger.warning("%s cannot be imported in another process: %s: %s", script, type(error).__name__, error)
    return _JobUnpickler(file).load()


class _JobPickler(cloudpickle.Pickler):  # type: ignore[misc] # has no type information
    def __init__(self, file: io.BytesIO, expressions: dict[int, tuple[str, str]]) -> None:
        super().__init__(file)
        self.functions: list[types.FunctionType] = []
        """Functions that are pickled by value."""
        self._expressions = expressions

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            self.functions.append(obj)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) not in self._expressions:
            return None
        name, expression = self._expressions[id(obj)]
        script = vars(sys.modules["__main__"])
        names = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
        return name, expression, {other: script[other] for other in sorted(names - {name}) if other in script}


class _JobUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._created: dict[str, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        name, expression, variables = pid
        if name not in self._created:
            self._created[name] = eval(expression, variables)  # noqa: S307 # the user's own script
        return self._created[name]


def _find_cause(functions: list[types.FunctionType], known: dict[int, tuple[str, str]]) -> _Global | None:
    """Returns the global that cannot be pickled; of several, one of the function that was reached last."""
    for function in reversed(functions):
        for name in _names_in(function.__code__):
            if name in function.__globals__ and id(value := function.__globals__[name]) not in known:
                try:
                    _JobPickler(io.BytesIO(), known).dump(value)
                except _UNPICKLABLE:
                    if not isinstance(value, (types.FunctionType, type)):
                        return _Global(name, value, function)
    return None


def _names_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _find_importable_script() -> str | None:
    """Returns the path of the user's script if it guards what only the first process may do."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    guarded = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in _read_script(path))
    return str(Path(path).resolve()) if path is not None and guarded else None


def _read_script(path: str | None) -> list[ast.stmt]:
    try:
        return [] if path is None else ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _find_expression(variable: _Global) -> str | None:
    """Returns the expression that the user's script assigns to a global; None unless there is exactly one."""
    script = sys.modules["__main__"]
    if variable.function.__globals__ is not vars(script):
        return None
    assigned = [
        node.value
        for node in _read_script(getattr(script, "__file__", None))
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and node.value is not None
        and list(map(ast.unparse, getattr(node, "targets", None) or [node.target])) == [variable.name]  # type: ignore[union-attr] # has one of both
    ]
    return ast.unparse(assigned[0]) if len(assigned) == 1 else None


def _explain(variable: _Global, error: Exception) -> str:
    function = variable.function
    return (
        f"the global {variable.name!r} ({type(variable.value).__name__}) that {function.__qualname__} in "
        f"{function.__code__.co_filename} uses cannot be sent to runner processes ({error}); create it in the "
        "function, or move it and the agent to a separate module and import the agent from there (each runner "
        "imports that module itself), or use strategy='shm'"
    )
