"""The history of a conversation reaches the model as the model saw and sampled it."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.adapter import TraceToTrajectories, TraceToTransitions, TraceToTriplet, build_trajectories
from agentlightning_algorithms.grpo.episode import fill_rewards, read_episode
from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.messages import MessagesTranslation
from agentlightning_plugins.gateway.dialects.responses import ResponsesTranslation
from agentlightning_plugins.gateway.history import SampledHistory, put_prompt
from agentlightning_plugins.shared.chat_history import link_calls, select_examples
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from agentlightning_plugins.shared.training_records.record import RolloutOutcome, explain_unused
from tests.plugins.agents.command_lab import run, tracer
from tests.plugins.gateway.gateway_setup import ADD, HELLO, entry, gateway
from tests.waiting import until

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.b68; cc_entrypoint=sdk; cch={};"
SPACED = '{"path": "a/b",  "n": 1.0, "z": {"y": [true]}}'

__all__ = ["tracer"]


async def ask_chat(client: Any, case: Any, turns: list[Any]) -> None:
    messages: list[Any] = [{"role": "system", "content": "Act."}, *HELLO]
    for result in turns:
        answer = await client.chat.completions.create(model="m", messages=messages)
        calls = [call.to_dict() for call in answer.choices[0].message.tool_calls or ()]
        for call in calls:
            call["function"]["arguments"] = json.dumps(as_javascript(json.loads(call["function"]["arguments"])))
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]


async def ask_responses(client: Any, case: Any, turns: list[Any]) -> None:
    items: list[Any] = [{"role": "user", "content": "Hi"}]
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "read", "parameters": {}}]
    for result in turns:
        answer = await client.responses.create(model="m", instructions="Act.", input=items, tools=tools)
        calls = [item.to_dict() for item in answer.output]
        for call in calls:
            if call["type"] == "function_call":
                call["arguments"] = json.dumps(as_javascript(json.loads(call["arguments"])))
        items += calls
        items += [{"type": f"{c['type']}_output", "call_id": c["call_id"], "output": result} for c in calls]


async def ask_messages(client: Any, case: Any, turns: list[Any]) -> None:
    messages: list[Any] = list(HELLO)
    client = await case.anthropic_client(client)
    for turn, result in enumerate(turns):
        system = [{"type": "text", "text": BILLING.format(f"a{turn}f")}, {"type": "text", "text": "Act."}]
        answer = await client.messages.create(model="m", max_tokens=9, system=system, messages=messages)
        calls = [block.to_dict() for block in answer.content]
        for call in calls:
            call["input"] = as_javascript(call["input"])
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        messages += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]


def as_javascript(value: Any) -> Any:
    return json.loads(
        json.dumps(value), parse_float=lambda text: int(float(text)) if float(text) % 1 == 0 else float(text)
    )


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
@pytest.mark.parametrize("name", ["read", "patch"])
async def test_a_conversation_whose_tool_arguments_come_back_as_equal_json_is_one_trajectory(
    ask: Any, name: str
) -> None:
    sampled = SPACED if name == "read" else '{"input":  "*** Begin\\u00e9"}'
    async with ScriptedOpenAI(lambda _: Answer(tool_calls=[(name, sampled)])) as server, gateway(server) as case:
        rollout, client = await case.start()
        await ask(client, case, ["one", "two", "three"])
        sent = [request.body["messages"] for request in server.requests]
        triplets = TraceToTriplet().adapt(await case.spans(rollout))
    texts = [call["function"]["arguments"] for message in sent[-1] for call in message.get("tool_calls") or ()]
    assert texts == [sampled] * 2
    assert sent[0] == sent[1][: len(sent[0])] == sent[2][: len(sent[0])]  # also a line that changes with every call
    assert link_calls(triplets) == [None, 0, 1]


async def test_arguments_that_mean_something_else_or_belong_to_another_call_are_not_restored() -> None:
    async with ScriptedOpenAI([Answer(tool_calls=[("read", '{"a": 1}')])]) as server, gateway(server) as case:
        _, client = await case.start()
        _, stranger = await case.start()
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        call = (answer.choices[0].message.tool_calls or [])[0].to_dict()
        for own, other in (({"arguments": '{"a":true}'}, {}), ({"arguments": '{"a":1}'}, {"id": "x"}), ({}, {"id": 5})):
            changed = {**call, "function": {"name": "read", "arguments": '{"a":1}', **own}, **other}
            history: list[Any] = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [changed, None]}]
            await client.chat.completions.create(model="m", messages=history)
            assert server.requests[-1].body["messages"] == history
        same = {**call, "function": {"name": "read", "arguments": '{"a":1}'}}
        await stranger.chat.completions.create(model="m", messages=[{"role": "assistant", "tool_calls": [same]}])
        assert server.requests[-1].body["messages"][0]["tool_calls"] == [same]


RESULTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "an error of Messages": ("m", {"content": "no such file", "is_error": True}, "Error: no such file"),
    "an error with parts": (
        "m",
        {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "is_error": True},
        [{"type": "text", "text": text} for text in ("Error: ", "a", "b")],
    ),
    "an error without content": ("m", {"is_error": True}, "Error: "),
    "no content of Messages": ("m", {"content": []}, ""),
    "a failed patch": ("apply_patch_call", {"output": "no match", "status": "failed"}, "Error: no match"),
    "texts of Responses": (
        "function_call",
        {"output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    ),
    "an array that has no parts": ("function_call", {"output": [1, {"a": 2}]}, '[1,{"a":2}]'),
    "an empty array": ("function_call", {"output": []}, ""),
    "no output": ("function_call", {"output": None}, ""),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_result_of_a_tool_reaches_the_model_as_its_api_means_it(name: str) -> None:
    kind, result, expected = RESULTS[name]
    body: dict[str, Any] = {"input": [{"type": f"{kind}_output", "call_id": "c", **result}]}
    translation: Any = ResponsesTranslation(body)
    if kind == "m":
        block = {"type": "tool_result", "tool_use_id": "c", **result}
        translation = MessagesTranslation({"messages": [{"role": "user", "content": [block]}]})
    assert translation.request()["messages"] == [{"role": "tool", "tool_call_id": "c", "content": expected}]


@pytest.mark.parametrize("setting", ["keep", "user"])
async def test_late_system_messages_become_the_users_if_the_template_refuses_them(setting: Any) -> None:
    system, late = {"role": "system", "content": "Act."}, {"role": "system", "content": "Today is Monday."}
    said: list[Any] = [system, *HELLO, late, {"role": "assistant", "content": "ok"}, late]
    async with ScriptedOpenAI() as server, gateway(server, late_system=setting) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=said)
        await (await case.anthropic_client(client)).messages.create(
            model="m", max_tokens=9, system="Act.", messages=said[1:]
        )
        sent = [request.body["messages"] for request in server.requests]
        read = semconv.read_input_messages((await case.spans(rollout))[0])
    role = "user" if setting == "user" else "system"
    expected = [system, *HELLO, {**late, "role": role}, said[3], {**late, "role": role}]
    assert sent == [expected] * 2
    assert read == expected


def test_a_setting_for_late_system_messages_that_does_not_exist_is_refused() -> None:
    with pytest.raises(agl.ConfigError, match="late_system = 'drop'; give one of: keep, user"):
        agl.LLMProxy(late_system="drop")


CONVERSATIONS: dict[str, tuple[dict[str, str], dict[str, str], tuple[str, str]]] = {
    "Claude Code": (
        {"X-Claude-Code-Session-Id": "s"},
        {"X-Claude-Code-Session-Id": "s", "x-claude-code-agent-id": "a"},
        ("a", "s"),
    ),
    "opencode": ({"x-session-id": "s"}, {"x-session-id": "t", "x-parent-session-id": "s"}, ("t", "s")),
    "Codex": (
        {"session-id": "s", "thread-id": "s", "x-codex-window-id": "s:1"},
        {"session-id": "s", "thread-id": "t"},
        ("t", "s"),
    ),
}
TOOLS: list[Any] = [ADD]


@pytest.mark.parametrize("agent", CONVERSATIONS)
async def test_conversations_of_an_agent_and_its_sub_agents_are_told_apart_and_side_calls_left_out(agent: str) -> None:
    main, sub, (sub_id, parent) = CONVERSATIONS[agent]
    title: list[Any] = [{"role": "system", "content": "Write a title."}, *HELLO]
    work: list[Any] = [{"role": "system", "content": "Work."}, *HELLO]
    summary: list[Any] = [*work, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "Summarise."}]
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        for headers, messages, tools in (
            (main, title, []),
            (main, work, TOOLS),
            (sub, [{"role": "system", "content": "Help."}, *HELLO], TOOLS),
            (main, summary, []),
            (main, [*work, {"role": "user", "content": "Go on."}], TOOLS),
            (main, summary, []),  # the last answer, without tools
        ):
            more = {"tools": tools} if tools else {}
            await client.chat.completions.create(model="m", messages=messages, extra_headers=headers, **more)
        spans = await case.spans(rollout)
        await case.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", reward=1.0)
        examples = [example async for example in select_examples(case.store)]
    assert [span.attributes["gen_ai.conversation.id"] for span in spans] == ["s", "s", sub_id, "s", "s", "s"]
    assert spans[2].attributes[semconv.PARENT_CONVERSATION] == parent
    assert all(semconv.PARENT_CONVERSATION not in span.attributes for span in spans if span is not spans[2])
    triplets = TraceToTriplet().adapt(spans)
    said = [triplet.metadata.get("unused") for triplet in triplets]
    assert said == ["side_call", None, None, "side_call", None, None]
    assert [triplet.metadata["conversation_id"] for triplet in triplets] == ["s", "s", sub_id, "s", "s", "s"]
    assert [explain_unused(triplet) for triplet in triplets].count("side_call") == 2
    assert build_trajectories(triplets).left_out == {"side_call": 2}
    assert len(TraceToTriplet(agent_match="^subagent$").adapt(spans)) == 1
    assert [example.messages[-2]["content"] for example in examples] == ["Say hello.", "Go on.", "Summarise."]
    steps = TraceToTransitions().adapt(spans)
    assert [step.metadata["span_id"] for step in steps] == [spans[i].span_id for i in (1, 2, 4, 5)]
    assert all(step.next_index != 0 for step in steps)
    both = TraceToTriplet(side_calls=True).adapt(spans)
    assert len(build_trajectories(both).trajectories) == len(build_trajectories(triplets).trajectories) + 2


async def test_calls_without_tools_are_trained_on_if_no_header_names_their_conversation() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=[{"role": "system", "content": "Plan."}, *HELLO])
        await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        triplets = TraceToTriplet().adapt(await case.spans(rollout))
    assert build_trajectories(triplets).left_out == {}


@pytest.mark.parametrize("failure", [Answer(status=500), Answer(status=429, headers={"x-should-retry": "true"})])
async def test_clients_do_not_try_again_what_the_gateway_has_tried(failure: Answer) -> None:
    import anthropic

    async with ScriptedOpenAI([failure]) as server, gateway(server, num_retries=1) as case:
        rollout, client = await case.start()
        messages = (await case.anthropic_client(client)).with_options(max_retries=2).messages
        client = client.with_options(max_retries=2)
        calls: list[Any] = [
            (lambda: client.chat.completions.create(model="m", messages=HELLO), failure.status),
            (lambda: messages.create(model="m", max_tokens=9, messages=HELLO), failure.status),
            (lambda: client.responses.create(model="m", input="hi"), 400),  # Codex reads only the status
        ]
        for number, (call, status) in enumerate(calls):
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="scripted error") as caught:
                await call()
            assert caught.value.response.headers.get_list("x-should-retry") == ["false"]
            assert caught.value.status_code == status
            assert len(server.requests) == 2 * (number + 1)
        spans = await case.spans(rollout)
    assert [span.attributes["http.response.status_code"] for span in spans] == [failure.status] * 3


async def test_a_budget_is_refused_with_a_status_that_codex_does_not_try_again() -> None:
    async with ScriptedOpenAI() as server, gateway(server, budget={"calls": 1}) as case:
        _, client = await case.start()
        await client.responses.create(model="m", input="hi")
        with pytest.raises(openai.BadRequestError, match="has used 1 of its 1 calls") as caught:
            await client.responses.create(model="m", input="hi")
    assert caught.value.code == "budget_exceeded"


@pytest.mark.parametrize("first", ["still runs", "was sampled", "was given up"])
async def test_a_request_that_a_client_sends_again_is_one_turn(first: str) -> None:
    again = {"x-stainless-retry-count": "1"}
    release = asyncio.Event()
    slow = Answer("one", until=release) if first != "was sampled" else Answer("one")
    async with ScriptedOpenAI([slow, Answer("two"), Answer("three")]) as server:
        models = [entry(server.endpoint, seed_calls=True)]
        async with gateway(model_list=models) as case:
            rollout, client = await case.start(metadata={"seed": 7})
            create = functools.partial(client.chat.completions.create, model="m", messages=HELLO)
            task = asyncio.create_task(create())
            await until(lambda: bool(server.requests))
            if first == "was sampled":
                await task
            elif first == "was given up":
                task.cancel()
                await until(lambda: case.spans(rollout))
            await create(extra_headers=again)
            release.set()
            await asyncio.gather(task, return_exceptions=True)
            await create()  # another turn
            spans = await case.spans(rollout)
        seeds = [request.body["seed"] for request in server.requests]
    assert seeds[0] == seeds[1] != seeds[2]
    by_answer = {
        semconv.read_output_messages(span)[0]["content"]: span for span in spans if span.status.status_code == "OK"
    }
    retried = by_answer["two"]
    (orphan,) = [span for span in spans if span.span_id == retried.attributes[semconv.RETRY_OF]]
    assert semconv.RETRY_OF not in by_answer["three"].attributes
    adapter = TraceToTriplet()
    triplets = adapter.adapt(spans)
    trained = [turn.triplet.metadata["span_id"] for t in build_trajectories(triplets).trajectories for turn in t.turns]
    assert sorted(trained) == sorted([retried.span_id, by_answer["three"].span_id])
    if first == "was given up":
        assert adapter.explain_left_out(spans) == {"given up by the client, which tried again": 1}
        assert TraceToTrajectories().adapt(spans).irregularities.get("broke_off") is None
    else:
        (given_up,) = [triplet for triplet in triplets if triplet.metadata["span_id"] == orphan.span_id]
        assert explain_unused(given_up) == "given_up"


SWALLOWS = """
import json, os, urllib.request
for _ in range(2):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    try:
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
    except OSError:
        pass
print(0)
"""
BROKEN = Answer(body=b"no answer")


@pytest.mark.parametrize(
    ("script", "settings", "error"),
    [
        pytest.param([Answer("ok"), Answer(status=500)], {}, "scripted error", id="server"),
        pytest.param(
            [Answer("ok"), Answer(status=400, error="context too long")], {}, "context too long", id="context"
        ),
        pytest.param([Answer("ok"), BROKEN], {}, "is invalid for chat/completions", id="invalid"),
        pytest.param([Answer(status=500), Answer("ok")], {}, None, id="recovered"),
        pytest.param([Answer("ok")], {"budget": {"calls": 1}}, None, id="budget"),
        pytest.param([Answer("ok"), Answer(status=500)], {"fail_attempts": False}, None, id="setting"),
    ],
)
async def test_an_attempt_whose_last_model_call_failed_has_failed_whatever_its_command_prints(
    tracer: agl.OtelTracer, script: list[Answer], settings: dict[str, Any], error: str | None
) -> None:
    agent = agl.CommandAgent([sys.executable, "-c", SWALLOWS], reward="stdout")
    async with ScriptedOpenAI(script) as server, gateway(server, num_retries=0, **settings) as case:
        resources = {"llm": case.proxy.as_resource(model="m")}
        rollout, spans = await run(case.store, agent, resources=resources)
    attempt = rollout.attempt
    if error is None:
        assert (rollout.status, attempt.status, attempt.reward, attempt.error) == ("succeeded", "succeeded", 0.0, None)
        return
    assert (rollout.status, attempt.status, attempt.reward) == ("failed", "failed", None)
    assert attempt.error is not None
    assert attempt.error.type == "model_error"
    assert error in attempt.error.message
    episode = read_episode(rollout, spans, TraceToTriplet())
    assert fill_rewards([episode], 0.0) == [None]
    outcome = RolloutOutcome("r", "a", "g", None, attempt.error.type, has_failed=True)
    assert outcome.to_entry(1, {"x": "failed"}).outcome == "model_error"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thoughts_of_earlier_answers_reach_a_chat_server_under_both_names(name: str) -> None:
    thought: list[Any] = [*HELLO, {"role": "assistant", "content": "Hello.", name: "Hm."}, *HELLO]
    reasoning: Any = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said: list[Any] = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Hello."}]
    async with ScriptedOpenAI() as server, gateway(server) as case:
        _, client = await case.start()
        await client.chat.completions.create(model="m", messages=thought)
        await client.responses.create(model="m", input=[*HELLO, reasoning, {"role": "assistant", "content": "Hello."}])
        await (await case.anthropic_client(client)).messages.create(
            model="m", max_tokens=9, messages=[*HELLO, {"role": "assistant", "content": said}]
        )
        sent = [request.body["messages"][1] for request in server.requests]
    assert sent == [{"role": "assistant", "content": "Hello.", "reasoning_content": "Hm.", "reasoning": "Hm."}] * 3


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
def test_the_token_ids_of_a_prompt_are_read_whether_or_not_it_goes_on_from_the_last_one(separators: Any) -> None:
    history, seen = SampledHistory(), list[Any]()
    for ids in ([12, 3], [12, 3, 45], [12, 34], [12, 3], [1, 2, 3], [], [7]):
        answer = {"id": "c", "prompt_token_ids": ids, "choices": []}
        text, seen_ids = history.cut_prompt(("r", "a"), json.dumps(answer, separators=separators).encode())
        completion = Completion(prompt_token_ids=json.loads(text)["prompt_token_ids"])
        put_prompt(completion, seen_ids)
        assert json.loads(text) == {**answer, "prompt_token_ids": ["..."]}
        seen.append(completion.prompt_token_ids)
    assert seen == [[12, 3], [12, 3, 45], [12, 34], [12, 3], [1, 2, 3], [], [7]]


@pytest.mark.parametrize(
    "value",
    ['"[1, 2]"', "[1, 2.5]", "[-1]", "[4294967296]", "[[1]]", "[1,,2]", "[1", "null", '"\\"prompt_token_ids\\":[1]"'],
    ids=["text", "float", "negative", "large", "nested", "malformed", "unfinished", "null", "quoted"],
)
def test_an_answer_whose_prompt_is_no_list_of_token_ids_is_left_as_it_is(value: str) -> None:
    history = SampledHistory()
    history.cut_prompt(("r", "a"), b'{"prompt_token_ids":[1]}')
    name = "text" if value.startswith('"\\') else "prompt_token_ids"
    text = f'{{"{name}":{value}}}'.encode()
    assert history.cut_prompt(("r", "a"), text) == (text, None)


def test_the_token_ids_of_prompts_that_are_kept_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning_plugins.gateway.history._MAX_PROMPT_BYTES", 10)
    history = SampledHistory()
    for number in range(5):
        history.cut_prompt(("r", str(number)), b'{"prompt_token_ids":[1,2,3]}')
    assert [attempt for _, attempt in history._prompts] == ["3", "4"]
