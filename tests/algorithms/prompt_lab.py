"""A task with a known best prompt, and a scripted critic and editor that can find it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import agentlightning as agl
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, Script, ScriptedOpenAI

SEED = "Answer the question: {question}"
WORTH = {"RULE-A": 0.5, "RULE-B": 0.25, "RULE-C": 0.25, "TRAP-D": -0.5, "TRAP-E": -0.25}
"""Reward of each phrase in a prompt; the sum is never below 0."""
BEST = {"RULE-A", "RULE-B", "RULE-C"}
TRAIN = [{"question": f"train {number}", "seconds": 0.0} for number in range(40)]
VAL = [{"question": f"val {number}", "seconds": 0.0} for number in range(6)]


class Server:
    """A scripted server in a thread, because the trainer runs its own event loop."""

    def __init__(self, script: Script) -> None:
        self.scripted = ScriptedOpenAI(script)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> ScriptedOpenAI:
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self.scripted.__aenter__(), self._loop).result()

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self.scripted.__aexit__(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def phrases(text: str) -> set[str]:
    """Returns the rule and trap phrases in a prompt."""
    return set(re.findall(r"(?:RULE|TRAP)-[A-E]", text))


def worth(text: str) -> float:
    """Returns the reward that a prompt earns on every task."""
    return max(sum(WORTH[phrase] for phrase in phrases(text)), 0.0)


def agent(task: Mapping[str, Any], prompt: agl.PromptTemplate) -> float:
    """Returns the known reward of the prompt without calling a model."""
    filled = prompt.format(question=task["question"])
    assert str(task["question"]) in filled
    time.sleep(task["seconds"])
    return worth(filled)


def prompt_in(request: RecordedRequest) -> str:
    """Returns the prompt in a request to the critic or editor."""
    found = re.search(r"<prompt[^>]*>\n(.*?)\n</prompt>", request.body["messages"][0]["content"], re.DOTALL)
    assert found is not None
    return found[1]


def is_critic(request: RecordedRequest) -> bool:
    return bool(request.body["model"] == "critic")


def criticise(request: RecordedRequest) -> str:
    """Names a phrase that the prompt lacks, chosen by a hash of the rollouts."""
    missing = sorted(set(WORTH) - phrases(prompt_in(request)))
    digest = hashlib.blake2b(_questions(request).encode(), digest_size=4).digest()
    fault = f"it lacks {missing[int.from_bytes(digest) % len(missing)]}" if missing else "nothing is wrong"
    return f"{fault} (seen in {digest.hex()})"


def edit(request: RecordedRequest) -> str:
    """Adds the phrase of the critique to the prompt."""
    asked = request.body["messages"][0]["content"]
    lacking = re.search(r"it lacks ([A-Z]+-[A-E])", asked)
    return f"<prompt>\n{prompt_in(request)}" + (f"\n{lacking[1]}" if lacking else "") + "\n</prompt>"


def critic_and_editor(request: RecordedRequest) -> Answer:
    """Scripts critic and editor; answers depend only on the request."""
    return Answer(criticise(request) if is_critic(request) else edit(request))


def client(server: ScriptedOpenAI) -> Any:
    """Returns a client for critic and editor."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=server.endpoint, api_key="any", max_retries=0)


def _questions(request: RecordedRequest) -> str:
    return " ".join(re.findall(r"train \d+", request.body["messages"][0]["content"]))
