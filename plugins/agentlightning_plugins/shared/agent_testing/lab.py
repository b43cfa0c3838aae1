"""``Lab``: runs an agent with a scripted model behind the gateway, a store and a runner."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentlightning.litagent import LitAgent, Prompts, wrap
from agentlightning.plugin.registry import get_manager
from agentlightning.records import AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig, Span
from agentlightning.resources import LLM, Resource
from agentlightning.runner import LitAgentRunner
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI

AGENT_NAME: Final = "calculator"
INSTRUCTIONS: Final = "Add the numbers with the tool, then say the sum."
MODEL: Final = "tuned-model"
"""Name of the model at the rollout's endpoint."""
TEMPERATURE: Final = 0.625
PATIENCE_S: Final = 300.0
"""Timeout of the tests; only a broken agent reaches it."""

added: Final[list[tuple[int, int]]] = []
"""The arguments of all calls of ``add`` in this process."""


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    added.append((a, b))
    return a + b


def ask(a: int, b: int) -> str:
    """Returns the task of adding two numbers."""
    return f"What is {a} + {b}?"


def answer(request: RecordedRequest) -> Answer:
    """Returns the scripted model's answer: a tool call for a question, a sentence for the tool's result."""
    messages = request.body["messages"]
    last = messages[-1]
    if last["role"] == "tool":
        found = re.search(r"-?\d+", _text(last))
        return Answer(f"The sum is {found.group() if found else _text(last)}.")
    asked = [match for message in messages for match in re.findall(r"(\d+) \+ (\d+)", _text(message))]
    if not asked:
        return Answer(status=400, error=f"no question in the messages: {messages}")
    a, b = asked[-1]
    return Answer(tool_calls=[("add", {"a": int(a), "b": int(b)})])


def read_sum(task: str, output: Any, rollout: Rollout) -> float:
    """Returns the reward: 1 if the output states the sum, else 0."""
    a, b = re.findall(r"\d+", task)[:2]
    return float(f"The sum is {int(a) + int(b)}." in str(output))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


class Lab:
    """Runs one agent. ``async with`` starts and stops model, gateway and store."""

    store: LightningStore
    server: ScriptedOpenAI
    """The scripted model; ``server.requests`` has the requests that it received."""

    def __init__(
        self,
        agent: Any,
        script: Callable[[RecordedRequest], Answer] | Sequence[Answer] = answer,
        *,
        prompts: Prompts | None = None,
        reward: Callable[[Any, Any, Rollout], float] | None = read_sum,
        tracer: str = "otel",
    ) -> None:
        """Wraps the agent.

        Args:
            agent: the framework's object, or any argument of ``agl.wrap``.
            script: the model's answers, or a function from request to answer.
            prompts: see ``agl.wrap``.
            reward: see ``agl.wrap``.
            tracer: name of the tracer.
        """
        self._tracer = tracer
        self.agent: LitAgent[Any] = wrap(agent, reward=reward, prompts=prompts)
        self.server = ScriptedOpenAI(script)

    async def __aenter__(self) -> Lab:
        await self.server.__aenter__()
        self.store = create_store("memory://")
        entry = {"model": MODEL, "endpoint": self.server.endpoint, "api_key": "key-of-the-model"}
        self._gateway = get_manager().get("gateway", "gateway")(model_list=[entry], store=self.store)
        await self._gateway.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._gateway.stop()
        await self.store.close()
        await self.server.__aexit__(*exc_info)

    async def run(
        self,
        *tasks: Any,
        resources: Mapping[str, Resource | str] | None = None,
        timeout_s: float | None = None,
        through_gateway: bool = True,
        meanwhile: Callable[[list[str]], Any] | None = None,
    ) -> list[AttemptedRollout]:
        """Runs the agent on tasks concurrently and returns the finished rollouts in the same order.

        Args:
            tasks: inputs of the rollouts.
            resources: resources in addition to the endpoint ``llm``.
            timeout_s: timeout of each attempt.
            through_gateway: if False, the agent calls the model directly, so that only the runner can stop it.
            meanwhile: an async function of the rollout ids, awaited while the rollouts run.
        """
        llm = self._gateway.as_resource(model=MODEL, sampling_parameters={"temperature": TEMPERATURE})
        if not through_gateway:
            llm = LLM(endpoint=self.server.endpoint, model=MODEL)
        snapshot = await self.store.add_resources({"llm": llm, **(resources or {})})
        config = RolloutConfig(timeout_seconds=timeout_s)
        requests = [
            EnqueueRolloutRequest(input=task, mode="train", resources_id=snapshot.resources_id, config=config)
            for task in tasks
        ]
        queued = await self.store.enqueue_many_rollouts(requests)
        ids = [rollout.rollout_id for rollout in queued]
        runner: LitAgentRunner[Any] = LitAgentRunner(
            get_manager().create("tracer", self._tracer), max_rollouts=len(tasks), max_concurrency=max(1, len(tasks))
        )
        with runner.run_context(agent=self.agent, store=self.store):
            work = asyncio.create_task(asyncio.wait_for(runner.iter(), PATIENCE_S))
            if meanwhile is not None:
                await meanwhile(ids)
            await work
        await self._gateway.flush()
        found = {rollout.rollout_id: rollout for rollout in (await self.store.query_rollouts(rollout_id_in=ids)).items}
        ended = [found[rollout_id] for rollout_id in ids]
        assert all(isinstance(rollout, AttemptedRollout) for rollout in ended), "a rollout was never attempted"
        return [rollout for rollout in ended if isinstance(rollout, AttemptedRollout)]

    async def spans(self, rollout: Rollout) -> list[Span]:
        """Returns the stored spans of a rollout's latest attempt."""
        return list((await self.store.query_spans(rollout.rollout_id, "latest")).items)
