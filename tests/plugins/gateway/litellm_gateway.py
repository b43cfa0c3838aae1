"""A gateway with the ``litellm`` provider: ``python -m tests.plugins.gateway.litellm_gateway FILE``.

It runs as a separate process because litellm takes seconds to import and changes the global state of its process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai

from agentlightning import semconv
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import ADD, HELLO, PROVIDER_KEY, Case, gateway

SCRIPT = [
    Answer("Hello!"),
    Answer("Hello!"),
    Answer(tool_calls=[("add", {"a": 1})]),
    Answer("Hello!"),
    Answer(status=429, error=f"slow down {PROVIDER_KEY}"),
    Answer("Hello, world", cut_after=4),
    Answer("Hello!"),
]


async def main() -> dict[str, Any]:
    """Returns the outcome for the test."""
    async with ScriptedOpenAI(SCRIPT, api_key=PROVIDER_KEY) as server:
        params = {"model": "anthropic/claude-x", "api_base": server.endpoint.removesuffix("/v1")}
        params |= {"drop_params": True, "num_retries": 3, "max_retries": 1}
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
            async with ScriptedOpenAI() as thief:
                stolen = await attack(str(client.base_url), thief)
            text = "".join(span.model_dump_json() for span in await case.spans(rollout))
        requests = [
            [request.path, request.headers.get("x-api-key"), request.body["model"]] for request in server.requests
        ]
        requests = requests[:6] + [request for request in requests[6:] if request != requests[0]]
    return {
        "said": said,
        "spans": spans,
        "requests": requests,
        "stolen": stolen,
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


async def attack(base_url: str, thief: ScriptedOpenAI) -> list[Any]:
    """Sends every field that redirects litellm, also with the fields of the APIs; returns what the thief got."""
    from litellm.types.utils import all_litellm_params

    from agentlightning_plugins.gateway.dialects.fields import CHAT_FIELDS, EMBEDDING_FIELDS

    url = thief.endpoint
    others = dict.fromkeys(sorted(set(all_litellm_params) - CHAT_FIELDS), url)
    fields = {
        "base_url": url,
        "api_base": url,
        "api_key": "agent",
        "custom_llm_provider": "openai",
        "mock_response": "mocked",
        "extra_headers": {"x-stolen": "1"},
        "extra_body": {"api_base": url},
        "fallbacks": [{"model": "openai/x", "api_base": url}],
        "context_window_fallback_dict": {"claude-x": "openai/x"},
        "model_list": [{"model_name": "m", "litellm_params": {"model": "openai/x", "api_base": url}}],
        "aws_bedrock_runtime_endpoint": url,
        "timeout": 0.001,
        "metadata": {"user_api_key": "agent", "api_base": url},
    }
    answers = []
    async with aiohttp.ClientSession() as session:
        sent: list[dict[str, Any]] = [{name: value} for name, value in fields.items()]
        sent += [dict(list(others.items())[place::10]) for place in range(10)]
        for more in [*sent, others | fields]:
            body = {"model": "m", "messages": HELLO, **more}
            async with session.post(f"{base_url}chat/completions", json=body) as response:
                answers.append((await response.text()).count("Hello!"))
    overlap = sorted((CHAT_FIELDS | EMBEDDING_FIELDS) & set(all_litellm_params) - {"metadata"})
    assert len(others) > 90
    return [len(thief.requests), overlap, answers.count(1) - len(answers)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(main())), encoding="utf-8")
