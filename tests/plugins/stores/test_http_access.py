"""Access control of the store server by tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.run import attempt_token
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.http.server.openapi import describe
from agentlightning_plugins.stores.http.server.routes import ROUTES
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.stores.served import ask, claim, serve

TOKEN = "a-token-of-this-test"
AGL = "/v1/agl"


def token_for(rollout: AttemptedRollout, *, store_token: str = TOKEN, lifetime_s: float = 3600) -> str:
    secret = attempt_token.derive_secret(store_token)
    return attempt_token.mint(secret, rollout.rollout_id, rollout.attempt.attempt_id, time.time() + lifetime_s)


def reward_of(rollout: AttemptedRollout) -> Span:
    return Span.from_attributes(
        name="agentlightning.reward",
        attributes={"agentlightning.reward.0.name": "reward", "agentlightning.reward.0.value": 1.0},
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
    )


async def test_the_token_of_an_attempt_allows_its_agent_to_write_spans_and_the_reward() -> None:
    async with serve(TOKEN) as (server, store):
        mine = await claim(store)
        runner = LightningStoreClient(server.endpoint, TOKEN)
        token = runner.attempt_token(mine.rollout_id, mine.attempt.attempt_id)
        agent = LightningStoreClient(server.endpoint, token)
        rollout = await agent.get_rollout_by_id(mine.rollout_id)
        assert rollout is not None
        assert rollout.input == "task"
        assert await agent.get_next_span_sequence_id(mine.rollout_id, mine.attempt.attempt_id) == 1
        assert await agent.add_span(reward_of(mine)) is not None
        assert len(await agent.add_many_spans([reward_of(mine), reward_of(mine)])) == 2
        assert len(await store.query_spans(mine.rollout_id)) == 3
        await agent.close()
        await runner.close()


def _about_another(other: AttemptedRollout) -> list[tuple[str, str, Any]]:
    """Requests that an attempt's token would allow if they were about that attempt."""
    span = reward_of(other).model_dump(mode="json")
    ids = {"rollout_id": other.rollout_id, "attempt_id": other.attempt.attempt_id}
    return [
        ("GET", f"/rollouts/{other.rollout_id}", None),
        ("POST", "/spans", span),
        ("POST", "/spans/batch", {"spans": [span]}),
        ("POST", "/spans/next", ids),
        ("POST", "/spans/next/batch", {"rollout_attempt_ids": [list(ids.values())]}),
    ]


async def test_the_token_of_an_attempt_allows_only_requests_about_this_attempt() -> None:
    async with serve(TOKEN) as (server, store):
        mine, other = await claim(store), await claim(store)
        before = await store.statistics(), list(await store.query_rollouts())
        token = token_for(mine)
        asked = set()
        for method, path, body in _about_another(other):
            status, answer = await ask(server, method, AGL + path, body, token=token)
            assert (status, answer["code"]) == (403, "forbidden"), path
            asked.add((method, path.replace(other.rollout_id, "{rollout_id}")))
        both = {"spans": [reward_of(rollout).model_dump(mode="json") for rollout in (mine, other)]}
        assert (await ask(server, "POST", AGL + "/spans/batch", both, token=token))[0] == 403

        ids = {"rollout_id": mine.rollout_id, "attempt_id": mine.attempt.attempt_id}
        valid: dict[str, Any] = {"/rollouts/search": {}, "/rollouts/delete": {"rollout_ids": []}, "/spans/search": {}}
        for route in ROUTES:
            if (route.method, route.path) in asked:
                continue
            path = route.path.format(**ids, worker_id="w", resources_id="rs-1", run_id="default")
            status, _ = await ask(server, route.method, AGL + path, valid.get(route.path, {}), token=token)
            assert status in (403, 422), (route.method, route.path)  # 422: the body was validated first
            assert not route.for_attempts
        for path in ("/metrics", "/openapi.json", AGL + "/events"):
            assert (await ask(server, "GET", path, token=token))[0] == 403
        after = await store.statistics(), list(await store.query_rollouts())
        assert {**before[0], "uptime": 0} == {**after[0], "uptime": 0}
        assert before[1] == after[1]


async def test_forged_altered_and_expired_tokens_are_refused() -> None:
    async with serve(TOKEN) as (server, store):
        mine, other = await claim(store), await claim(store)
        good, theirs = token_for(mine), token_for(other)
        payload, _, signature = good.partition(".")
        wrong = [
            token_for(mine, store_token="another"),
            token_for(mine, lifetime_s=-1),
            good[:-1],
            good + "A",
            payload,
            f"{theirs.partition('.')[0]}.{signature}",
            attempt_token.PREFIX,
            attempt_token.PREFIX + "\xe9.\xe9",
            TOKEN[:-1],
            "",
        ]
        for token in wrong:
            status, answer = await ask(server, "GET", f"{AGL}/rollouts/{mine.rollout_id}", token=token)
            assert (status, answer["code"]) == (401, "unauthorized"), token
            assert TOKEN not in answer["message"]
        assert (await ask(server, "GET", f"{AGL}/rollouts/{mine.rollout_id}", token=good))[0] == 200


async def test_holders_of_the_full_token_mint_tokens_for_attempts() -> None:
    async with serve(TOKEN) as (server, store):
        mine = await claim(store)
        path = f"{AGL}/rollouts/{mine.rollout_id}/attempts/%s/token"
        for attempt_id in (mine.attempt.attempt_id, "latest"):
            begun = time.time()
            status, minted = await ask(server, "POST", path % attempt_id, {"lifetime_s": 3600}, token=TOKEN)
            assert status == 201
            assert (minted["rollout_id"], minted["attempt_id"]) == (mine.rollout_id, mine.attempt.attempt_id)
            answered = time.time()
            assert begun + 3600 <= minted["expires_at"] <= answered + 3600
            assert (await ask(server, "GET", f"{AGL}/rollouts/{mine.rollout_id}", token=minted["token"]))[0] == 200
            assert (await ask(server, "POST", path % attempt_id, {}, token=minted["token"]))[0] == 403
        assert (await ask(server, "POST", path % "at-0", {}, token=TOKEN))[0] == 404
        assert (await ask(server, "POST", path % "latest", {"lifetime_s": 0}, token=TOKEN))[0] == 422
    async with serve() as (server, store):
        mine = await claim(store)
        path = f"{AGL}/rollouts/{mine.rollout_id}/attempts/latest/token"
        assert (await ask(server, "POST", path, {}))[0] == 409


async def test_a_client_without_a_token_gives_agents_no_attempt_token() -> None:
    async with serve() as (server, _):
        client = LightningStoreClient(server.endpoint)
        assert client.url == server.endpoint
        assert client.attempt_token("ro-1", "at-1") is None


async def test_requests_without_a_token_reach_only_health_and_probes() -> None:
    async with serve(TOKEN) as (server, _):
        paths = describe(ROUTES, {})["paths"]
        for path in (AGL + "/health", "/livez", "/readyz"):
            assert (await ask(server, "GET", path))[0] == 200
        for path in {*paths, "/metrics", "/openapi.json", AGL + "/events", "/v1/traces"} - {AGL + "/health"}:
            for method in ("GET", "POST"):
                assert (await ask(server, method, path))[0] == 401


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_token_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        LightningStoreServer(InMemoryLightningStore(), token=token)
