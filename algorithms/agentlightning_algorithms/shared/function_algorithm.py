"""``@algo``, an algorithm from a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

from agentlightning.algorithm.algorithm import Algorithm, RunContext
from agentlightning.errors import ConfigError, suggest
from agentlightning.resources import LLM
from agentlightning.types import Dataset

INJECTED: Final = (
    "store", "train_dataset", "val_dataset", "llm_proxy", "adapter", "initial_resources", "tracker", "run", "context"
)  # fmt: skip


class FunctionalAlgorithm(Algorithm):
    """An algorithm made from a function; it stays callable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Reads which of INJECTED the function declares; raises ConfigError if another parameter has no default."""
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

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        """Refuses a dataset that the function does not declare, because it would be ignored."""
        given = {"train_dataset": context.train_dataset, "val_dataset": context.val_dataset}
        for name, dataset in given.items():
            if dataset is not None and len(dataset) and name not in self._wanted and "context" not in self._wanted:
                raise ConfigError(
                    f"{name} has {len(dataset)} tasks, but the algorithm {self._function.__qualname__} does not "
                    f"declare the parameter {name}; add it, or leave the dataset out"
                )
        return super().check_setup(context)

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        context = self.context
        given = {"context": context, "tracker": context, "train_dataset": train_dataset, "val_dataset": val_dataset}
        return self._function(**{name: given.get(name, getattr(context, name, None)) for name in self._wanted})


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Makes an algorithm from a sync or async function, which receives the parameters of INJECTED that it declares."""
    return FunctionalAlgorithm(function)
