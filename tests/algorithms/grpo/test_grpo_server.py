from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError

from agentlightning.adapter import TraceToTriplet, build_trajectories
from agentlightning.errors import ConfigError, LightningError
from agentlightning_algorithms.grpo.transformers_backend import TransformersBackend
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy_backend import PolicySetup, digest_weights
from tests.algorithms.server_thread import threads_for_servers
from tests.plugins.gateway.gateway_setup import gateway
from tests.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOKENS = {"return_token_ids": True}


def make_setup(model: Path, directory: Path, **options: Any) -> PolicySetup:
    return PolicySetup(model=str(model), model_name="policy", directory=directory, threads=1, **options)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersBackend]:
    server = TransformersBackend()
    with threads_for_servers():
        asyncio.run(server.start(make_setup(tiny_model, tmp_path_factory.mktemp("server"), seed=0, max_batch_size=16)))
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def client(server: TransformersBackend) -> Any:
    async with AsyncOpenAI(base_url=server.endpoint, api_key="none", max_retries=0) as client:
        yield client


async def health(server: TransformersBackend) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(server.endpoint.replace("/v1", "/health")) as response:
        body: dict[str, Any] = await response.json()
        return body


async def idle(server: TransformersBackend) -> None:
    """Waits until nothing is sampled."""

    async def is_idle() -> bool:
        state = await health(server)
        return (state["running"], state["waiting"]) == (0, 0)

    await until(is_idle)


async def test_the_openai_client_gets_tokens_with_the_logprobs_of_the_trainer(
    client: AsyncOpenAI, tiny_policy: Policy
) -> None:
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "x" * length}],
                max_tokens=12,
                temperature=0.8,
                logprobs=True,
                n=2,
                extra_body=TOKENS,
            )
            for length in range(0, 60, 3)
        )
    )
    rows = [
        TrainingRow(answer.prompt_token_ids, choice.token_ids, [e.logprob for e in choice.logprobs.content], 0.0)
        for answer in answers
        for choice in answer.choices
    ]
    assert len(rows) == 40
    for row, score in zip(rows, tiny_policy.score(rows, 0.8), strict=True):
        assert row.logprobs == pytest.approx(score, abs=1e-5)


async def test_a_stream_has_the_same_content_as_a_whole_answer(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 9, "seed": 4, "extra_body": TOKENS}
    whole = await client.chat.completions.create(**fields)
    stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 9
    assert [token for c in chunks for choice in c.choices for token in getattr(choice, "token_ids", [])] == (
        whole.choices[0].token_ids
    )


async def test_tokens_are_sent_as_they_are_sampled(client: AsyncOpenAI, server: TransformersBackend) -> None:
    stream = await client.completions.create(
        model="policy", prompt=[3], max_tokens=500, seed=1, stream=True, extra_body=TOKENS
    )
    chunks = 0
    running = set()
    async for _ in stream:
        chunks += 1
        if chunks < 4:
            running.add((await health(server))["running"])
    assert running == {1}  # the first tokens arrived long before the last one was sampled
    assert chunks > 4


async def test_a_stream_whose_client_disconnects_frees_its_rows(server: TransformersBackend) -> None:
    body = {"model": "policy", "prompt": [3], "max_tokens": 500, "seed": 1, "n": 4, "stream": True}
    url = f"{server.endpoint}/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        await response.content.readany()
    await idle(server)


async def test_a_stream_that_fails_reports_the_error(
    client: AsyncOpenAI, server: TransformersBackend, tiny_model: Path, tmp_path: Path
) -> None:
    broken = load_policy(tiny_model)
    with torch.no_grad():
        next(broken.model.parameters()).fill_(torch.nan)
    broken.save(tmp_path)
    before = (await health(server))["weight_version"]
    await server.load_weights(tmp_path, 13)
    with pytest.raises(InternalServerError, match="weights version 13 are not finite"):
        await client.completions.create(model="policy", prompt=[3], max_tokens=5, stream=True)
    await server.load_weights(tiny_model, before)


async def test_no_answer_mixes_weight_versions_when_weights_change_often(
    client: AsyncOpenAI, server: TransformersBackend, tiny_model: Path, tmp_path: Path
) -> None:
    policies = {}
    before = (await health(server))["weight_version"]
    for version in (100, 101, 102):
        policy = load_policy(tiny_model)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1 + (version - 99) / 20)  # larger weights round by more than the tolerance below
        policy.save(tmp_path / str(version))
        policies[version] = policy
    await server.load_weights(tmp_path / "100", 100)
    swaps_done = asyncio.Event()
    rows: list[tuple[int, TrainingRow]] = []

    async def talk(number: int) -> None:
        while not swaps_done.is_set():
            prompt = [number] * (
                20 + number
            )  # long enough for the prefix cache, whose blocks must not be used with the next weights
            stream = await client.completions.create(
                model="policy", prompt=prompt, max_tokens=40, logprobs=0, stream=True, extra_body=TOKENS
            )
            chunks = [chunk async for chunk in stream]
            versions = {chunk.weight_version for chunk in chunks}
            assert len(versions) == 1
            ids = [token for c in chunks for choice in c.choices for token in getattr(choice, "token_ids", [])]
            logprobs = [p for c in chunks for x in c.choices if x.logprobs for p in x.logprobs.token_logprobs or []]
            rows.append((versions.pop(), TrainingRow(prompt, ids, logprobs, 0.0)))

    async def swap() -> None:
        for version in (101, 102, 100, 101, 102):
            await asyncio.sleep(0.05)
            await server.load_weights(tmp_path / str(version), version)
        swaps_done.set()

    await asyncio.gather(swap(), *(talk(number) for number in range(1, 9)))
    await server.load_weights(tiny_model, before)
    assert {version for version, _ in rows} == {100, 101, 102}
    for version, policy in policies.items():
        mine = [row for number, row in rows if number == version]
        for row, score in zip(mine, policy.score(mine), strict=True):
            assert row.logprobs == pytest.approx(score, abs=1e-5)


async def test_each_turn_of_a_conversation_continues_the_tokens_of_earlier_turns(
    client: AsyncOpenAI, server: TransformersBackend, tiny_policy: Policy
) -> None:
    before = await server.statistics()
    messages: list[Any] = list(HELLO)
    known: list[int] = []
    for turn in range(3):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=20, seed=turn, stream=False, extra_body=TOKENS
        )
        prompt_ids = answer.prompt_token_ids
        assert prompt_ids[: len(known)] == known
        details: Any = answer.usage.prompt_tokens_details
        assert details.continued_tokens == len(known)
        assert details.cached_tokens >= (len(known) - 1) // 16 * 16
        known = [*prompt_ids, *answer.choices[0].token_ids]
        messages += [answer.choices[0].message, {"role": "user", "content": f"and {turn}?"}]
    after = await server.statistics()
    assert after["prompts_continued"] - before["prompts_continued"] == 2
    assert after["reused_tokens"] > before["reused_tokens"]


async def test_the_tokens_that_begin_a_forced_call_are_recorded_as_forced_and_not_trained_on(
    server: TransformersBackend, tiny_policy: Policy
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with gateway(model_list=[{"model_name": "m", **server.model_entry}]) as case:
        rollout, client = await case.start()
        for choice in ("auto", "required"):
            answer = await client.chat.completions.create(
                model="m", messages=HELLO, tools=tools, tool_choice=choice, max_tokens=8, seed=1
            )
        await case.proxy.flush()
        free, forced = await case.spans(rollout)
    begun = '<tool_call>\n{"name": "add", "arguments":'
    n_forced = forced.attributes["agentlightning.gateway.forced_tokens"]
    assert "agentlightning.gateway.forced_tokens" not in free.attributes
    assert str(answer.choices[0].message.content).startswith(begun), "the random model completes no call"
    assert forced.attributes["agentlightning.gateway.tool_calls_unparsed"] == 1
    ids = forced.attributes["prompt_token_ids"]
    assert list(ids[:-n_forced]) == list(free.attributes["prompt_token_ids"])
    assert tiny_policy.tokenizer.decode(list(ids[-n_forced:])) == begun
    [trajectory] = build_trajectories(TraceToTriplet().adapt([forced])).trajectories
    assert trajectory.mask == [0] * len(ids) + [1] * 8
    row = TrainingRow(ids, trajectory.ids[len(ids) :], [0.0] * 8, 1.0)
    assert trajectory.logprobs[len(ids) :] == pytest.approx(tiny_policy.score([row])[0], abs=1e-4)


async def test_an_equal_seed_repeats_a_response_and_a_stop_string_ends_it(client: AsyncOpenAI) -> None:
    async def complete(**fields: Any) -> Any:
        return await client.completions.create(model="policy", prompt=[1, 2, 3], max_tokens=40, **fields)

    first, again, other = await asyncio.gather(complete(seed=1), complete(seed=1), complete(seed=2))
    assert first.choices[0].text == again.choices[0].text != other.choices[0].text
    stop = next(char for char in first.choices[0].text if char.isascii() and char.isprintable())
    stopped = await complete(seed=1, stop=stop)
    assert stopped.choices[0].text == first.choices[0].text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"


async def test_errors_have_openais_format(client: AsyncOpenAI, server: TransformersBackend) -> None:
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="policy", messages=HELLO, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert missing.value.code == "model_not_found"
    async with aiohttp.ClientSession() as session:
        for method, path, status in [
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/completions", 400),
            ("POST", "/weights", 400),
        ]:
            url = server.endpoint.removesuffix("/v1") + path
            async with session.request(
                method, url, data=b"{}", headers={"Authorization": f"Bearer {server._key}"}
            ) as response:
                body = await response.json()
                assert (response.status, body["error"]["type"]) == (status, "invalid_request_error")


async def test_models_and_health_are_reported(client: AsyncOpenAI, server: TransformersBackend) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["policy"]
    state = await health(server)
    assert (state["status"], state["running"], state["waiting"]) == ("ok", 0, 0)


async def test_answers_carry_the_weight_version(
    client: AsyncOpenAI, server: TransformersBackend, tiny_model: Path, tmp_path: Path
) -> None:
    moved = load_policy(tiny_model)
    with torch.no_grad():
        for parameter in moved.model.parameters():
            parameter.mul_(1.2)
    moved.save(tmp_path)
    before = (await health(server))["weight_version"]

    async def ask() -> tuple[str | None, Any]:
        raw = await client.completions.with_raw_response.create(
            model="policy", prompt=[7], max_tokens=8, logprobs=0, extra_body=TOKENS
        )
        return raw.headers.get("x-weight-version"), raw.parse()

    assert (await ask())[0] == str(before)
    await server.load_weights(tmp_path, 41)
    header, answer = await ask()
    assert (header, answer.weight_version) == ("41", 41)
    choice = answer.choices[0]
    (score,) = moved.score([TrainingRow([7], choice.token_ids, [], 0.0)])
    assert choice.logprobs.token_logprobs == pytest.approx(score, abs=1e-5)
    with pytest.raises(ConfigError, match=r"refused weights version 42: no \*.safetensors"):
        await server.load_weights(tmp_path / "nothing", 42)
    assert (await ask())[0] == "41"
    await server.load_weights(tiny_model, before)


async def test_weights_are_replaced_only_with_the_key_and_only_by_weights_with_the_right_digest(
    server: TransformersBackend, tiny_model: Path, tmp_path: Path
) -> None:
    root = server.endpoint.removesuffix("/v1")
    load_policy(tiny_model).save(tmp_path)
    zero = load_policy(tiny_model)
    with torch.no_grad():
        for parameter in zero.model.parameters():
            parameter.zero_()
    zero.save(tmp_path / "zero")
    before = await health(server)
    foreign = {"path": str(tmp_path / "zero"), "version": 77}
    known = {"Authorization": f"Bearer {server._key}"}
    async with aiohttp.ClientSession() as session:

        async def post(body: Any, headers: dict[str, str]) -> int:
            async with session.post(f"{root}/weights", json=body, headers=headers) as response:
                return response.status

        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer guess"}):
            assert await post(foreign, headers) == 401
        for headers in ({"Host": "rebound.example"}, {"Origin": "http://evil.example"}):
            assert await post(foreign, known | headers) == 403
            async with session.post(f"{root}/v1/completions", json={"prompt": [1]}, headers=headers) as response:
                assert response.status == 403
        assert await post(foreign | {"digest": digest_weights(tmp_path)}, known) == 400
        assert await health(server) == before
        await server.load_weights(tmp_path, 41)
        await server.statistics()
        assert await post(foreign | {"version": 41}, known) == 200
    with pytest.raises(LightningError, match="another program replaced them"):
        await server.statistics()
    await server.load_weights(tiny_model, before["weight_version"])
    await server.statistics()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", 400),
        (b'{"prompt": [' + b"1," * 600_000 + b"1]}", 413),
        (b'{"messages": [' + b'{"role":"user"},' * 300_000 + b"{}]}", 413),
        (b'{"prompt": [-1]}', 400),
        (b'{"prompt": 1e400}', 400),
        (b"\xff", 400),
    ],
)
async def test_a_malformed_or_too_large_body_is_refused(server: TransformersBackend, body: bytes, status: int) -> None:
    url = f"{server.endpoint}/completions"
    async with aiohttp.ClientSession() as session, session.post(url, data=io.BytesIO(body)) as response:
        assert response.status == status
        answer = await response.json()
    assert answer["error"]["message"]
    assert (await health(server))["status"] == "ok"


async def test_the_last_value_of_a_repeated_json_key_counts(server: TransformersBackend) -> None:
    url = f"{server.endpoint}/completions"
    body = io.BytesIO(b'{"prompt": [1], "max_tokens": 1, "max_tokens": 2, "seed": 1}')
    async with aiohttp.ClientSession() as session, session.post(url, data=body) as response:
        assert response.status == 200
        assert (await response.json())["usage"]["completion_tokens"] == 2


async def test_health_is_answered_while_the_model_runs(client: AsyncOpenAI, server: TransformersBackend) -> None:
    tasks = [
        asyncio.create_task(client.completions.create(model="policy", prompt=[1], max_tokens=500, seed=i))
        for i in range(16)
    ]
    answered = 0
    while not all(task.done() for task in tasks):
        answered += (await health(server))["running"] > 0
    await asyncio.gather(*tasks)
    assert answered > 3


async def test_a_client_that_disconnects_frees_its_rows(server: TransformersBackend) -> None:
    body = {"prompt": [1], "max_tokens": 500, "n": 32}
    async with aiohttp.ClientSession() as session:
        with pytest.raises(TimeoutError):
            await session.post(f"{server.endpoint}/completions", json=body, timeout=aiohttp.ClientTimeout(total=0.05))
    await idle(server)


async def test_a_server_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    server = TransformersBackend()
    with pytest.raises(LightningError, match="ended with exit status 2") as caught:
        await server.start(make_setup(tmp_path, tmp_path / "logs"))
    assert "cannot load a causal language model" in str(caught.value)
    assert not server.running
    with pytest.raises(LightningError, match="not running"):
        _ = server.endpoint
    await server.stop()


async def test_a_server_that_takes_too_long_to_start_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    server = TransformersBackend(ready_timeout_s=0.05)
    with pytest.raises(LightningError, match=r"was not ready after 0.05 s"):
        await server.start(make_setup(tiny_model, tmp_path))
    assert not server.running
