"""Integrations with a planted bug, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from openai import AsyncOpenAI

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, AgentConformance, Lab, add
from agentlightning.testing.agent import AgentConformance as Kit
from agentlightning.tracer import get_active_tracer
from agentlightning_integrations.shared.agent import FrameworkAgent
from tests.planted import assert_found

pytestmark = pytest.mark.environment("main")  # a test of the conformance tests

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Calculator:
    """The object of a minimal framework."""

    def __init__(self) -> None:
        self.instructions = INSTRUCTIONS


class CalculatorAgent(FrameworkAgent[Calculator]):
    """The integration of the minimal framework, without bugs."""

    def texts(self) -> Mapping[str, str]:
        return {"instructions": self.agent.instructions}

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        assert llm is not None
        with self.span(f"invoke_agent {AGENT_NAME}", **{"gen_ai.agent.name": AGENT_NAME}):
            messages: list[Any] = [{"role": "system", "content": self.instructions(texts)}]
            messages.append({"role": "user", "content": task})
            async with self.client(llm) as client:
                while True:
                    completion = await client.chat.completions.create(
                        messages=messages, tools=[TOOL], **self.model(llm)
                    )
                    message = completion.choices[0].message
                    if not message.tool_calls:
                        return message.content
                    messages.append(message.model_dump(exclude_none=True))
                    for call in message.tool_calls:
                        assert call.type == "function"
                        result = self.use_tool(call.function.arguments)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    @contextlib.contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Any]:
        operation = {"gen_ai.operation.name": name.partition(" ")[0]}
        tracer = get_active_tracer()
        assert tracer is not None
        with tracer.operation_context(name, {**operation, **attributes}) as span:
            yield span

    def instructions(self, texts: Mapping[str, str]) -> str:
        return texts.get("instructions", self.agent.instructions)

    @contextlib.asynccontextmanager
    async def client(self, llm: LLM) -> AsyncIterator[AsyncOpenAI]:
        async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused", max_retries=0) as client:
            yield client

    def model(self, llm: LLM) -> dict[str, Any]:
        return {"model": llm.model, **llm.sampling_parameters}

    def use_tool(self, arguments: str) -> str:
        about = {"gen_ai.tool.name": "add", "gen_ai.tool.call.arguments": arguments}
        with self.span("execute_tool add", **about) as span:
            result = str(add(**json.loads(arguments)))
            span.set_attributes({"gen_ai.tool.call.result": result})
        return result


class NamesNoAgent(CalculatorAgent):
    @contextlib.contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Any]:
        with super().span(
            name, **{key: value for key, value in attributes.items() if key != "gen_ai.agent.name"}
        ) as span:
            yield span


class LacksAnAttribute(CalculatorAgent):
    """Leaves out one attribute of its tool's span."""

    name: ClassVar[str]

    @contextlib.contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Any]:
        with super().span(name, **{key: value for key, value in attributes.items() if key != self.name}) as span:
            yield span


class HidesTools(CalculatorAgent):
    def use_tool(self, arguments: str) -> str:
        return str(add(**json.loads(arguments)))


class GivesToolsNoParent(CalculatorAgent):
    def use_tool(self, arguments: str) -> str:
        from opentelemetry import context

        token = context.attach(context.Context())
        try:
            return super().use_tool(arguments)
        finally:
            context.detach(token)


class IgnoresParameters(CalculatorAgent):
    def model(self, llm: LLM) -> dict[str, Any]:
        return {"model": llm.model}


class SharesItsClient(CalculatorAgent):
    """Changes shared state, as some integrations do: the rollout that begins last gets the calls of all rollouts."""

    endpoint: LLM

    @contextlib.asynccontextmanager
    async def client(self, llm: LLM) -> AsyncIterator[AsyncOpenAI]:
        type(self).endpoint = llm
        await asyncio.sleep(0.1)
        async with super().client(type(self).endpoint) as client:
            yield client


class KeepsThePrompt(CalculatorAgent):
    def instructions(self, texts: Mapping[str, str]) -> str:
        self.agent.instructions = texts.get("instructions", self.agent.instructions)
        return self.agent.instructions


class IgnoresPrompts(CalculatorAgent):
    def instructions(self, texts: Mapping[str, str]) -> str:
        return INSTRUCTIONS


class SwallowsErrors(CalculatorAgent):
    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        with contextlib.suppress(Exception):
            return await super().run_async(task, llm, texts)


class CannotBeStopped(CalculatorAgent):
    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        work = asyncio.ensure_future(super().run_async(task, llm, texts))
        background.add(work)
        return await asyncio.shield(work)


class HoldsASocket(CalculatorAgent):
    def __init__(self, agent: Calculator, options: WrapOptions) -> None:
        super().__init__(agent, options)
        self.agent.socket = socket.socket()  # cannot be pickled

    def __del__(self) -> None:
        self.agent.socket.close()


class CallsHome(CalculatorAgent):
    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        with contextlib.suppress(OSError):
            socket.getaddrinfo("telemetry.example.com", 443)
        return await super().run_async(task, llm, texts)


class RunsOneByOne(CalculatorAgent):
    lock = asyncio.Lock()

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        async with type(self).lock:
            return await super().run_async(task, llm, texts)


background: set[asyncio.Future[Any]] = set()

CAUGHT_BY: list[tuple[type[CalculatorAgent], Callable[..., Any]]] = [
    (NamesNoAgent, Kit.test_each_model_call_is_a_triplet_with_tokens_agent_and_reward),
    (NamesNoAgent, Kit.test_each_model_call_has_its_messages_and_token_counts),
    (HidesTools, Kit.test_a_tool_call_is_a_span_with_arguments_and_result_below_its_agent),
    (GivesToolsNoParent, Kit.test_a_tool_call_is_a_span_with_arguments_and_result_below_its_agent),
    (IgnoresParameters, Kit.test_it_calls_the_model_of_its_rollout_with_the_resources_parameters),
    (SharesItsClient, Kit.test_eight_rollouts_at_once_never_mix),
    (RunsOneByOne, Kit.test_eight_rollouts_at_once_never_mix),
    (KeepsThePrompt, Kit.test_a_prompt_changes_between_rollouts_and_the_object_stays_unchanged),
    (IgnoresPrompts, Kit.test_a_prompt_changes_between_rollouts_and_the_object_stays_unchanged),
    (SwallowsErrors, Kit.test_an_error_of_the_model_fails_the_attempt_with_type_message_and_traceback),
    (CannotBeStopped, Kit.test_a_timeout_stops_the_agent),
    (CannotBeStopped, Kit.test_a_cancelled_rollout_stops_the_agent),
    (HoldsASocket, Kit.test_it_can_be_sent_to_a_runner_process),
    (CallsHome, Kit.test_nothing_calls_home),
]


class TestCalculator(AgentConformance):
    prompt_path = "instructions"
    integration: type[CalculatorAgent] = CalculatorAgent

    @pytest.fixture
    def agent(self) -> Any:
        return Calculator()

    def lab(self, agent: Any, **more: Any) -> Lab:
        prompts = more.pop("prompts", None)
        options = WrapOptions(dict.fromkeys(prompts or ()))
        return Lab(self.integration(agent, options), more.get("script") or self.answer)


@pytest.mark.parametrize(("integration", "test"), CAUGHT_BY, ids=lambda value: getattr(value, "__name__", None))
async def test_a_planted_bug_fails_the_test_of_the_broken_feature(
    integration: type[CalculatorAgent], test: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = TestCalculator()
    kit.integration = integration
    more = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
    inspect.signature(test).bind(kit, Calculator(), **more)  # a TypeError of a wrong call must not count below
    try:
        with pytest.raises((AssertionError, TypeError, ValueError)):
            await test(kit, Calculator(), **more)
    finally:
        await asyncio.gather(*background, return_exceptions=True)
        background.clear()


@pytest.mark.parametrize("name", ["gen_ai.tool.name", "gen_ai.tool.call.arguments", "gen_ai.agent.name"])
def test_a_missing_attribute_is_named(name: str, request: pytest.FixtureRequest) -> None:
    kit = type("Lacking", (TestCalculator,), {"integration": type("Lacks", (LacksAnAttribute,), {"name": name})})
    test = "test_a_tool_call_is_a_span_with_arguments_and_result_below_its_agent"
    assert_found(kit, test, request, f"has the attribute {name}", agent=Calculator())


def test_every_conformance_test_catches_a_bug() -> None:
    tests = {value for name, value in vars(Kit).items() if name.startswith("test_")}
    assert tests == {test for _, test in CAUGHT_BY}
