"""One rollout of an agent, in this process, with everything that training has: gateway, store, tracer, adapter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
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
from agentlightning_plugins.commands.configuration.assembly import load_agent
from agentlightning_plugins.commands.configuration.attribute import load_attribute
from agentlightning_plugins.commands.configuration.config import AgentConfig, CommandConfig
from agentlightning_plugins.commands.doctor.endpoint import answer_request, check_endpoint
from agentlightning_plugins.commands.doctor.environment import check_environment
from agentlightning_plugins.commands.doctor.finding import Finding, describe_failure
from agentlightning_plugins.commands.doctor.link import NAMES, Link, broken, ok, one_line, unchecked

if TYPE_CHECKING:
    from agentlightning.tracer.tracer import Tracer

_SCRIPTED: Final = "scripted"
_DEMO: Final = "demo"
_DEMO_TASK: Final = {"question": "Tom has 3 apples and gets 4 more. How many apples has Tom now?", "answer": 7}
NO_TASK: Final = object()
"""The user named no task."""


@dataclass(frozen=True)
class Order:
    """What is to be checked."""

    agent: str | AgentConfig | CommandConfig
    """``module:attribute``, ``path/to/file.py:attribute`` or ``demo``; or as a configuration says it."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server; None uses a scripted one."""
    model: str | None = None
    """None takes the first that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    task: Any = NO_TASK
    reward: str | None = None
    """``module:function``."""
    resources: Mapping[str, Resource | str] = field(default_factory=dict)
    """What the agent is given, by name; calls to any ``LLM`` go through the gateway."""
    tracer: str = "otel"
    agent_match: str | None = None
    trains_weights: bool = True
    timeout_s: float = 60.0


async def check_up(order: Order) -> list[Link]:
    """Checks every link; what cannot be checked because one before is broken says so."""
    links = [check_environment()]
    agent, link = _load_agent(order)
    links.append(link)
    async with contextlib.AsyncExitStack() as stack:
        endpoint, model, link = await _find_endpoint(order, stack)
        links.append(link)
        if agent is None or model is None:
            return _fill(links)
        store = create_store("memory://")
        stack.push_async_callback(store.close)
        proxy = get_manager().get("gateway", "gateway")(
            model_list=[{"model": model, "endpoint": endpoint, "api_key": order.api_key or "none"}],
            store=store,
            num_retries=0,
        )
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        llm = proxy.as_resource(model=model)
        rollout, link = await _roll_out(order, agent, store, llm)
        links.append(link)
        if rollout is None:
            return _fill(links)
        await proxy.flush()
        spans = list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))
        adapter = TraceToTriplet(agent_match=order.agent_match)
        with _quiet():
            finding = Finding(rollout, spans, adapter, order.endpoint is None, order.trains_weights)
            return links + finding.links()


def _fill(links: list[Link]) -> list[Link]:
    cause = next(link.name for link in links if link.state == "broken")
    return links + [unchecked(name, f"needs the link {cause!r}") for name in NAMES[len(links) :]]


def _load_agent(order: Order) -> tuple[LitAgent[Any] | None, Link]:
    spec = "agentlightning_plugins.demo.agent:calculator_agent" if order.agent == _DEMO else order.agent
    try:
        reward = None if order.reward is None else load_attribute(order.reward)
        found = load_attribute(spec) if isinstance(spec, str) else load_agent(spec)
        agent = wrap(found, reward)
        TraceToTriplet(agent_match=order.agent_match)
        get_manager().create("tracer", order.tracer)
    except (LightningError, ImportError) as error:
        mend = "see that `python -c 'import ...'` of the module works in this environment"
        return None, broken(
            "agent", one_line(error), mend if "importing" in str(error) else "the message says what it has to be"
        )
    name = spec if isinstance(spec, str) else getattr(spec, "target", "the command")
    return agent, ok("agent", f"{name} is {_describe(found, agent)}")


def _describe(found: Any, agent: LitAgent[Any]) -> str:
    how = "async" if agent.is_async() else "sync"
    return f"{'a function' if type(found).__name__ == 'function' else type(found).__name__}, {how}"


async def _find_endpoint(order: Order, stack: contextlib.AsyncExitStack) -> tuple[str, str | None, Link]:
    if order.endpoint is not None:
        link, model = await check_endpoint(order.endpoint, order.model, order.api_key)
        return order.endpoint, model, link
    from agentlightning_plugins.scripted_model.server import ScriptedOpenAI

    server = await stack.enter_async_context(ScriptedOpenAI(answer_request))
    said = "none was given: a scripted server answers, which tells nothing of your own (--endpoint URL)"
    return server.endpoint, order.model or _SCRIPTED, ok("endpoint", said)


async def _roll_out(
    order: Order, agent: LitAgent[Any], store: LightningStore, llm: Resource
) -> tuple[AttemptedRollout | None, Link]:
    try:
        tracer: Tracer = get_manager().create("tracer", order.tracer)
        given = read_resources({**agent.initial_prompts(), **order.resources})
        models = [name for name, resource in given.items() if isinstance(resource, LLM)]
        resources = {**given, **dict.fromkeys(models or ["llm"], llm)}
        task = _choose_task(order)
    except LightningError as error:
        return None, broken("rollout", one_line(error), "the message says it")
    resources_id = (await store.add_resources(resources)).resources_id
    runner: LitAgentRunner[Any] = LitAgentRunner(tracer, max_rollouts=1)
    with runner.run_context(agent=agent, store=store):
        config = RolloutConfig(timeout_seconds=order.timeout_s)
        queued = await store.enqueue_rollout(task, mode="train", resources_id=resources_id, config=config)
        with contextlib.suppress(TimeoutError):  # an agent that cannot be stopped; the attempt has ended all the same
            await asyncio.wait_for(runner.iter(), order.timeout_s + 10.0)
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert isinstance(rollout, AttemptedRollout), "it was dequeued"
    if rollout.status == "succeeded":
        return rollout, ok("rollout", f"the agent ran on the task {one_line(repr(task), 80)}")
    return rollout, broken("rollout", describe_failure(rollout), _mend_rollout(order, rollout, task))


def _mend_rollout(order: Order, rollout: AttemptedRollout, task: Any) -> str:
    error = rollout.attempt.error
    message = "" if error is None else error.message
    if "but no resource has this name" in message:
        return "give the prompts that the agent asks for: --resource NAME=TEXT"
    if rollout.attempt.status == "timeout":
        return "give it longer with --timeout, or see what it waits for"
    if order.task is NO_TASK and order.agent != _DEMO:
        return f"it ran on the task {task!r}; give one that it takes, as JSON or text: --task ..."
    return "mend the agent; its traceback is above in the log, or run it by itself"


def _choose_task(order: Order) -> Any:
    if order.task is not NO_TASK:
        return order.task
    if order.agent == _DEMO:
        return _DEMO_TASK
    return "Say hello."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the links say out of the log."""
    import logging

    logger = logging.getLogger("agentlightning")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was
