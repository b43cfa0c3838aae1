"""``@algo``: an algorithm from a function."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Final

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError, suggest
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, Metrics

INJECTED: Final = (
    "store",
    "train_dataset",
    "val_dataset",
    "llm_proxy",
    "adapter",
    "initial_resources",
    "tracker",
    "run",
    "context",
)


class MetricLog:
    """What ``tracker`` is: records the numbers of a step, from where the run's trackers get them."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._pending: list[asyncio.Task[Metrics]] = []

    def log(self, step: int, values: Mapping[str, float]) -> Awaitable[None]:
        """Records the numbers of a step; repeating a step adds to and replaces its values.

        In a synchronous function they are stored when this returns; in an asynchronous one they are at the latest when
        the function ends, or when the result is awaited.
        """
        given = dict(values)
        try:
            task = asyncio.get_running_loop().create_task(self._store.add_metrics(step, given))
        except RuntimeError:
            asyncio.run(self._store.add_metrics(step, given))
            return _Stored()
        self._pending.append(task)
        return _Stored(task)

    async def flush(self) -> None:
        """Returns when everything is stored.

        Raises:
            StoreError: something could not be stored.
        """
        pending, self._pending = self._pending, []
        await asyncio.gather(*pending)


class _Stored:
    """Awaiting it is welcome and not needed."""

    def __init__(self, task: asyncio.Task[Metrics] | None = None) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, None]:
        if self._task is not None:
            yield from self._task.__await__()


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
        given: dict[str, Any] = {
            "store": context.store,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
            "llm_proxy": context.llm_proxy,
            "adapter": context.adapter,
            "initial_resources": context.initial_resources,
            "tracker": MetricLog(self.get_store()) if "tracker" in self._wanted else None,
            "run": context.run,
            "context": context,
        }
        arguments = {name: given[name] for name in self._wanted}
        if self.is_async() and "tracker" in self._wanted:
            return self._run_and_flush(arguments, given["tracker"])
        return self._function(**arguments)

    async def _run_and_flush(self, arguments: Mapping[str, Any], log: MetricLog) -> Any:
        result = await self._function(**arguments)
        await log.flush()
        return result


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Makes an algorithm of a function, sync or async, which is given those of INJECTED that it declares."""
    return FunctionalAlgorithm(function)
