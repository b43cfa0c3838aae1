from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.errors import ConfigError, LightningError
from agentlightning.plugin.registry import PluginManager
from agentlightning.testing.policy_backend import PolicyBackendConformance
from agentlightning_algorithms.grpo import transformers_backend
from agentlightning_algorithms.grpo.transformers_backend import TransformersBackend
from agentlightning_algorithms.grpo.vllm_backend import VLLMBackend
from agentlightning_algorithms.shared.policy_backend import PolicyBackend, PolicySetup, publish_weights, serve_models
from tests.algorithms.server_thread import threads_for_servers
from tests.algorithms.vllm_server import WIRE, FakeVLLM
from tests.http_site import serving
from tests.planted import assert_each_test_finds_one
from tests.waiting import until


@pytest.fixture
def setup(tmp_path: Path) -> PolicySetup:
    return PolicySetup(model="unused", model_name="policy", directory=tmp_path)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    directory = tmp_path / "weights"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_both_backends_are_components_with_checked_settings() -> None:
    manager = PluginManager()
    backends: list[PolicyBackend] = [
        manager.create("policy_backend", "transformers"),
        manager.create("policy_backend", {"name": "vllm", "endpoint": "http://127.0.0.1:9/v1", "served_model": "x"}),
    ]
    assert [type(backend) for backend in backends] == [TransformersBackend, VLLMBackend]
    assert [backend.tells_versions for backend in backends] == [True, False]
    with pytest.raises(ConfigError, match="endpont"):
        manager.create("policy_backend", {"name": "vllm", "endpont": "x"})


async def test_the_transformers_backend_starts_its_own_server_which_ends_with_this_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    backend = TransformersBackend(prefix_cache_mb=1)
    with pytest.raises(LightningError, match="not running"):
        _ = backend.model_entry
    await backend.start(
        PolicySetup(model=str(tiny_model), model_name="mine", directory=tmp_path, threads=1, max_batch_size=3)
    )
    try:
        entry = backend.model_entry
        assert entry["model"] == "mine"
        async with aiohttp.ClientSession() as session:
            body = {"model": "mine", "prompt": [1, 2], "max_tokens": 2}
            async with session.post(f"{entry['endpoint']}/completions", json=body) as response:
                assert response.status == 200
        await backend.load_weights(tiny_model, 5)
        assert (await backend.statistics())["swaps"] == 1
        backend.check()
        assert backend._process is not None
        assert backend._process.stdin is not None
        backend._process.stdin.close()  # as the kernel does if this process is killed
        await until(lambda: not backend.running)
        assert backend._process.returncode == 0
        with pytest.raises(LightningError, match="has ended"):
            backend.check()
    finally:
        await backend.stop()


class TestTransformers(PolicyBackendConformance):
    @pytest.fixture
    def backend(self) -> Iterator[TransformersBackend]:
        with threads_for_servers():
            yield TransformersBackend(prefix_cache_mb=1)

    @pytest.fixture
    def weights(self, tiny_model: Path) -> Path:
        return tiny_model


class TestVLLM(PolicyBackendConformance):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[VLLMBackend]:
        async with FakeVLLM() as server:
            yield VLLMBackend(endpoint=server.endpoint)


class NeedsToBeStarted(VLLMBackend):
    async def stop(self) -> None:
        assert self._model_name


class StopsOnce(VLLMBackend):
    async def stop(self) -> None:
        if self._is_loaded is None:
            raise LightningError("it does not run")
        self._is_loaded = None


class HidesItsEndpoint(VLLMBackend):
    @property
    def model_entry(self) -> Mapping[str, Any]:
        return {name: value for name, value in super().model_entry.items() if name != "endpoint"}


class CountsInText(VLLMBackend):
    async def statistics(self) -> Mapping[str, Any]:
        return {"calls": "many"}


class IsNeverWell(VLLMBackend):
    def check(self) -> None:
        raise LightningError("the server has ended")


class AcceptsAnyWeights(VLLMBackend):
    async def load_weights(self, path: Path, version: int) -> None:
        with contextlib.suppress(ConfigError):
            await super().load_weights(path, version)


class ClaimsToTellVersions(VLLMBackend):
    tells_versions = True


class RaisesItsOwnErrors(VLLMBackend):
    async def load_weights(self, path: Path, version: int) -> None:
        if path.name == "nothing":
            raise FileNotFoundError(path)


PLANTED = [
    (NeedsToBeStarted, "test_it_can_be_stopped_before_it_was_started", "stop() may be called at any time"),
    (StopsOnce, "test_answers_have_the_tokens_and_log_probabilities_that_were_sampled", "the second time it does"),
    (HidesItsEndpoint, "test_answers_have_the_tokens_and_log_probabilities_that_were_sampled", "lacks ['endpoint']"),
    (CountsInText, "test_answers_have_the_tokens_and_log_probabilities_that_were_sampled", "statistics are numbers"),
    (IsNeverWell, "test_answers_have_the_tokens_and_log_probabilities_that_were_sampled", "check() raises nothing"),
    (AcceptsAnyWeights, "test_new_weights_are_used_and_wrong_ones_refused", "it returned"),
    (ClaimsToTellVersions, "test_new_weights_are_used_and_wrong_ones_refused", "if tells_versions is True"),
    (RaisesItsOwnErrors, "test_new_weights_are_used_and_wrong_ones_refused", "it raised FileNotFoundError"),
]


@pytest.mark.parametrize(("backend_type", "test", "message"), PLANTED, ids=[planted[0].__name__ for planted in PLANTED])
async def test_the_kit_finds_a_planted_mistake(
    backend_type: type[VLLMBackend], test: str, message: str, weights: Path, tmp_path: Path
) -> None:
    given = {"weights": weights, "tmp_path": tmp_path} if "stopped" not in test else {}
    async with FakeVLLM() as server:
        with pytest.raises(AssertionError) as failure:
            await getattr(PolicyBackendConformance(), test)(backend_type(endpoint=server.endpoint), **given)
    assert message in str(failure.value)


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(PolicyBackendConformance, [test for _, test, _ in PLANTED])


async def test_a_policy_server_that_crashes_is_started_again_with_the_newest_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_backend, "_MAX_RESTARTS", 2)
    backend = TransformersBackend(prefix_cache_mb=1)
    await backend.start(PolicySetup(model=str(tiny_model), model_name="mine", directory=tmp_path, threads=1))
    try:
        endpoint = backend.endpoint
        await backend.load_weights(tiny_model, 5)
        assert (await backend.statistics())["swaps"] == 1
        async with aiohttp.ClientSession() as session:
            for n_crashes in (1, 2):
                assert backend._process is not None
                backend._process.kill()
                await asyncio.to_thread(backend._process.wait)
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"{endpoint}/models")
                backend.check()
                assert not backend.running
                if n_crashes == 1:
                    await until(lambda: backend.running)
                    body = {"model": "mine", "prompt": [1, 2], "max_tokens": 2}
                    async with session.post(f"{endpoint}/completions", json=body) as response:
                        assert (await response.json())["weight_version"] == 5
                assert (await backend.statistics())["swaps"] == n_crashes + 1, "the counts of earlier servers are kept"
                assert backend.running
        backend._process.kill()
        await asyncio.to_thread(backend._process.wait)
        with pytest.raises(LightningError, match="has ended"):
            await backend.load_weights(tiny_model, 6)
    finally:
        await backend.stop()


async def test_vllm_reloads_weights_while_it_is_paused(setup: PolicySetup, weights: Path) -> None:
    async with FakeVLLM() as server:
        server.api_key = "secret"
        backend = VLLMBackend(endpoint=server.endpoint, api_key="secret")
        await backend.start(setup)
        assert backend.model_entry == {
            "model_name": "policy",
            "model": "policy",
            "endpoint": server.endpoint,
            "provider": "vllm",
            "api_key": "secret",
        }
        server.asked.clear()
        await backend.load_weights(weights, 3)
        kwargs = {"weights_path": str(weights), "is_checkpoint_format": True}
        assert server.asked == [
            ("/pause?mode=wait", None),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}),
            ("/resume", None),
        ]
        assert not server.paused


async def test_vllm_resumes_with_the_old_weights_when_new_ones_cannot_be_read(
    setup: PolicySetup, tmp_path: Path
) -> None:
    async with FakeVLLM() as server:
        backend = VLLMBackend(endpoint=server.endpoint)
        await backend.start(setup)
        with pytest.raises(
            ConfigError, match=r"refused weights version 3 \(status 500\): Cannot find any model weights"
        ):
            await backend.load_weights(tmp_path / "nothing", 3)
        assert not server.paused
        directories = [body["kwargs"]["weights_path"] for path, body in server.asked if path == "/collective_rpc"]
        assert directories == [str(tmp_path / "nothing"), WIRE["models"]["data"][0]["root"]]


async def test_tied_embeddings_are_refused_by_a_vllm_server_on_a_cpu(setup: PolicySetup, weights: Path) -> None:
    (weights / "config.json").write_text('{"tie_word_embeddings": true}')
    for device in ("cuda", "cpu"):
        async with FakeVLLM(device=device) as server:
            backend = VLLMBackend(endpoint=server.endpoint)
            await backend.start(setup)
            refused = pytest.raises(ConfigError, match="tie_word_embeddings.*backend: transformers")
            with refused if device == "cpu" else contextlib.nullcontext():
                await backend.load_weights(weights, 1)


async def test_the_check_of_log_probabilities_samples_from_the_whole_distribution(setup: PolicySetup) -> None:
    async with FakeVLLM() as server:
        await VLLMBackend(endpoint=server.endpoint).start(setup)
        probes = [body for path, body in server.asked if path == "/v1/completions"]
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert [{name: body.get(name) for name in neutral} for body in probes] == [neutral] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"token_ids": False}, "return_token_ids"),
    ],
)
async def test_a_missing_vllm_option_is_an_error_that_names_it(
    setup: PolicySetup, options: dict[str, Any], message: str
) -> None:
    async with FakeVLLM(**options) as server:
        with pytest.raises(ConfigError, match=message):
            await VLLMBackend(endpoint=server.endpoint).start(setup)


async def test_a_vllm_server_with_another_model_is_refused(setup: PolicySetup) -> None:
    async with FakeVLLM() as server:
        with pytest.raises(ConfigError, match="has no model 'qwen'.* --served-model-name qwen, or set served_model"):
            await VLLMBackend(endpoint=server.endpoint, served_model="qwen").start(setup)


async def test_an_unreachable_vllm_server_is_an_error_with_its_address(setup: PolicySetup) -> None:
    with pytest.raises(LightningError, match=r"vLLM server at http://127.0.0.1:9/v1 does not answer /v1/models"):
        await VLLMBackend(endpoint="http://127.0.0.1:9/v1").start(setup)


async def test_a_vllm_server_that_was_left_paused_is_resumed(setup: PolicySetup) -> None:
    async with FakeVLLM() as server:
        server.paused = True
        await VLLMBackend(endpoint=server.endpoint).start(setup)
        assert not server.paused


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_and_logprobs_of_a_vllm_tool_call_are_recorded(stream: bool) -> None:
    """Most tokens of the stream are in chunks without text, because the tool parser is still waiting."""
    store = agl.InMemoryLightningStore()
    async with FakeVLLM() as server, AsyncOpenAI(api_key="x", base_url="http://unused", max_retries=0) as client:
        model = {"model_name": "policy", "model": "policy", "endpoint": server.endpoint, "provider": "vllm"}
        gateway = agl.LLMProxy(model_list=[model], store=store)
        await gateway.start()
        try:
            rollout = await store.start_rollout({})
            llm: Any = gateway.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, model="policy")
            chat = client.with_options(base_url=llm.get_base_url(), api_key=llm.api_key).chat.completions
            messages: Any = [{"role": "user", "content": "Add 2 and 3."}]
            if stream:
                async for _ in await chat.create(model="policy", messages=messages, stream=True):
                    pass
            else:
                await chat.create(model="policy", messages=messages)
            await gateway.flush()
            (span,) = (await store.query_spans(rollout.rollout_id)).items
        finally:
            await gateway.stop()
    answer = WIRE["chat"]
    (choice,) = answer["choices"]
    (triplet,) = agl.TraceToTriplet().adapt([span])
    assert triplet.prompt["token_ids"] == answer["prompt_token_ids"]
    assert triplet.response["token_ids"] == choice["token_ids"]
    assert triplet.response["logprobs"] == [token["logprob"] for token in choice["logprobs"]["content"]]
    assert triplet.metadata["finish_reason"] == "tool_calls"
    assert triplet.metadata["complete"] is True
    (call,) = triplet.response["raw_content"][0]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", '{"a": 2, "b": 3}')


# Publishing through the gateway


def test_models_of_an_algorithm_replace_only_models_of_the_same_name() -> None:
    old = {"model_name": "policy", "model": "old", "endpoint": "http://127.0.0.1:9/v1"}
    other = {"model": "other", "endpoint": "http://127.0.0.1:9/v1"}
    new = [{"model": "policy", "endpoint": f"http://127.0.0.1:{port}/v1"} for port in (7, 8)]
    gateway = agl.LLMProxy(model_list=[old, other])
    serve_models(gateway, new)
    assert list(gateway.model_list) == [*new, other]


class Model:
    """A model server and its backend: a call ends when it is released, and new weights show whether it has ended."""

    def __init__(self, *, tells_versions: bool) -> None:
        self.tells_versions = tells_versions
        self.asked, self.released = asyncio.Event(), asyncio.Event()
        self.ended_before_new_weights: bool | None = None
        self._has_ended = False

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.set()
        await self.released.wait()
        self._has_ended = True
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "model": "policy", "choices": [choice]})

    async def load_weights(self, path: Path, version: int) -> None:
        if version < 0:
            raise ConfigError("not these")
        self.ended_before_new_weights = self._has_ended


@pytest.mark.parametrize("tells_versions", [True, False])
async def test_calls_are_held_back_only_for_a_backend_that_could_mix_versions(
    tells_versions: bool, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()
    model: Any = Model(tells_versions=tells_versions)
    async with serving(web.post("/v1/chat/completions", model.answer)) as address:
        gateway = agl.LLMProxy(model_list=[{"model": "policy", "endpoint": f"{address}/v1"}], store=store)
        await gateway.start()
        try:
            rollout = await store.start_rollout({})
            resource: Any = gateway.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, model="policy")

            async def call() -> None:
                body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
                headers = {"Authorization": f"Bearer {resource.api_key}"}
                async with (
                    aiohttp.ClientSession(headers=headers) as session,
                    session.post(f"{resource.get_base_url()}/chat/completions", json=body) as response,
                ):
                    assert response.status == 200
                    await response.read()

            calling = asyncio.create_task(call())
            await model.asked.wait()
            publishing = asyncio.create_task(publish_weights(model, gateway, tmp_path, 4))
            await asyncio.sleep(0.05)
            model.released.set()
            await publishing
            assert model.ended_before_new_weights is not tells_versions
            await calling
            with pytest.raises(ConfigError, match="not these"):
                await publish_weights(model, gateway, tmp_path, -1)
            await call()  # calls continue after a failure
            await gateway.flush()
            spans = await store.query_spans(rollout.rollout_id)
            versions = [span.attributes.get("agentlightning.weight_version") for span in spans.items]
            assert versions == ([None, None] if tells_versions else [None, 4])
        finally:
            await gateway.stop()
