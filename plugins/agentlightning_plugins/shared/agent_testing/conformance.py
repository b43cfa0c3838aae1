"""``AgentConformance``: the tests that every integration must pass."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import pytest

from agentlightning import semconv
from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.litagent import Prompts
from agentlightning.records import AttemptedRollout, Span
from agentlightning.reward import find_final_reward
from agentlightning_plugins.shared.agent_testing.lab import (
    AGENT_NAME,
    INSTRUCTIONS,
    MODEL,
    PATIENCE_S,
    TEMPERATURE,
    Lab,
    added,
    answer,
    ask,
)
from agentlightning_plugins.shared.scripted_model.server import EOS, Answer, RecordedRequest, decode, encode, logprob


def is_tool_span(span: Span) -> bool:
    """Whether a span is a tool run."""
    return span.attributes.get("gen_ai.operation.name") == "execute_tool"


def attribute(span: Span, name: str, promise: str) -> Any:
    """Returns an attribute of a span; without it, the test fails and names it."""
    assert name in span.attributes, f"{promise} has the attribute {name}; {span.name!r} has {sorted(span.attributes)}"
    return span.attributes[name]


async def go_on(release: asyncio.Event) -> None:
    """Lets the model answer and gives a waiting agent time to continue, even on a busy machine."""
    release.set()
    for _ in range(20):
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
class AgentConformance:
    """Tests that every integration must pass.

    Subclass it and define one fixture, ``agent``: an object of the framework with the name ``AGENT_NAME``, the
    instructions ``INSTRUCTIONS``, the tool ``add`` and a client of OpenAI's chat completions, at an address that does
    not answer. Tests are asynchronous and need ``pytest-asyncio``, in either of its modes.
    """

    prompt_path: ClassVar[str | None] = None
    """The path of the text ``INSTRUCTIONS`` in ``prompts``; None if the framework has no tunable texts."""
    records_calls: ClassVar[bool] = True
    """Whether the framework, or its client, records the id of the response of model calls; the gateway always does."""

    def answer(self, request: RecordedRequest) -> Answer:
        """Returns the scripted model's answer; override it if the framework sends requests of another form."""
        return answer(request)

    def lab(
        self, agent: Any, *, prompts: Prompts | None = None, script: Callable[[RecordedRequest], Answer] | None = None
    ) -> Lab:
        """Makes the environment of the agent; override it to run the agent differently."""
        return Lab(agent, script or self.answer, prompts=prompts)

    async def test_each_model_call_is_a_triplet_with_tokens_agent_and_reward(self, agent: Any) -> None:
        async with self.lab(agent) as lab:
            (rollout,) = await lab.run(ask(2, 3))
            spans = await lab.spans(rollout)
        assert _outcome(rollout) == ("succeeded", None)
        assert find_final_reward(spans) == 1.0
        call, final = TraceToTriplet().adapt(spans)
        for triplet in (call, final):
            assert triplet.metadata["agent_name"] == AGENT_NAME
            assert triplet.metadata["model"] == MODEL
            assert triplet.metadata["complete"] is True
            tokens = triplet.response["token_ids"]
            assert triplet.response["logprobs"] == [logprob(token) for token in tokens]
        assert final.response["token_ids"] == [*encode("The sum is 5."), EOS]
        assert "add" in decode(call.response["token_ids"])
        assert INSTRUCTIONS in decode(call.prompt["token_ids"])
        assert "5" in decode(final.prompt["token_ids"][len(call.prompt["token_ids"]) - len("<assistant>") :])
        assert (call.reward, final.reward) == (None, 1.0)

    async def test_a_tool_call_is_a_span_with_arguments_and_result_below_its_agent(self, agent: Any) -> None:
        async with self.lab(agent) as lab:
            (rollout,) = await lab.run(ask(2, 3))
            spans = await lab.spans(rollout)
        tool = _tool_span(spans)
        assert attribute(tool, "gen_ai.tool.name", "a tool's span") == "add"
        assert json.loads(attribute(tool, "gen_ai.tool.call.arguments", "a tool's span")) == {"a": 2, "b": 3}
        assert "5" in str(attribute(tool, "gen_ai.tool.call.result", "a tool's span"))
        _check_agent(tool, spans)

    async def test_each_model_call_has_its_messages_and_token_counts(self, agent: Any) -> None:
        async with self.lab(agent) as lab:
            (rollout,) = await lab.run(ask(2, 3))
            spans = await lab.spans(rollout)
        calls = [span for span in spans if semconv.is_llm_call(span)]
        mine = [span for span in calls if semconv.is_gateway_call(span) is not self.records_calls]
        assert mine, f"a model call's span has gen_ai.operation.name = 'chat'; the spans are {_names(spans)}"
        by_response = {response_id: span for span in mine if (response_id := semconv.read_response_id(span))}
        assert len(by_response) == 2, f"each model call has a span with its own gen_ai.response.id: {_names(mine)}"
        first, last = by_response.values()
        for span in (first, last):
            has_messages = semconv.read_input_messages(span) and semconv.read_output_messages(span)
            assert has_messages, (
                f"a model call's span has the attributes {semconv.GEN_AI_INPUT_MESSAGES} and "
                f"{semconv.GEN_AI_OUTPUT_MESSAGES}; {span.name!r} has {sorted(span.attributes)}"
            )
        assert semconv.read_input_messages(first)[0]["role"] == "system"
        assert semconv.read_output_messages(first)[0]["tool_calls"][0]["function"]["name"] == "add"
        assert semconv.read_output_messages(last)[0]["content"] == "The sum is 5."
        for span in (first, last):
            assert attribute(span, semconv.GEN_AI_INPUT_TOKENS, "a model call's span") > 0
            assert attribute(span, semconv.GEN_AI_OUTPUT_TOKENS, "a model call's span") > 0
            _check_agent(span, spans)

    async def test_it_calls_the_model_of_its_rollout_with_the_resources_parameters(self, agent: Any) -> None:
        async with self.lab(agent) as lab:
            await lab.run(ask(2, 3))
            asked = [(request.body["model"], request.body.get("temperature")) for request in lab.server.requests]
        assert asked == [(MODEL, TEMPERATURE)] * 2

    async def test_eight_rollouts_at_once_never_mix(self, agent: Any) -> None:
        def slowly(request: RecordedRequest) -> Answer:
            said = self.answer(request)
            return Answer(said.content, tool_calls=said.tool_calls, status=said.status, error=said.error, delay_s=0.15)

        async with self.lab(agent, script=slowly) as lab:
            rollouts = await lab.run(*(ask(i, 100 * i) for i in range(1, 9)))
            traces = [await lab.spans(rollout) for rollout in rollouts]
            turns = [len(request.body["messages"]) for request in lab.server.requests]
        assert turns.index(max(turns)) >= 2, "the rollouts ran one after the other, so nothing could mix"
        for i, (rollout, spans) in enumerate(zip(rollouts, traces, strict=True), start=1):
            assert _outcome(rollout) == ("succeeded", None)
            assert find_final_reward(spans) == 1.0
            arguments = attribute(_tool_span(spans), "gen_ai.tool.call.arguments", "a tool's span")
            assert json.loads(arguments) == {"a": i, "b": 100 * i}
            calls = [span for span in spans if semconv.is_llm_call(span)]
            known = {semconv.read_response_id(span) for span in calls if semconv.is_gateway_call(span)}
            mine = {semconv.read_response_id(span) for span in calls if not semconv.is_gateway_call(span)}
            assert mine - {None} == (known if self.records_calls else set())
            for triplet in TraceToTriplet().adapt(spans):
                assert ask(i, 100 * i) in decode(triplet.prompt["token_ids"])
                assert triplet.metadata["agent_name"] == AGENT_NAME

    async def test_a_prompt_changes_between_rollouts_and_the_object_stays_unchanged(self, agent: Any) -> None:
        path = self.prompt_path
        if path is None:
            return
        async with self.lab(agent, prompts=[path]) as lab:
            for text in ("You add {{numbers}}.", "Please add, and answer politely."):
                before = len(lab.server.requests)
                (rollout,) = await lab.run(ask(2, 3), resources={path: text})
                assert _outcome(rollout) == ("succeeded", None)
                for request in lab.server.requests[before:]:
                    prompt = _system_text(request)
                    assert text.replace("{{", "{").replace("}}", "}") in prompt
                    assert INSTRUCTIONS not in prompt
        async with self.lab(agent) as lab:
            await lab.run(ask(2, 3))
            assert all(INSTRUCTIONS in _system_text(request) for request in lab.server.requests)

    async def test_an_error_of_the_model_fails_the_attempt_with_type_message_and_traceback(self, agent: Any) -> None:
        async with self.lab(agent, script=lambda request: Answer(status=400, error="the model has gone home")) as lab:
            (rollout,) = await lab.run(ask(2, 3))
        assert rollout.status == "failed"
        assert rollout.attempt.status == "failed"
        error = rollout.attempt.error
        assert error is not None
        assert error.type
        assert "the model has gone home" in error.message
        assert "Traceback" in error.traceback

    async def test_a_timeout_stops_the_agent(self, agent: Any) -> None:
        added.clear()
        release = asyncio.Event()

        def hold(request: RecordedRequest) -> Answer:
            return Answer(tool_calls=self.answer(request).tool_calls, until=release)

        async with self.lab(agent, script=hold) as lab:
            (rollout,) = await lab.run(ask(7, 8), timeout_s=0.2, through_gateway=False)
            assert rollout.attempt.status == "timeout"
            await go_on(release)
            assert (7, 8) not in added, "the agent went on after its time was up"

    async def test_a_cancelled_rollout_stops_the_agent(self, agent: Any) -> None:
        added.clear()
        called, release = asyncio.Event(), asyncio.Event()

        def hold(request: RecordedRequest) -> Answer:
            called.set()
            return Answer(tool_calls=self.answer(request).tool_calls, until=release)

        async with self.lab(agent, script=hold) as lab:

            async def cancel(ids: list[str]) -> None:
                await asyncio.wait_for(called.wait(), PATIENCE_S)
                await lab.store.cancel_rollout(ids[0])

            (rollout,) = await lab.run(ask(7, 9), meanwhile=cancel, through_gateway=False)
            assert rollout.status == "cancelled"
            await go_on(release)
            assert (7, 9) not in added, "the agent went on after it was cancelled"

    async def test_it_can_be_sent_to_a_runner_process(self, agent: Any) -> None:
        async with self.lab(agent, prompts=None if self.prompt_path is None else [self.prompt_path]) as lab:
            lab.agent = cloudpickle.loads(cloudpickle.dumps(lab.agent))
            (rollout,) = await lab.run(ask(2, 3))
            assert _outcome(rollout) == ("succeeded", None)
            assert find_final_reward(await lab.spans(rollout)) == 1.0

    async def test_nothing_calls_home(self, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
        strangers: list[str] = []
        look_up = socket.getaddrinfo

        def refuse(host: Any, *args: Any, **kwargs: Any) -> Any:
            if host not in ("127.0.0.1", "localhost", "::1", None):
                strangers.append(str(host))
                raise OSError(f"this test blocks calls to {host}")
            return look_up(host, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        async with self.lab(agent) as lab:
            (rollout,) = await lab.run(ask(2, 3))
        assert _outcome(rollout) == ("succeeded", None)
        await asyncio.sleep(0.2)
        assert strangers == []


def _outcome(rollout: AttemptedRollout) -> tuple[str, str | None]:
    error = rollout.attempt.error
    return rollout.status, None if error is None else f"{error.type}: {error.message}\n{error.traceback}"


def _system_text(request: RecordedRequest) -> str:
    contents = [
        message["content"] for message in request.body["messages"] if message["role"] in ("system", "developer")
    ]
    return " ".join(content if isinstance(content, str) else json.dumps(content) for content in contents)


def _names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def _tool_span(spans: list[Span]) -> Span:
    tools = [span for span in spans if is_tool_span(span)]
    assert len(tools) == 1, (
        "a call of a tool is one span with gen_ai.operation.name = 'execute_tool'; "
        f"{len(tools)} of these have it: {_names(spans)}"
    )
    return tools[0]


def _check_agent(span: Span, spans: list[Span]) -> None:
    assert AGENT_NAME in _agents_above(span, spans), (
        f"a span of the agent encloses its calls and has the attribute gen_ai.agent.name = {AGENT_NAME!r}; above "
        f"{span.name!r} are the agents {_agents_above(span, spans)}"
    )


def _agents_above(span: Span, spans: list[Span]) -> list[str]:
    """Returns the names of the agents above a span, nearest first."""
    by_id = {other.span_id: other for other in spans}
    names = []
    above: Span | None = span
    while above is not None:
        name = semconv.read_agent_name(above)
        if name is not None:
            names.append(name)
        above = by_id.get(above.parent_id or "")
    return names
