"""Records a whole Python program: writes its spans, one per line, to a file that ``agl trace`` reads."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Self

from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning.tracer.tracer import Trace, Tracer, activate
from agentlightning.types import Span


class FileTrace(Trace):
    """Appends each span to a file when the span ends, so that a killed program loses only its open spans."""

    def __init__(self, path: str) -> None:
        super().__init__(os.environ["AGL_ROLLOUT_ID"], os.environ["AGL_ATTEMPT_ID"])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)  # several processes may write

    def add(self, span: Span) -> None:
        os.write(self._file, span.model_dump_json().encode() + b"\n")

    def for_late_spans(self) -> Self:
        return self


def start_recording(path: str) -> None:
    """Traces this process until it exits."""
    tracer: Tracer = get_manager().create("tracer", "otel")
    trace = FileTrace(path)
    trace.tracer = tracer
    stack = contextlib.ExitStack()
    stack.enter_context(activate(trace))
    stack.enter_context(tracer.root_context(trace, semconv.SPAN_ROLLOUT))
    atexit.register(stack.close)
