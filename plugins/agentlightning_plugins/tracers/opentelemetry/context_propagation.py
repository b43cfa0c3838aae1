"""Tells others whose work they do: W3C's trace context in the environment of child processes and in HTTP requests.

Only what is started or sent inside an attempt carries it, and nothing that names a context of its own is changed.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from typing import Any, Final

from opentelemetry import trace as otel
from wrapt import (  # type: ignore[import-untyped] # wrapt has no types
    FunctionWrapper,
    register_post_import_hook,
)

from agentlightning.tracer.tracer import activate, get_active
from agentlightning_plugins.tracers.opentelemetry.child_context import VARIABLE, call_in_context, run_in_context

_HEADER: Final = "traceparent"
_ENV_POSITION: Final = 10
"""Of ``env`` among the positional arguments of ``Popen``, from 0, ``args`` included."""


def carry_context_out() -> Callable[[], None]:
    """Has child processes and the requests of HTTP clients carry the context of their attempt; returns the undo.

    Clients are ``httpx``, ``httpx2``, ``requests`` and ``aiohttp``, imported before or after. Processes are those of
    ``subprocess``, asyncio, ``multiprocessing`` and, for each of its calls, ``ProcessPoolExecutor``.
    """
    undo_processes = _carry_into_processes()
    calls = _Calls()
    calls.begin()

    def undo() -> None:
        calls.undo()
        undo_processes()

    return undo


def current_traceparent() -> str | None:
    """W3C's ``traceparent`` of what the caller does; None outside attempts."""
    if get_active() is None:
        return None
    context = otel.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _carry_into_processes() -> Callable[[], None]:
    popen: Any = subprocess.Popen
    original = popen.__init__

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        context = current_traceparent()
        if context is not None:
            if len(args) > _ENV_POSITION:
                args = (*args[:_ENV_POSITION], _with_context(args[_ENV_POSITION], context), *args[_ENV_POSITION + 1 :])
            else:
                kwargs["env"] = _with_context(kwargs.get("env"), context)
        original(self, *args, **kwargs)

    popen.__init__ = start

    def undo() -> None:
        if popen.__init__ is start:  # else somebody has wrapped it since
            popen.__init__ = original

    return undo


def _with_context(env: Any, context: str) -> Any:
    given = dict(os.environ if env is None else env)
    if env is not None and (VARIABLE in given or VARIABLE.encode() in given):
        return env
    return {**given, VARIABLE: context}


def _inject(headers: MutableMapping[str, str]) -> None:
    context = current_traceparent()
    if context is not None and _HEADER not in headers:
        headers[_HEADER] = context


def _send(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``send(request)`` of httpx and requests."""
    request = args[0] if args else kwargs.get("request")
    if request is not None:
        _inject(request.headers)
    return wrapped(*args, **kwargs)


def _request(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``ClientSession._request(method, url, *, headers=None)`` of aiohttp."""
    context = current_traceparent()
    if context is not None:
        headers = kwargs.get("headers")
        names = {str(name).lower() for name in (dict(headers) if headers else ())}
        if _HEADER not in names:
            if headers is not None and hasattr(headers, "add"):  # a multidict, whose repeated headers stay
                kwargs["headers"] = headers.copy()
            else:
                kwargs["headers"] = dict(headers or {})
            kwargs["headers"][_HEADER] = context
    return wrapped(*args, **kwargs)


def _start(wrapped: Callable[..., Any], process: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``start()`` of a process of ``multiprocessing``: the child is told before it does its work."""
    context = current_traceparent()
    if context is None:
        return wrapped(*args, **kwargs)
    process.run = functools.partial(run_in_context, context, process.run)
    try:
        return wrapped(*args, **kwargs)
    finally:
        del process.run


def _submit(wrapped: Callable[..., Any], pool: Any, args: Any, kwargs: dict[str, Any]) -> Future[Any]:
    """``submit(fn, *args, **kwargs)`` of ``ProcessPoolExecutor``, whose processes work for several attempts."""
    context = current_traceparent()
    future: Future[Any]
    if context is None:
        future = wrapped(*args, **kwargs)
    else:
        with activate(None):  # a process that it starts outlives the attempt
            future = wrapped(call_in_context, context, *args, **kwargs)
    return future


_PLACES: Final = {
    "httpx": (("Client", "send", _send), ("AsyncClient", "send", _send)),
    "httpx2": (("Client", "send", _send), ("AsyncClient", "send", _send)),
    "requests": (("Session", "send", _send),),
    "aiohttp": (("ClientSession", "_request", _request),),
    "multiprocessing.process": (("BaseProcess", "start", _start),),
    "concurrent.futures.process": (("ProcessPoolExecutor", "submit", _submit),),
}
"""By module: class, method and what is wrapped around it."""


class _Calls:
    """The wrappers around methods of classes that may not be imported yet."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_undone = False
        self._wrapped: list[tuple[Any, str, Any, Any]] = []

    def begin(self) -> None:
        """Wraps what is imported, now or later."""
        for module in _PLACES:
            if module in sys.modules:
                self._wrap(importlib.import_module(module))
            else:
                register_post_import_hook(self._wrap, module)

    def _wrap(self, module: Any) -> None:
        with self._lock:
            if self._is_undone:
                return
            for class_name, name, wrapper in _PLACES[module.__name__]:
                owner = getattr(module, class_name, None)
                original = vars(owner).get(name) if owner is not None else None
                if original is not None:
                    installed = FunctionWrapper(original, wrapper)
                    setattr(owner, name, installed)
                    self._wrapped.append((owner, name, original, installed))

    def undo(self) -> None:
        """Puts back every method that is still as we left it."""
        with self._lock:
            self._is_undone = True
            while self._wrapped:
                owner, name, original, installed = self._wrapped.pop()
                if vars(owner).get(name) is installed:
                    setattr(owner, name, original)
