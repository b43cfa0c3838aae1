"""Sampling parameters of agents' calls: their checks, and the distribution of tokens that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import aiohttp

from agentlightning.errors import ConfigError, LightningError, suggest
from agentlightning.resources import check_sampling_ranges
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow

SAMPLING_KEYS: Final = (
    "force", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "extra_body",
)  # fmt: skip
PENALTIES: Final = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
FIXED: Final = frozenset({"min_p", *PENALTIES})
"""Parameters that a training row cannot express: they are off even if calls choose the other parameters."""
_NEUTRAL: Final[Mapping[str, Any]] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
}  # fmt: skip
"""The parameters that change the distribution of tokens, each at the value that has no effect."""


def flatten(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters with the content of ``extra_body`` moved to the top level, as in a request."""
    own = {name: value for name, value in sampling.items() if name not in ("extra_body", "force")}
    return {**own, **(sampling.get("extra_body") or {})}


def agent_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that agents pass on to ``chat.completions.create``."""
    return {name: value for name, value in sampling.items() if name != "force"}


def distribution(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that decide which distribution its tokens are drawn from."""
    flat = flatten(sampling)
    return {name: neutral if flat.get(name) is None else flat[name] for name, neutral in _NEUTRAL.items()}


def unnest_temperature(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns sampling parameters with the temperature of ``extra_body``, if any, moved to the top level."""
    body = dict(sampling.get("extra_body") or {})
    if "temperature" not in body:
        return sampling
    return {**sampling, "temperature": body.pop("temperature"), "extra_body": body}


def check_sampling(name: str, sampling: Mapping[str, Any]) -> None:
    for key in sampling:
        if key not in SAMPLING_KEYS:
            raise ConfigError(
                f"{name} has no key {key!r}.{suggest(key, SAMPLING_KEYS)} Keys: {', '.join(SAMPLING_KEYS)}."
            )
    if not isinstance(sampling.get("force", True), bool):
        raise ConfigError(f"{name}: force = {sampling['force']!r}; true or false is needed.")
    flat = {"temperature": 1.0, **flatten(sampling)}
    if flat["temperature"] is None:
        raise ConfigError(f"{name}: temperature = None; a number of at least 0 is needed.")
    check_sampling_ranges(name, flat)


def refuse_distortions(name: str, sampling: Mapping[str, Any], why: str) -> None:
    for key in sorted(FIXED):
        if sampling.get(key) not in (None, {}, _NEUTRAL.get(key)):
            raise ConfigError(
                f"{name}: {key} = {sampling[key]!r} changes the distribution of tokens, {why}; leave it out."
            )


def check_training_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuses parameters under which a group has no spread, or tokens are not sampled from the whole distribution."""
    if sampling["temperature"] == 0:
        raise ConfigError("sampling: temperature = 0 always gives the same answer; a group then has no spread.")
    if sampling.get("seed") is not None:
        raise ConfigError(
            f"sampling: seed = {sampling['seed']!r} would give all rollouts of a task the same answers; set the "
            "algorithm's seed or the run's instead."
        )
    refuse_distortions("sampling", sampling, "and the trainer computes log-probabilities without it")
    if sampling.get("top_p") not in (None, 1) or (sampling.get("top_k") or 0) > 0:
        raise ConfigError(
            f"sampling = {dict(sampling)}: training needs the whole distribution; leave top_p and top_k out"
        )


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
