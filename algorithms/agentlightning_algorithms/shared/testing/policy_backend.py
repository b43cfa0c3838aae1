"""``PolicyBackendConformance``: the tests that every component of the kind ``policy_backend`` must pass."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import ConfigError
from agentlightning.testing import promised
from agentlightning_algorithms.shared.policy_backend import PolicySetup

MODEL = "policy"


async def sample(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of a model to a short prompt of tokens."""
    body = {"model": entry["model"], "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 1.0, "seed": 0}
    headers = {"Authorization": f"Bearer {entry['api_key']}"} if entry.get("api_key") else {}
    asked = {**body, "logprobs": 1, "return_token_ids": True}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{entry['endpoint']}/completions", json=asked) as response,
    ):
        text = await response.text()
        assert response.status == 200, f"the endpoint of model_entry answers completions: {response.status} {text}"
        answer: dict[str, Any] = await response.json()
        return answer


@pytest.mark.asyncio
class PolicyBackendConformance:
    """Tests that every policy backend must pass.

    Subclass it and define two fixtures: ``backend``, before ``start``, and ``weights``, the directory of the model that
    it serves, written by ``save_pretrained``.
    """

    def setup(self, weights: Path, directory: Path) -> PolicySetup:
        """Returns what the trainer gives to ``start``."""
        return PolicySetup(model=str(weights), model_name=MODEL, directory=directory, threads=1)

    @contextlib.asynccontextmanager
    async def started(self, backend: Any, weights: Path, directory: Path) -> AsyncIterator[Any]:
        """Starts the backend, and stops it twice."""
        try:
            with promised("start(setup) returns when the model answers"):
                await backend.start(self.setup(weights, directory))
            yield backend
        finally:
            for _ in range(2):
                with promised("stop() stops what start started; the second time it does nothing"):
                    await backend.stop()

    async def test_it_can_be_stopped_before_it_was_started(self, backend: Any) -> None:
        assert isinstance(backend.tells_versions, bool), "tells_versions is True or False"
        with promised("stop() may be called at any time, also before start"):
            await backend.stop()

    async def test_answers_have_the_tokens_and_log_probabilities_that_were_sampled(
        self, backend: Any, weights: Path, tmp_path: Path
    ) -> None:
        async with self.started(backend, weights, tmp_path):
            entry = backend.model_entry
            missing = {"model", "endpoint"} - set(entry)
            assert not missing, f"model_entry is an entry of the gateway's model list; it lacks {sorted(missing)}"
            name = entry.get("model_name", entry["model"])
            assert name == MODEL, f"agents call the model by setup.model_name, {MODEL!r}, not {name!r}"
            (choice,) = (await sample(entry))["choices"]
            tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
            promise = "with return_token_ids and logprobs, an answer has the sampled tokens and their log-probabilities"
            assert tokens, f"{promise}: token_ids is {tokens}"
            assert logprobs, f"{promise}: token_logprobs is {logprobs}"
            assert len(tokens) == len(logprobs), f"{promise}: {len(tokens)} tokens, {len(logprobs)} log-probabilities"
            assert max(logprobs) <= 1e-6, f"log-probabilities are natural, at most 0: {logprobs}"
            with promised("check() raises nothing while the server works"):
                backend.check()
            totals = await backend.statistics()
            assert all(isinstance(value, (int, float)) for value in totals.values()), (
                f"statistics are numbers: {totals}"
            )

    async def test_new_weights_are_used_and_wrong_ones_refused(
        self, backend: Any, weights: Path, tmp_path: Path
    ) -> None:
        async with self.started(backend, weights, tmp_path):
            with promised("load_weights(path, version) takes what save_pretrained wrote"):
                await backend.load_weights(weights, 3)
            await self._check_version(backend, 3)
            promise = "load_weights raises a ConfigError for a directory without weights of the model"
            with promised(promise):
                try:
                    await backend.load_weights(tmp_path / "nothing", 4)
                except ConfigError:
                    refused = True
                else:
                    refused = False
            assert refused, f"{promise}; it returned"
            await self._check_version(backend, 3)

    async def _check_version(self, backend: Any, version: int) -> None:
        found = (await sample(backend.model_entry)).get("weight_version")
        if backend.tells_versions:
            assert str(found) == str(version), (
                f"if tells_versions is True, each answer has the weight_version of its weights: {found}, not {version}"
            )
