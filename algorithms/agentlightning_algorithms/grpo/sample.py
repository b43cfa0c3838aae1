"""Answers that the policy backend samples without a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from agentlightning.errors import LightningError
from agentlightning_algorithms.grpo.sampling import distribution
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow


class Sample(NamedTuple):
    """An answer sampled from the newest published weights."""

    text: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: int
    distribution: Distribution | None = None
    """The distribution of the tokens; None: the distribution of the settings."""

    def row(self, advantage: float) -> TrainingRow:
        """Returns the sample as a row to train on."""
        return TrainingRow(self.prompt_ids, self.token_ids, self.logprobs, advantage, distribution=self.distribution)


async def sample_answers(
    entry: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    expected: Distribution | None,
    version: int,
) -> list[Sample]:
    """Samples answers to a conversation; see ``TrainingSession.sample``.

    Args:
        entry: the backend's entry in the gateway's model list.
        messages: the conversation.
        sampling: the parameters of the request, ``n`` included.
        expected: the distribution of the settings.
        version: the version of the weights, for backends whose answers do not have it.

    Raises:
        LightningError: the server refused the request.
    """
    body = {**sampling, "model": entry["model"], "messages": list(messages)}
    asked = distribution(body)
    # vLLM sets omitted fields to the values in the model's generation_config.json.
    body |= {name: value for name, value in asked.items() if value is not None}
    body |= {"logprobs": True, "return_token_ids": True}
    key = entry.get("api_key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
        client.post(f"{entry['endpoint']}/chat/completions", json=body, headers=headers) as response,
    ):
        answer = await response.json(content_type=None)
        if response.status != 200:
            raise LightningError(f"the policy server answered {response.status}: {answer['error']['message']}")
    drawn = Distribution(float(asked["temperature"]), float(asked["top_p"]), max(0, int(asked["top_k"])))
    return [
        Sample(
            choice["message"]["content"] or "",
            answer["prompt_token_ids"],
            choice["token_ids"],
            [token["logprob"] for token in choice["logprobs"]["content"]],
            int(answer.get("weight_version", version)),
            None if drawn == expected else drawn,
        )
        for choice in answer["choices"]
    ]
