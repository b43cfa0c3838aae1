"""Runs one rollout in this process, with the gateway, store, tracer and adapter that training uses, and checks it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentlightning.adapter import TraceToTriplet
from agentlightning.errors import LightningError
from agentlightning.litagent import LitAgent, wrap
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import LLM, Resource, read_resources
from agentlightning.runner import LitAgentRunner
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, RolloutConfig
from agentlightning_plugins.commands.doctor.check import NAMES, Check, broken, ok, one_line, unchecked
from agentlightning_plugins.commands.doctor.endpoint import answer_request, check_endpoint
from agentlightning_plugins.commands.doctor.environment import check_environment
from agentlightning_plugins.commands.doctor.rollout_check import RolloutChecks, describe_failure
from agentlightning_plugins.shared.configuration.assembly import load_agent
from agentlightning_plugins.shared.configuration.attribute import load_attribute
from agentlightning_plugins.shared.configuration.config import AgentConfig, CommandConfig

if TYPE_CHECKING:
    from agentlightning.tracer.tracer import Tracer

logger = logging.getLogger("agentlightning")
_SCRIPTED: Final = "scripted"
_DEMO: Final = "demo"
_DEMO_TASK: Final = {"question": "Tom has 3 apples and gets 4 more. How many apples has Tom now?", "answer": 7}
NO_TASK: Final = object()
"""Value of ``Request.task`` if the user gave no task."""


@dataclass(frozen=True)
class Request:
    """The arguments of ``agl doctor``."""

    agent: str | AgentConfig | CommandConfig
    """``module:attribute``, ``path/to/file.py:attribute``, ``demo``, or the agent section of a configuration."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server; None uses a scripted server."""
    model: str | None = None
    """Name of the model; None selects the first model that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    task: Any = NO_TASK
    reward: str | None = None
    """Reward function, as ``module:function``."""
    resources: Mapping[str, Resource | str] = field(default_factory=dict)
    """The agent's resources, by name; calls to any ``LLM`` go through the gateway."""
    tracer: str = "otel"
    agent_match: str | None = None
    trains_weights: bool = True
    timeout_s: float = 60.0


async def run_checks(request: Request) -> list[Check]:
    """Runs every check; after a failure, the checks that depend on it are marked as unchecked."""
    checks = [check_environment()]
    agent, check = _load_agent(request)
    checks.append(check)
    async with contextlib.AsyncExitStack() as stack:
        endpoint, model, check = await _find_endpoint(request, stack)
        checks.append(check)
        if agent is None or model is None:
            return _fill(checks)
        store = create_store("memory://")
        stack.push_async_callback(store.close)
        proxy = get_manager().get("gateway", "gateway")(
            model_list=[{"model": model, "endpoint": endpoint, "api_key": request.api_key or "none"}],
            store=store,
            num_retries=0,
        )
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        llm = proxy.as_resource(model=model)
        rollout, check = await _roll_out(request, agent, store, llm)
        checks.append(check)
        if rollout is None:
            return _fill(checks)
        await proxy.flush()
        spans = list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))
        adapter = TraceToTriplet(agent_match=request.agent_match)
        update = await store.get_resources_by_id(rollout.resources_id or "")
        rollout_checks = RolloutChecks(
            rollout,
            spans,
            adapter,
            request.endpoint is None,
            request.trains_weights,
            resources={} if update is None else update.resources,
            server=f"{model} at {endpoint}",
            has_own_task=request.task is not NO_TASK or request.agent == _DEMO,
        )
        was_disabled, logger.disabled = logger.disabled, True  # the log would only repeat the checks
        try:
            return checks + rollout_checks.checks()
        finally:
            logger.disabled = was_disabled


def _fill(checks: list[Check]) -> list[Check]:
    cause = next(check.name for check in checks if check.state == "broken")
    return checks + [unchecked(name, f"depends on the check {cause!r}") for name in NAMES[len(checks) :]]


def _load_agent(request: Request) -> tuple[LitAgent[Any] | None, Check]:
    spec = "agentlightning_plugins.demo.agent:calculator_agent" if request.agent == _DEMO else request.agent
    try:
        reward = None if request.reward is None else load_attribute(request.reward)
        found = load_attribute(spec) if isinstance(spec, str) else load_agent(spec)
        agent = wrap(found, reward)
        TraceToTriplet(agent_match=request.agent_match)
        get_manager().create("tracer", request.tracer)
    except (LightningError, ImportError) as error:
        fix = "make sure that `python -c 'import ...'` of the module works in this environment"
        return None, broken("agent", one_line(error), fix if "importing" in str(error) else "follow the message")
    name = spec if isinstance(spec, str) else getattr(spec, "target", "the command")
    kind = "a function" if type(found).__name__ == "function" else type(found).__name__
    return agent, ok("agent", f"{name} is {kind}, {'async' if agent.is_async() else 'sync'}")


async def _find_endpoint(request: Request, stack: contextlib.AsyncExitStack) -> tuple[str, str | None, Check]:
    if request.endpoint is not None:
        check, model = await check_endpoint(request.endpoint, request.model, request.api_key)
        return request.endpoint, model, check
    from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI

    server = stack.enter_context(ScriptedOpenAI(answer_request))
    said = "a scripted server answers; to check your own model server: --endpoint URL"
    return server.endpoint, request.model or _SCRIPTED, ok("endpoint", said)


async def _roll_out(
    request: Request, agent: LitAgent[Any], store: LightningStore, llm: Resource
) -> tuple[AttemptedRollout | None, Check]:
    task = request.task
    if task is NO_TASK:
        task = _DEMO_TASK if request.agent == _DEMO else "Say hello."
    try:
        tracer: Tracer = get_manager().create("tracer", request.tracer)
        given = read_resources({**agent.initial_prompts(), **request.resources})
        models = [name for name, resource in given.items() if isinstance(resource, LLM)]
        resources = {**given, **dict.fromkeys(models or ["llm"], llm)}
    except LightningError as error:
        return None, broken("rollout", one_line(error), "follow the message")
    resources_id = (await store.add_resources(resources)).resources_id
    runner: LitAgentRunner[Any] = LitAgentRunner(tracer, max_rollouts=1)
    with runner.run_context(agent=agent, store=store):
        config = RolloutConfig(timeout_seconds=request.timeout_s)
        queued = await store.enqueue_rollout(task, mode="train", resources_id=resources_id, config=config)
        with contextlib.suppress(TimeoutError):  # the agent cannot be stopped, but the attempt has ended
            await asyncio.wait_for(runner.iter(), request.timeout_s + 10.0)
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert isinstance(rollout, AttemptedRollout), "it was dequeued"
    if rollout.status == "succeeded":
        return rollout, ok("rollout", f"the agent ran on the task {one_line(repr(task), 80)}")
    return rollout, broken("rollout", describe_failure(rollout), _suggest_fix(request, rollout, task))


def _suggest_fix(request: Request, rollout: AttemptedRollout, task: Any) -> str:
    error = rollout.attempt.error
    message = "" if error is None else error.message
    if "but no resource has this name" in message:
        return "give the missing prompt: --resource NAME=TEXT"
    if rollout.attempt.status == "timeout":
        return "raise --timeout, or find out what the agent waits for"
    if request.task is NO_TASK and request.agent != _DEMO:
        return f"the task was {task!r}; give a task that the agent accepts, as JSON or text: --task ..."
    return "fix the agent; the log above has its traceback"
