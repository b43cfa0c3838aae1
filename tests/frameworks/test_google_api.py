"""Google's own client against the gateway: tools, streams, thoughts, schemas, counts and errors, token-exact."""

from __future__ import annotations

from typing import Any

import pytest
from google import genai
from google.genai import errors, types

import agentlightning as agl
from agentlightning.adapter import build_trajectories
from agentlightning.testing.agent import INSTRUCTIONS, Answer, Lab, add, answer, ask

pytestmark = pytest.mark.filterwarnings("ignore")  # of the client


def make_client(llm: agl.LLM) -> genai.Client:
    base_url = llm.endpoint.removesuffix("/v1")
    return genai.Client(api_key=llm.api_key, http_options=types.HttpOptions(base_url=base_url))


async def run(agent: Any, script: Any) -> tuple[Any, list[agl.Triplet], list[dict[str, Any]]]:
    async with Lab(agl.rollout(agent), script, reward=lambda *_: 1.0) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        triplets = agl.TraceToTriplet().adapt(await lab.spans(rollout))
        bodies = [request.body for request in lab.server.requests]
    assert rollout.status == "succeeded", rollout.attempt.error
    return rollout, triplets, bodies


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_with_a_tool_is_one_trajectory(is_stream: bool) -> None:
    said: list[Any] = []

    async def agent(task: str, llm: agl.LLM) -> None:
        config = types.GenerateContentConfig(
            system_instruction=INSTRUCTIONS, tools=[add], temperature=0.5, max_output_tokens=50, stop_sequences=["END"]
        )
        async with make_client(llm).aio as client:
            if is_stream:
                chunks = await client.models.generate_content_stream(model=llm.model, contents=task, config=config)
                said.extend([chunk async for chunk in chunks])
            else:
                said.append(await client.models.generate_content(model=llm.model, contents=task, config=config))

    _, triplets, bodies = await run(agent, answer)
    assert "".join(chunk.text or "" for chunk in said) == "The sum is 5."
    assert said[-1].candidates[0].finish_reason == "STOP"
    assert said[-1].usage_metadata.candidates_token_count == len(triplets[-1].response["token_ids"])
    assert [len(triplet.response["token_ids"]) for triplet in triplets] == [
        len(t.response["logprobs"]) for t in triplets
    ]
    first, last = bodies
    assert (first["temperature"], first["max_tokens"], first["stop"]) == (0.5, 50, ["END"])
    assert first["messages"] == [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": ask(2, 3)}]
    (tool,) = first["tools"]
    assert tool["function"]["parameters"]["type"] == "object"
    assert tool["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    call, result = last["messages"][2:]
    assert (call["tool_calls"][0]["function"]["name"], result["role"], result["content"]) == ("add", "tool", "5")
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    found = build_trajectories(triplets)
    assert (len(found.trajectories), found.mismatches) == (1, [])


async def test_thoughts_schemas_counts_and_errors_have_googles_form() -> None:
    seen: dict[str, Any] = {}

    async def agent(task: str, llm: agl.LLM) -> None:
        schema = types.Schema(type="OBJECT", properties={"sum": types.Schema(type="INTEGER", nullable=True)})
        async with make_client(llm).aio as client:
            config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=schema)
            seen["answer"] = await client.models.generate_content(model=llm.model, contents=task, config=config)
            seen["count"] = await client.models.count_tokens(model=llm.model, contents=task)
            try:
                await client.models.generate_content(model="another", contents=task)
            except errors.ClientError as error:
                seen["error"] = error
            await client.models.generate_content(model=llm.model, contents=task)

    thought = Answer('{"sum": 5}', reasoning="two and three")
    _, _, bodies = await run(agent, [thought, Answer("5"), Answer("5")])
    parts = seen["answer"].candidates[0].content.parts
    assert [(part.text, bool(part.thought)) for part in parts] == [("two and three", True), ('{"sum": 5}', False)]
    schema = bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["sum"]["type"] == ["integer", "null"]
    assert seen["count"].total_tokens > 0
    assert (seen["error"].code, seen["error"].status) == (404, "NOT_FOUND")
    assert "another" in str(seen["error"])


async def test_calls_and_results_without_ids_are_paired_by_name() -> None:
    async def agent(task: str, llm: agl.LLM) -> None:
        calls = [types.Part(function_call=types.FunctionCall(name=name, args={"a": 1})) for name in ("f", "g", "f")]
        results = [
            types.Part(function_response=types.FunctionResponse(name=name, response={"result": name})) for name in "gff"
        ]
        said = [types.ModelContent(each) for each in ("Well, ", "ok.", calls)]
        contents = [types.UserContent(task), types.UserContent("please"), *said, types.UserContent(results)]
        async with make_client(llm).aio as client:
            await client.models.generate_content(model=llm.model, contents=contents)

    _, _, (body,) = await run(agent, [Answer("done")])
    first, second, said, *results = body["messages"]
    assert [each["content"] for each in (first, second, said)] == [ask(2, 3), "please", "Well, ok."]
    asked = {call["id"]: call["function"]["name"] for call in said["tool_calls"]}
    answered = [(asked[message["tool_call_id"]], message["content"]) for message in results]
    assert answered == [("g", "g"), ("f", "f"), ("f", "f")]
    assert len({message["tool_call_id"] for message in results}) == 3


async def test_arguments_that_are_not_json_reach_the_client_as_text() -> None:
    async def agent(task: str, llm: agl.LLM) -> None:
        tool = types.Tool(function_declarations=[types.FunctionDeclaration(name="f")])
        config = types.GenerateContentConfig(tools=[tool])
        async with make_client(llm).aio as client:
            said = await client.models.generate_content(model=llm.model, contents=task, config=config)
            calls.extend(said.function_calls or ())

    calls: list[types.FunctionCall] = []
    await run(agent, [Answer(tool_calls=[("f", "no json")])])
    assert [list((call.args or {}).values()) for call in calls] == [["no json"]]
