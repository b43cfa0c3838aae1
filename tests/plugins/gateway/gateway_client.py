"""Agents as users write them: ``python -m tests.plugins.gateway.gateway_client FILE NAME BASE_URL NAME BASE_URL ...``.

They run in a separate process, because the frameworks change the global state of their process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
SUM = "What is 1 + 2?"
KEY = "the-agents-own-key"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a + b


def add_in_words(a: int, b: int) -> str:
    """Adds two numbers, for clients that take texts only."""
    return str(a + b)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def use_openai(url: str) -> list[Any]:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        chat = client.chat.completions
        said: list[Any] = [chat.create(model="m", messages=HELLO).choices[0].message.content]
        chunks = chat.create(model="m", messages=HELLO, stream=True)
        said.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        with chat.stream(model="m", messages=[{"role": "user", "content": SUM}], tools=[TOOL]) as stream:
            calls = stream.get_final_completion().choices[0].message.tool_calls
            said.append([(call.function.name, call.function.arguments) for call in calls or ()])
        said.append(client.responses.create(model="m", input="Say hello.").output_text)
        with client.responses.stream(model="m", input="Say hello.") as events:
            said.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
        said.append([model.id for model in client.models.list()])
    return said


def use_anthropic(url: str) -> list[Any]:
    from anthropic import Anthropic, beta_tool

    with Anthropic(base_url=url.removesuffix("/v1") + "/anthropic", api_key=KEY, max_retries=0) as client:
        ask: Any = {"model": "m", "max_tokens": 99}
        said = [client.messages.create(**ask, messages=HELLO).content[0].text]
        with client.messages.stream(**ask, messages=HELLO) as stream:
            said.append("".join(stream.text_stream))
        messages: Any = [{"role": "user", "content": SUM}]
        runner = client.beta.messages.tool_runner(**ask, messages=messages, tools=[beta_tool(add_in_words, name="add")])
        said.append(runner.until_done().content[0].text)
        said.append([model.id for model in client.models.list()])
    return said


def use_litellm(url: str) -> list[Any]:
    import litellm

    to: Any = {"model": "openai/m", "api_base": url, "api_key": KEY}
    said = [litellm.completion(messages=HELLO, **to).choices[0].message.content]
    chunks = litellm.completion(messages=HELLO, stream=True, **to)
    said.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    said.append(asyncio.run(litellm.acompletion(messages=HELLO, **to)).choices[0].message.content)
    claude: Any = {"model": "anthropic/m", "api_base": url.removesuffix("/v1") + "/anthropic", "api_key": KEY}
    said.append(litellm.completion(messages=HELLO, **claude).choices[0].message.content)
    return said


def use_langchain(url: str) -> list[Any]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(model="m", base_url=url, api_key=SecretStr(KEY), max_retries=0)
    said = [chat.invoke("Say hello.").content, "".join(str(chunk.content) for chunk in chat.stream("Say hello."))]
    agent: Any = create_agent(chat, tools=[add])
    said.append(agent.invoke({"messages": [("user", SUM)]})["messages"][-1].content)
    responses = ChatOpenAI(model="m", base_url=url, api_key=SecretStr(KEY), max_retries=0, use_responses_api=True)
    said += [responses.invoke("Say hello.").text, "".join(chunk.text for chunk in responses.stream("Say hello."))]
    return said


def use_openai_agents(url: str) -> list[Any]:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def run() -> list[Any]:
        said: list[Any] = []
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            tool = agents.function_tool(add)
            for model in (agents.OpenAIResponsesModel("m", client), agents.OpenAIChatCompletionsModel("m", client)):
                agent = agents.Agent(name="adder", instructions="Add.", model=model, tools=[tool])
                said.append((await agents.Runner.run(agent, SUM)).final_output)
                streamed = agents.Runner.run_streamed(agent, SUM)
                async for _ in streamed.stream_events():
                    pass
                said.append(streamed.final_output)
        return said

    return asyncio.run(run())


CLIENTS: dict[str, Callable[[str], list[Any]]] = {
    name.removeprefix("use_"): value for name, value in list(globals().items()) if name.startswith("use_")
}


def use(name: str, base_url: str) -> list[Any]:
    try:
        return CLIENTS[name](base_url)
    except Exception:  # the test shows it
        return [traceback.format_exc()]


if __name__ == "__main__":
    _, result, *pairs = sys.argv
    said = {name: use(name, url) for name, url in zip(pairs[::2], pairs[1::2], strict=True)}
    Path(result).write_text(json.dumps(said), encoding="utf-8")
