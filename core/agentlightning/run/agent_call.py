"""Calls an agent on one rollout: an async agent in the event loop, a synchronous one in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.litagent import LitAgent
from agentlightning.records import AttemptedRollout, Rollout
from agentlightning.resources import NamedResources, Resource
from agentlightning.run.thread import EscapedError, ThreadStopped, run_in_thread, thread_group
from agentlightning.store.protocol import LightningStore


async def call_agent(
    agent: LitAgent[Any],
    task: Any,
    resources: NamedResources,
    rollout: AttemptedRollout,
    abandoned: list[threading.Thread],
) -> Any:
    """Returns the agent's result. Threads that do not stop when the call is cancelled are added to ``abandoned``.

    Raises EscapedError if the agent raises an error that is no ``Exception``, or CancelledError by itself.
    """
    training = rollout.mode == "train"
    own = asyncio.current_task()
    if agent.is_async():
        method = agent.training_rollout_async if training else agent.validation_rollout_async
        with thread_group(on_abandoned=abandoned.extend):  # for synchronous tools and graph nodes
            try:
                return await method(task, resources, rollout)
            except Exception:
                raise
            except BaseException as error:  # isolation point: the error would end the event loop, or not be recorded
                if _must_pass(error, own):
                    raise
                raise EscapedError(error) from error
    function = agent.training_rollout if training else agent.validation_rollout
    try:
        return await run_in_thread(
            lambda: function(task, resources, rollout),
            name=f"agent-{rollout.attempt.attempt_id}",
            on_abandoned=abandoned.append,
        )
    except ThreadStopped as error:
        raise asyncio.CancelledError from error


async def find_resources(store: LightningStore, rollout: Rollout) -> Mapping[str, Resource]:
    """Returns the resources of a rollout: those that it names, else the latest."""
    if rollout.resources_id is None:
        update = await store.get_latest_resources()
        return {} if update is None else update.resources
    update = await store.get_resources_by_id(rollout.resources_id)
    if update is None:
        raise NotFoundError(f"rollout {rollout.rollout_id}: the resources {rollout.resources_id} are not stored")
    return update.resources


def _must_pass(error: BaseException, own: asyncio.Task[Any] | None) -> bool:
    """Whether an error is not the agent's: a cancellation, a Ctrl-C, or the end of a task that its loop abandoned."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError):
        return own is None or own.cancelling() > 0
    try:
        return isinstance(error, GeneratorExit) and asyncio.current_task() is not own
    except RuntimeError:  # no loop runs
        return True
