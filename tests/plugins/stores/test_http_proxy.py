"""The HTTP store behind a real nginx: with its defaults, below a path, and with buffering that cannot be turned off."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from agentlightning.event import RolloutEnqueued
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.stores.http.client import LightningStoreClient, connection
from agentlightning_plugins.stores.http.server import events
from tests.nginx import running_nginx
from tests.plugins.stores.served import serve

pytestmark = pytest.mark.environment("main")  # about proxies, not about versions of libraries

LOCATIONS = """
    location /defaults/ {{ proxy_pass {0}/; }}
    location /buffering/ {{ proxy_pass {0}/; proxy_ignore_headers X-Accel-Buffering; }}
"""


async def receive_three_events(client: LightningStoreClient, store: LightningStore) -> float:
    """Opens a subscription, receives three events and returns the longest delay of an event in seconds."""
    received = client.subscribe(["rollout_enqueued"])
    longest_s = 0.0
    following = asyncio.ensure_future(anext(received))
    await asyncio.sleep(0)
    await client.statistics()  # waits until the subscription is open
    for _ in range(3):
        enqueued_at = time.monotonic()
        rollout = await store.enqueue_rollout("task")
        event = await following
        longest_s = max(longest_s, time.monotonic() - enqueued_at)
        assert isinstance(event, RolloutEnqueued)
        assert event.rollout_id == rollout.rollout_id
        following = asyncio.ensure_future(anext(received))
    following.cancel()
    return longest_s


async def test_events_pass_through_nginx_with_default_settings_without_delay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve("secret") as (server, store):
        with running_nginx(tmp_path, LOCATIONS.format(server.endpoint)) as url:
            client = LightningStoreClient(f"{url}/defaults", "secret")
            assert await receive_three_events(client, store) < 2
            await client.close()
    assert "proxy" not in caplog.text


async def test_the_client_polls_for_events_when_a_proxy_buffers_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agentlightning")
    monkeypatch.setattr(connection, "_SILENCE_S", 1.0)
    monkeypatch.setattr(connection, "_POLL_S", 0.3)  # so that polls without events are part of the test
    async with serve("secret") as (server, store):
        with running_nginx(tmp_path, LOCATIONS.format(server.endpoint)) as url:
            client = LightningStoreClient(f"{url}/buffering", "secret")
            assert await receive_three_events(client, store) < 2
            await asyncio.sleep(1)
            await receive_three_events(client, store)  # the next subscription polls from its start
            claimed = await asyncio.gather(*(client.dequeue_rollout(f"worker {number}") for number in range(6)))
            assert all(claimed)
            await client.close()
    warnings = [record.message for record in caplog.records if "proxy" in record.message]
    assert len(warnings) == 1
    assert "proxy_buffering off" in warnings[0]


async def test_an_idle_stream_stays_open_thanks_to_keepalive_comments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_S", 1.5)
    monkeypatch.setattr(events, "KEEPALIVE_S", 0.2)
    async with serve() as (server, store):
        client = LightningStoreClient(server.endpoint)
        following = asyncio.ensure_future(anext(client.subscribe(["rollout_enqueued"])))
        await asyncio.sleep(3)
        await store.enqueue_rollout("task")
        assert (await following).kind == "rollout_enqueued"
        await client.close()
    assert caplog.messages == [], "the client neither reconnects nor polls"
