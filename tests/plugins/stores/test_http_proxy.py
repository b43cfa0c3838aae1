"""The HTTP store behind a real nginx: with its defaults, below a path, and with buffering that cannot be turned off."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

from agentlightning.errors import StoreError
from agentlightning.event import RolloutEnqueued
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.stores.http.client import LightningStoreClient, connection
from agentlightning_plugins.stores.http.server import events
from tests.failures import check_messages
from tests.nginx import running_nginx
from tests.plugins.stores.served import serve
from tests.port import reserve_port
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main")  # about proxies, not about versions of libraries

LOCATIONS = """
    location /defaults/ {{ proxy_pass {0}/; }}
    location /buffering/ {{ proxy_pass {0}/; proxy_ignore_headers X-Accel-Buffering; }}
"""


async def receive_three_events(client: LightningStoreClient, store: LightningStore) -> None:
    """Opens a subscription and receives three events, each before the next one is published."""
    received = client.subscribe(["rollout_enqueued"])
    following = asyncio.ensure_future(anext(received))
    await asyncio.sleep(0)
    await client.statistics()  # waits until the subscription is open
    for _ in range(3):
        rollout = await store.enqueue_rollout("task")
        event = await following
        assert isinstance(event, RolloutEnqueued)
        assert event.rollout_id == rollout.rollout_id
        following = asyncio.ensure_future(anext(received))
    following.cancel()


async def test_events_pass_through_nginx_with_default_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_S", LIMIT_S)  # so that the client does not poll
    async with serve("secret") as (server, store):
        with running_nginx(tmp_path, LOCATIONS.format(server.endpoint)) as url:
            client = LightningStoreClient(f"{url}/defaults", "secret")
            await receive_three_events(client, store)
            await client.close()
    assert "proxy" not in caplog.text


async def test_the_client_polls_for_events_when_a_proxy_buffers_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agentlightning")
    monkeypatch.setattr(connection, "_SILENCE_S", 0.5)
    monkeypatch.setattr(connection, "_POLL_S", 0.1)  # so that polls without events are part of the test
    async with serve("secret") as (server, store):
        with running_nginx(tmp_path, LOCATIONS.format(server.endpoint)) as url:
            client = LightningStoreClient(f"{url}/buffering", "secret")
            await receive_three_events(client, store)
            await asyncio.sleep(0.3)
            await receive_three_events(client, store)  # the next subscription polls from its start
            claimed = await asyncio.gather(*(client.dequeue_rollout(f"worker {number}") for number in range(6)))
            assert all(claimed)
            await client.close()
    warnings = [record.message for record in caplog.records if "proxy" in record.message]
    assert len(warnings) == 1
    assert "proxy_buffering off" in warnings[0]


async def test_comments_keep_an_idle_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose stream is silent for too long opens another one."""
    monkeypatch.setattr(events, "KEEPALIVE_S", 0.02)
    opened = []
    get_events = connection.StoreConnection._get_events
    monkeypatch.setattr(
        connection.StoreConnection, "_get_events", lambda *args: (opened.append(args), get_events(*args))[1]
    )
    for silence_s in (0.4, 2.0, 10.0):  # a machine may stop for longer than a limit, but not for all of them
        opened.clear()
        monkeypatch.setattr(connection, "_SILENCE_S", silence_s)
        async with serve() as (server, store):
            client = LightningStoreClient(server.endpoint)
            following = asyncio.ensure_future(anext(client.subscribe(["rollout_enqueued"])))
            await asyncio.sleep(1.5 * silence_s)
            await store.enqueue_rollout("task")
            assert (await following).kind == "rollout_enqueued"
            await client.close()
        if len(opened) == 1:
            break
    assert len(opened) == 1, "the client neither reconnects nor polls"


async def test_a_client_that_was_stopped_for_a_while_blames_no_proxy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_S", 0.3)
    monkeypatch.setattr(events, "KEEPALIVE_S", LIMIT_S)  # as if the client had missed the comments
    async with serve() as (server, store):
        client = LightningStoreClient(server.endpoint)
        following = asyncio.ensure_future(anext(client.subscribe(["rollout_enqueued"])))
        await asyncio.sleep(1.0)  # the stream is silent three times
        await store.enqueue_rollout("task")
        assert (await following).kind == "rollout_enqueued"
        assert not client._connection._polls_events
        await client.close()
    assert "proxy" not in caplog.text


async def test_a_certificate_that_is_not_accepted_is_an_error_at_once_which_names_the_fix(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(run, make, check=True, capture_output=True)
    async with serve() as (server, _):
        tls = f"listen 127.0.0.1:{reserve_port()} ssl; ssl_certificate {certificate}; ssl_certificate_key {key};"
        with running_nginx(tmp_path, f"{tls} {LOCATIONS.format(server.endpoint)}"):
            url = f"https://{tls.split()[1]}/defaults"
            client = LightningStoreClient(url, retry_s=LIMIT_S)
            with pytest.raises(StoreError, match=r"certificate of 127\.0\.0\.1") as caught:
                await asyncio.wait_for(client.statistics(), LIMIT_S / 2)
            check_messages("a certificate is not accepted", str(caught.value))
            await client.close()
            command = [sys.executable, "-m", "agentlightning", "runs", "list", "--store", url]
            environment = {**os.environ, "SSL_CERT_FILE": str(certificate)}
            listed = await asyncio.to_thread(run, command, env=environment, check=False, capture_output=True, text=True)
            assert listed.returncode == 0, listed.stderr
