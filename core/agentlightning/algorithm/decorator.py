"""``@algo``: an algorithm from a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError, suggest
from agentlightning.types import Dataset

INJECTED: Final = (
    "store",
    "train_dataset",
    "val_dataset",
    "llm_proxy",
    "adapter",
    "initial_resources",
    "run",
    "context",
)


class FunctionalAlgorithm(Algorithm):
    """An algorithm function; it stays callable as it was."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Reads which of INJECTED the function declares.

        Raises:
            ConfigError: a parameter that is not one of them and has no default.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._wanted = []
        for name, parameter in inspect.signature(function).parameters.items():
            if name in INJECTED:
                self._wanted.append(name)
            elif parameter.default is parameter.empty:
                raise ConfigError(
                    f"@algo cannot fill parameter {name!r} of {function.__qualname__}.{suggest(name, INJECTED)} "
                    f"It can fill: {', '.join(INJECTED)}"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        context = self.context
        given = {
            "store": context.store,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
            "llm_proxy": context.llm_proxy,
            "adapter": context.adapter,
            "initial_resources": context.initial_resources,
            "run": context.run,
            "context": context,
        }
        return self._function(**{name: given[name] for name in self._wanted})


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Makes an algorithm of a function, sync or async, which is given those of INJECTED that it declares."""
    return FunctionalAlgorithm(function)
