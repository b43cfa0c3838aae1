"""A plain function that sorts the tickets of a shop's support, with a prompt and a model that can be trained."""

from __future__ import annotations

import functools

from examples.one_agent.tickets import Ticket, grade
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

import agentlightning as agl

FIRST_PROMPT = "You sort the tickets of a shop."


@functools.cache
def client() -> AsyncOpenAI:
    """Returns the client of this process; each rollout sets its address."""
    return AsyncOpenAI(api_key="unset", base_url="http://unset", max_retries=0, http_client=DefaultAsyncHttpxClient())


async def agent(task: Ticket, prompt: agl.PromptTemplate, llm: agl.LLM) -> float:
    """Sorts one ticket; returns the grade of the model's answer."""
    own = client().with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "unset")
    completion = await own.chat.completions.create(
        model=llm.model,
        messages=[{"role": "system", "content": prompt.format()}, {"role": "user", "content": task["text"]}],
        **llm.sampling_parameters,
    )
    return grade(task, completion.choices[0].message.content or "")
