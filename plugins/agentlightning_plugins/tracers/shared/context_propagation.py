"""Propagates an attempt's trace context to thread pools, child processes and HTTP requests.

OpenTelemetry's own instrumentations do not fit: they record a span for each request, overwrite a ``traceparent`` that
the caller set, and carry no context into processes; in the threads of a pool, an attempt's context would stay.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import os
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentlightning.tracer.tracer import activate, get_active_trace
from agentlightning_plugins.shared.instrumentation import OnImport, Patches, Undo
from agentlightning_plugins.tracers.shared.child_context import VARIABLE, call_in_context

_HEADER: Final = "traceparent"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_ENV_POSITION: Final = 10
"""Index of ``env`` among the positional arguments of ``Popen``, including ``args``."""


def propagate_context() -> list[Undo]:
    """Makes work that is started inside an attempt carry its context; returns the functions that undo this.

    Covered are ``ThreadPoolExecutor`` and ``ProcessPoolExecutor``, the processes of ``subprocess``, asyncio and
    ``multiprocessing``, and the clients ``httpx``, ``httpx2``, ``requests`` and ``aiohttp``, imported before or after.
    The runner covers threads that an agent starts itself. An environment or request that names a ``traceparent`` keeps
    it.
    """
    return [OnImport(module, functools.partial(_patch, module)).undo for module in _METHODS]


def current_traceparent() -> str | None:
    """Returns W3C's ``traceparent`` of the caller's span; None outside attempts."""
    carrier: dict[str, str] = {}
    if get_active_trace() is not None:
        _PROPAGATOR.inject(carrier)
    return carrier.get(_HEADER)


def _patch(module_name: str) -> Undo:
    module, patches = importlib.import_module(module_name), Patches()
    for class_name, method, wrapper in _METHODS[module_name]:
        patches.wrap(getattr(module, class_name), method, wrapper)
    return patches.undo


def _submit_to_thread(wrapped: Callable[..., Any], pool: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Wraps ``ThreadPoolExecutor.submit(fn, *args, **kwargs)``."""
    if get_active_trace() is None:
        return wrapped(*args, **kwargs)
    return wrapped(contextvars.copy_context().run, *args, **kwargs)


def _submit_to_process(wrapped: Callable[..., Any], pool: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Wraps ``ProcessPoolExecutor.submit(fn, *args, **kwargs)``."""
    traceparent = current_traceparent()
    if traceparent is None:
        return wrapped(*args, **kwargs)
    with activate(None):  # a process that the pool starts outlives the attempt
        return wrapped(call_in_context, traceparent, *args, **kwargs)


def _start_process(wrapped: Callable[..., Any], process: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Wraps ``start()`` of a process of ``multiprocessing``."""
    traceparent = current_traceparent()
    if traceparent is None:
        return wrapped(*args, **kwargs)
    process.run = functools.partial(call_in_context, traceparent, process.run)
    try:
        return wrapped(*args, **kwargs)
    finally:
        del process.run


def _open_process(wrapped: Callable[..., Any], process: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Wraps ``Popen(args, ..., env=None, ...)``."""
    traceparent = current_traceparent()
    if traceparent is not None:
        if len(args) > _ENV_POSITION:
            env = _add_variable(args[_ENV_POSITION], traceparent)
            args = (*args[:_ENV_POSITION], env, *args[_ENV_POSITION + 1 :])
        else:
            kwargs["env"] = _add_variable(kwargs.get("env"), traceparent)
    return wrapped(*args, **kwargs)


def _add_variable(env: Any, traceparent: str) -> Any:
    env = dict(os.environ if env is None else env)  # os.environ refuses to look up bytes
    return env if VARIABLE in env or VARIABLE.encode() in env else {**env, VARIABLE: traceparent}


def _send(wrapped: Callable[..., Any], client: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Wraps ``send(request)`` of httpx and requests."""
    _add_header((args[0] if args else kwargs["request"]).headers)
    return wrapped(*args, **kwargs)


def _open_session(wrapped: Callable[..., Any], session: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Wraps ``ClientSession(..., trace_configs=None)`` of aiohttp."""
    from aiohttp import TraceConfig

    config = TraceConfig()
    config.on_request_start.append(_on_request_start)
    wrapped(*args, **{**kwargs, "trace_configs": [*(kwargs.get("trace_configs") or ()), config]})


async def _on_request_start(session: Any, context: Any, request: Any) -> None:
    _add_header(request.headers)


def _add_header(headers: MutableMapping[str, str]) -> None:
    traceparent = current_traceparent()
    if traceparent is not None and _HEADER not in headers:
        headers[_HEADER] = traceparent


_HTTPX: Final = (("Client", "send", _send), ("AsyncClient", "send", _send))
_METHODS: Final[dict[str, tuple[tuple[str, str, Any], ...]]] = {
    "aiohttp": (("ClientSession", "__init__", _open_session),),
    "concurrent.futures.process": (("ProcessPoolExecutor", "submit", _submit_to_process),),
    "concurrent.futures.thread": (("ThreadPoolExecutor", "submit", _submit_to_thread),),
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "multiprocessing.process": (("BaseProcess", "start", _start_process),),
    "requests": (("Session", "send", _send),),
    "subprocess": (("Popen", "__init__", _open_process),),
}
"""Class, method and wrapper of each patched method, by module."""
