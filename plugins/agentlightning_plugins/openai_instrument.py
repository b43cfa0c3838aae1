"""Records the calls of the ``openai`` client, whichever was imported first; never imports ``openai`` itself."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from wrapt import (  # type: ignore[import-untyped] # wrapt has no types
    FunctionWrapper,
    register_post_import_hook,
    wrap_function_wrapper,
)

logger = logging.getLogger("agentlightning")

_WITH_HEADERS: Final = (
    ("openai.resources.chat.completions", "Completions.create"),
    ("openai.resources.chat.completions", "Completions.parse"),
    ("openai.resources.chat.completions", "AsyncCompletions.create"),
    ("openai.resources.chat.completions", "AsyncCompletions.parse"),
    ("openai.resources.completions", "Completions.create"),
    ("openai.resources.completions", "AsyncCompletions.create"),
    ("openai.resources.embeddings", "Embeddings.create"),
    ("openai.resources.embeddings", "AsyncEmbeddings.create"),
)
"""Methods whose instrumentation writes ``traceparent`` into the caller's ``extra_headers``."""


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has calls of ``openai`` recorded by a provider, now or once the library is imported; returns what undoes it."""
    instrumentation = _Instrumentation(tracer_provider)
    register_post_import_hook(instrumentation.begin, "openai")
    return instrumentation.undo


class _Instrumentation:
    def __init__(self, tracer_provider: Any) -> None:
        self._tracer_provider = tracer_provider
        self._lock = threading.Lock()
        self._is_undone = False
        self._original: dict[tuple[type, str], Any] = {}
        self._installed: dict[tuple[type, str], Any] = {}
        self._settings: dict[str, Any] = {}

    def begin(self, module: Any) -> None:
        """Wraps the client's methods; called in the middle of somebody's ``import openai``."""
        with self._lock:
            if self._is_undone or self._installed:
                return
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, about the instrumentation
                    self._wrap()
            except Exception as error:  # isolation point: importing openai must not fail because we cannot trace it
                logger.warning("calls of openai are not traced: %s", error, exc_info=error)

    def undo(self) -> None:
        """Puts back every method that is still as we left it."""
        with self._lock:
            self._is_undone = True
            if not self._installed:
                return
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor

            now = {place: vars(place[0]).get(place[1]) for place in self._installed}
            OpenAIInstrumentor().uninstrument()  # forgets some methods, and strips other people's wrappers off ours
            for (owner, name), wrapper in self._installed.items():
                value = now[owner, name]
                setattr(owner, name, self._original[owner, name] if value is wrapper else value)
            self._installed = {}
            self._restore_settings()

    def _wrap(self) -> None:
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor
        from opentelemetry.instrumentation.openai.shared.config import Config
        from opentelemetry.metrics import NoOpMeterProvider

        self._settings = {name: value for name, value in vars(Config).items() if not name.startswith("_")}
        # Images stay in the messages: the default uploader makes it drop the whole prompt.
        instrumentor = OpenAIInstrumentor(upload_base64_image=None)
        if instrumentor.is_instrumented_by_opentelemetry:
            self._restore_settings()
            logger.info("openai is instrumented already; its spans are recorded if they use the global provider")
            return
        before = dict(_methods())
        instrumentor.instrument(tracer_provider=self._tracer_provider, meter_provider=NoOpMeterProvider())
        for module, method in _WITH_HEADERS:
            try:
                wrap_function_wrapper(module, method, _own_headers)
            except (ImportError, AttributeError):  # this version of openai does not have it
                continue
        for place, value in _methods():
            original = before[place] if place in before else _unwrap(value)  # the instrumentation imports some
            if original is not value:
                self._original[place], self._installed[place] = original, value

    def _restore_settings(self) -> None:
        """Making an instrumentor, of which there is one in a process, has changed its settings."""
        from opentelemetry.instrumentation.openai.shared.config import Config

        for name, value in self._settings.items():
            setattr(Config, name, value)


def _own_headers(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gives each call headers of its own: callers share one dict among threads, and may pass None."""
    kwargs["extra_headers"] = dict(kwargs.get("extra_headers") or {})
    return wrapped(*args, **kwargs)


def _unwrap(value: Any) -> Any:
    while isinstance(value, FunctionWrapper):
        value = value.__wrapped__
    return value


def _methods() -> Iterator[tuple[tuple[type, str], Any]]:
    """Every attribute of every class of the client's resources that are imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith("openai.resources"):
            for owner in list(vars(module).values()):
                if isinstance(owner, type) and owner.__module__ == name:
                    for attribute, value in list(vars(owner).items()):
                        yield (owner, attribute), value
