"""``EnvironmentEpisode``: one episode of an environment, within limits of time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import hashlib
import inspect
import json
import logging
import queue
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import pydantic
from pydantic_core import ArgsKwargs

from agentlightning import semconv
from agentlightning.emitter import emit_reward, operation
from agentlightning.environment import Environment, Observation
from agentlightning.errors import RolloutError
from agentlightning.frozen import to_number
from agentlightning.reward import REWARD_SUM
from agentlightning_integrations.shared.object_copy import copy_except

logger = logging.getLogger("agentlightning")
_CLOSE_S: Final = 10.0
"""The longest that closing an environment may take; the attempt has its result by then."""


class EnvironmentEpisode:
    """One episode at a time, on a copy of the environment; ``async with`` closes it.

    Synchronous methods of the environment run in one thread of the episode, so that one that blocks or hangs costs only
    its own attempt. All errors that the methods below raise are of the environment, or are RolloutErrors.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment: Environment = copy_except(environment, {}, type(environment).__name__)
        self.name = type(environment).__name__
        self.done = False
        self.rewards: list[float] = []
        """The rewards of the steps so far."""
        self._functions: dict[str, tuple[Callable[..., Any], pydantic.TypeAdapter[Any]]] = {}
        self._names: list[str] = []
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread: asyncio.Task[None] | None = None
        self._is_stuck = self._is_begun = False

    async def __aenter__(self) -> EnvironmentEpisode:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.environment.timeout_s = min(self.environment.timeout_s, _CLOSE_S)
        try:
            await self._close()
        except Exception as error:  # isolation point: the episode is over, and keeps its result
            logger.warning("%s.close: %s: %s", self.name, type(error).__name__, error)
        self._calls.put(None)

    async def reset(self, task: Any) -> Observation:
        """Begins the episode, or another one; returns the first observation."""
        await self._close()
        self._is_begun, self.done, self.rewards = True, False, []
        return self._read_observation("reset", await self._run("reset", task, find_seed(task)))

    async def _close(self) -> None:
        if self._is_begun and not (self._is_stuck and not inspect.iscoroutinefunction(self.environment.close)):
            self._is_begun = False
            await self._run("close")

    async def read_tools(self) -> list[dict[str, Any]]:
        """Returns the tools, as a chat completion takes them."""
        functions: list[dict[str, Any]] = []
        for tool in await self._run("tools"):
            if callable(tool):
                arguments: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
                    functools.wraps(tool)(lambda *args, **kwargs: (args, kwargs))
                )
                self._functions[tool.__name__] = tool, arguments
                described = {"name": tool.__name__, "description": inspect.getdoc(tool) or ""}
                tool = {**described, "parameters": arguments.json_schema()}
            functions.append({"type": "function", "function": dict(tool)})
        self._names = [each["function"]["name"] for each in functions]
        return functions

    @property
    def takes_answers(self) -> bool:
        """Whether the environment has ``step``, so that it takes answers without a call of a tool."""
        return type(self.environment).step is not Environment.step

    async def step(self, answer: str) -> Observation:
        """Runs the action in an answer; returns the observation, and emits the reward.

        Raises:
            RolloutError: the episode is over.
        """
        pattern, action = self.environment.action, answer
        if pattern is not None:
            found = re.search(pattern, answer, re.DOTALL)
            if found is None:
                return f"error: the answer has no action, which matches {pattern}"
            action = found[1] if found.re.groups else found[0]
        return await self._act("step", {"action": action}, functools.partial(self._run, "step", action))

    async def call(self, name: str, arguments: str) -> Observation:
        """Runs a tool on the JSON of a call, as ``step``; a wrong name or argument is an observation."""
        given = semconv.parse_json(arguments or "{}")
        if not isinstance(given, Mapping):
            return "error: the arguments are not a JSON object"
        if name not in self._names:
            return f"error: there is no tool {name!r:.100}; the tools are {', '.join(self._names)}"
        if name not in self._functions:
            return await self._act(name, given, functools.partial(self._run, "call", name, given))
        function, arguments_of = self._functions[name]
        try:
            args, kwargs = arguments_of.validate_python(ArgsKwargs((), dict(given)))
        except pydantic.ValidationError as error:
            return "error: " + "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        run = functools.partial(self._run, name, method=functools.partial(function, *args, **kwargs))
        return await self._act(name, given, run)

    async def finish(self, task: Any, output: str) -> None:
        """Emits the final reward, if it is not the reward that the last step has emitted."""
        final = await self._run("reward", task, output)
        if final is None and (self.rewards or self.takes_answers or self._functions):
            final = sum(self.rewards)
            if self.rewards and final == self.rewards[-1]:
                return
        if final is not None:  # a sum belongs to no call: each of its parts does
            emit_reward(final, attributes={REWARD_SUM: True} if self.rewards else None)

    async def _act(self, name: str, given: Mapping[str, Any], run: Callable[[], Any]) -> Observation:
        if self.done:
            raise RolloutError(f"{self.name}: {name} was called after the episode was over")
        attributes: dict[str, Any] = {
            semconv.GEN_AI_OPERATION_NAME: "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.arguments": json.dumps(given, ensure_ascii=False),
        }
        with operation(name=name, **attributes) as span:
            result = await run()
            reward = None
            if isinstance(result, tuple) and len(result) == 3:
                result, reward, self.done = result[0], result[1], bool(result[2])
            observation = self._read_observation(name, result)
            span.set_output(observation)
        if reward is not None:
            number = to_number(reward)
            if number is None:
                raise RolloutError(f"{self.name}.{name} returned the reward {reward!r}; return a number or None")
            self.rewards.append(number)
            emit_reward(number)
        return observation

    def _read_observation(self, method: str, result: Any) -> Observation:
        if isinstance(result, str) or (isinstance(result, list) and all(isinstance(part, Mapping) for part in result)):
            return result
        raise RolloutError(
            f"{self.name}.{method} returned {str(result)[:200]!r} ({type(result).__name__}); return a text or a list "
            "of message parts" + ("" if method == "reset" else ", alone or as (observation, reward, done)")
        )

    async def _run(self, name: str, *arguments: Any, method: Callable[..., Any] | None = None) -> Any:
        """Calls the method or tool with a name; it must end in time."""
        method = method or getattr(self.environment, name)
        is_default = getattr(type(self.environment), name, None) is getattr(Environment, name, self)
        limit = asyncio.timeout(self.environment.timeout_s)
        try:
            async with limit:
                if is_default or inspect.iscoroutinefunction(method):
                    result = method(*arguments)
                else:
                    result = await self._run_in_thread(functools.partial(method, *arguments))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"{self.name}.{name} took longer than {self.environment.timeout_s:g} s (timeout_s)"
            raise RolloutError(message) from error

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = asyncio.create_task(asyncio.to_thread(self._serve))
            self._thread.add_done_callback(lambda task: task.cancelled() or task.exception())  # the caller has it
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((future, functools.partial(contextvars.copy_context().run, function)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # the thread may hang; in the runner it is stopped with its attempt
            self._is_stuck = True
            raise

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except StopIteration as error:  # fits no future
                future.set_exception(RolloutError(f"{self.name} raised {error!r}"))
            except Exception as error:  # isolation point: it is raised where the method was called
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(RolloutError(f"{self.name} raised {error!r}"))
                raise
            else:
                future.set_result(result)


def find_seed(task: Any) -> int:
    """Returns the field ``seed`` of a task, else a number below 2**31 that depends only on the task."""
    seed = task.get("seed") if isinstance(task, Mapping) else None
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed
    text = json.dumps(task, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1
