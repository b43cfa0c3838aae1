"""A custom algorithm that tries prompts one after another and publishes the best.

In three terminals, which may be on three machines:

    agl store                                              # stores rollouts, spans and prompts, at port 4747
    python examples/apo/apo_custom_algorithm.py runner     # runs the agent until Ctrl-C
    python examples/apo/apo_custom_algorithm.py algo       # tries the prompts

The same in one process, without a separate store:

    python examples/apo/apo_custom_algorithm.py

It needs OPENAI_API_KEY, OPENAI_MODEL and, for an endpoint other than OpenAI's, OPENAI_BASE_URL.
AGL_STORE selects a store other than http://127.0.0.1:4747.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys

from openai import AsyncOpenAI

import agentlightning as agl

MODEL = os.environ.get("OPENAI_MODEL", "")
TASK = "Explain in 100 words why the sky is blue, by how light is scattered."
PROMPTS = (
    "You are a helpful assistant. {any_question}",
    "You are a knowledgeable AI. {any_question}",
    "You are a friendly chatbot. {any_question}",
)


@agl.rollout
async def answer(task: str, prompt_template: agl.PromptTemplate) -> float:
    """The agent: answers a question and lets a model judge the answer."""
    async with AsyncOpenAI() as client:
        question = prompt_template.format(any_question=task)
        reply = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
        text = reply.choices[0].message.content or ""
        return await judge(client, task, text)


async def judge(client: AsyncOpenAI, task: str, text: str) -> float:
    """Returns a reward from 0 to 1 from another model call."""
    request = f"How good is this answer? Say a number from 0 to 10 and nothing else.\nTask: {task}\nAnswer: {text}"
    reply = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": request}])
    number = re.search(r"\d+(\.\d+)?", reply.choices[0].message.content or "")
    return min(float(number[0]) / 10, 1.0) if number else 0.0


@agl.algo
async def try_prompts(store: agl.LightningStore) -> None:
    """The algorithm: publishes each prompt, runs the agent with it, reads the reward, publishes the best."""
    rewards: dict[str, float] = {}
    for prompt in PROMPTS:
        print(f"\nprompt: {prompt}")
        update = await store.add_resources({"prompt_template": agl.PromptTemplate(prompt, engine="f-string")})
        rollout = await store.enqueue_rollout(TASK, mode="train", resources_id=update.resources_id)
        (finished,) = await store.wait_for_rollouts([rollout.rollout_id])
        print(f"rollout {finished.rollout_id}: {finished.status}")
        spans = await store.query_spans(finished.rollout_id, "latest")
        for span in spans:
            print(f"  span {span.name}")
        rewards[prompt] = agl.find_final_reward(spans.items) or 0.0
        print(f"final reward: {rewards[prompt]}")
    best = max(rewards, key=lambda prompt: rewards[prompt])
    await store.add_resources({"prompt_template": best})
    print(f"\nbest prompt: {best} (reward {rewards[best]})")


async def serve(role: str) -> None:
    """Runs one of the roles with a store in another process."""
    store = agl.LightningStoreClient(os.environ.get("AGL_STORE", "http://127.0.0.1:4747"), os.environ.get("AGL_TOKEN"))
    try:
        if role == "algo":
            await try_prompts(store=store)
            return
        runner = agl.LitAgentRunner[str](agl.OtelTracer())
        with runner.run_context(agent=answer, store=store):
            print("runner: waiting for rollouts", flush=True)
            await runner.iter()
    finally:
        await store.close()


def main(arguments: list[str]) -> int:
    if not arguments:
        agl.Trainer(algorithm=try_prompts, strategy="shm").fit(answer)
        return 0
    if arguments not in (["runner"], ["algo"]):
        print(__doc__)
        return 2
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
