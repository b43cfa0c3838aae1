"""A gateway with the ``litellm`` provider: ``python -m tests.plugins.gateway.litellm_gateway FILE``.

It is a process of its own because litellm takes seconds to import and changes its process in ways of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai

from agentlightning import semconv
from agentlightning_plugins.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import ADD, HELLO, PROVIDER_KEY, Case, gateway

SCRIPT = [
    Answer("Hello!"),
    Answer("Hello!"),
    Answer(tool_calls=[("add", {"a": 1})]),
    Answer("Hello!"),
    Answer(status=429, error=f"slow down {PROVIDER_KEY}"),
    Answer("Hello, world", cut_after=4),
]


async def main() -> dict[str, Any]:
    """Returns the outcome for the test."""
    async with ScriptedOpenAI(SCRIPT, api_key=PROVIDER_KEY) as server:
        params = {"model": "anthropic/claude-x", "api_base": server.endpoint.removesuffix("/v1")}
        entry = {"model_name": "m", "provider": "litellm", "litellm_params": params | {"api_key": PROVIDER_KEY}}
        before = set(sys.modules)
        async with gateway(model_list=[entry], num_retries=0) as case:
            rollout, client = await case.start()
            said = await talk(case, client)
            spans = [
                {
                    "complete": span.attributes["agentlightning.gateway.complete"],
                    "provider": span.attributes["gen_ai.provider.name"],
                    "output": semconv.read_output_messages(span),
                }
                for span in await case.spans(rollout)
            ]
            text = "".join(span.model_dump_json() for span in await case.spans(rollout))
        requests = [
            [request.path, request.headers.get("x-api-key"), request.body["model"]] for request in server.requests
        ]
    return {
        "said": said,
        "spans": spans,
        "requests": requests,
        "leaks": PROVIDER_KEY in text + str(said),
        "is_lazy": "litellm" not in before,
    }


async def talk(case: Case, client: openai.AsyncOpenAI) -> list[Any]:
    chat = client.chat.completions
    said: list[Any] = [(await chat.create(model="m", messages=HELLO)).choices[0].message.content]
    chunks = await chat.create(model="m", messages=HELLO, stream=True)
    said.append([chunk.choices[0].delta.content async for chunk in chunks if chunk.choices[0].delta.content])
    calls: Any = (await chat.create(model="m", messages=HELLO, tools=[ADD])).choices[0].message.tool_calls
    said.append([calls[0].function.name, calls[0].function.arguments])
    said.append((await client.responses.create(model="m", input="hi")).output_text)
    try:
        await chat.create(model="m", messages=HELLO)
    except openai.RateLimitError as error:
        said.append(error.message)
    try:
        async for _ in await chat.create(model="m", messages=HELLO, stream=True):
            pass
    except openai.APIError as error:
        said.append(error.message)
    return said


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(main())), encoding="utf-8")
