"""Carries the trace of whoever submits work to a thread pool along with the work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from opentelemetry import context as otel_context

from agentlightning.tracer.tracer import Active, activate, get_active


def carry_traces_into_pools() -> Callable[[], None]:
    """Has work that is submitted inside a trace run inside it; returns what undoes this.

    Python gives pool threads no context. Work from outside traces is left as it is. Threads that a program starts
    itself are left alone too: such a thread may serve the attempt that started it, or all that come later.
    """
    original: Any = ThreadPoolExecutor.submit

    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        active = get_active()
        if active is None:
            future: Future[Any] = original(self, fn, *args, **kwargs)
        else:
            future = original(self, _run, active, otel_context.get_current(), fn, args, kwargs)
        return future

    pool: Any = ThreadPoolExecutor  # every one, those of libraries too
    pool.submit = submit

    def undo() -> None:
        if pool.submit is submit:  # else somebody has wrapped it since
            pool.submit = original

    return undo


def _run(
    active: Active, context: otel_context.Context, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    token = otel_context.attach(context)
    try:
        with activate(active):
            return fn(*args, **kwargs)
    finally:
        otel_context.detach(token)
