"""Objects of frameworks that cannot be pickled are sent to a runner process."""

from __future__ import annotations

import functools
import inspect
import ssl
import threading
import weakref
from typing import Any

import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI

from agentlightning_integrations.shared import openai_client  # noqa: F401 # registers how clients are pickled
from agentlightning_integrations.shared.object_copy import dump, load

MISSING = object()
"""A sentinel that is compared by identity, as in frameworks."""


class Node:
    def __init__(self) -> None:
        self.me = weakref.ref(self)


def through(value: Any) -> Any:
    return load(dump(value))


def test_locks_are_replaced_by_new_unlocked_ones() -> None:
    held = threading.Lock()
    held.acquire()
    lock, rlock = through((held, threading.RLock()))
    assert lock.acquire(blocking=False)
    assert rlock.acquire(blocking=False)
    rlock.release()


def test_tls_settings_are_replaced_by_the_defaults() -> None:
    assert through(ssl.create_default_context()).verify_mode is ssl.CERT_REQUIRED


def test_a_module_level_sentinel_stays_the_same_object() -> None:
    assert through([MISSING])[0] is MISSING
    assert isinstance(through(object()), object)


def test_a_weak_reference_points_to_the_copy() -> None:
    copy = through(Node())
    assert copy.me() is copy


@pytest.mark.parametrize("cls", [OpenAI, AsyncOpenAI])
def test_a_client_keeps_its_settings(cls: Any) -> None:
    client = cls(
        base_url="http://127.0.0.1:9/v1",
        api_key="sk-mine",
        max_retries=7,
        timeout=3.5,
        organization="org",
        default_headers={"x-team": "blue"},
        default_query={"v": "1"},
    )
    copy = through({"client": client, "completions": client.chat.completions})
    other = copy["client"]
    assert type(other) is cls
    assert (str(other.base_url), other.api_key, other.max_retries) == ("http://127.0.0.1:9/v1/", "sk-mine", 7)
    assert (other.timeout, other.organization) == (3.5, "org")
    assert other.default_headers["x-team"] == "blue"
    assert other.default_query == {"v": "1"}
    assert copy["completions"]._client is other


def test_a_client_of_azure_keeps_its_api_version() -> None:
    client = AsyncAzureOpenAI(api_version="2026-01-01", azure_endpoint="https://mine.example.com", api_key="k")
    other = through(client)
    assert (other._api_version, str(other.base_url)) == ("2026-01-01", str(client.base_url))


def test_a_socket_is_refused() -> None:
    import socket

    with socket.socket() as connection, pytest.raises(TypeError, match="socket"):
        dump(connection)


def make_token() -> str:
    """Returns a key that expires."""
    return "fresh"


async def make_token_async() -> str:
    return "fresh"


@pytest.mark.parametrize(("cls", "make"), [(OpenAI, make_token), (AsyncOpenAI, make_token_async)])
def test_a_client_keeps_the_function_that_returns_its_key(cls: Any, make: Any) -> None:
    assert through(cls(api_key=make))._api_key_provider is make


@pytest.mark.parametrize(("cls", "make"), [(AzureOpenAI, make_token), (AsyncAzureOpenAI, make_token_async)])
def test_a_client_of_azure_keeps_its_token_or_the_function_that_returns_it(cls: Any, make: Any) -> None:
    azure = functools.partial(cls, api_version="2026-01-01", azure_endpoint="https://mine.example.com")
    other = through(azure(azure_ad_token_provider=make))
    assert (other._azure_ad_token, other._azure_ad_token_provider) == (None, make)
    other = through(azure(azure_ad_token="token"))
    assert (other._azure_ad_token, other._azure_ad_token_provider) == ("token", None)


def test_a_client_keeps_its_workload_identity_if_openai_supports_it() -> None:
    if "workload_identity" in inspect.signature(OpenAI).parameters:
        identity = {
            "identity_provider_id": "idp",
            "service_account_id": "account",
            "provider": {"token_type": "jwt", "get_token": make_token},
        }
        client: Any = OpenAI(workload_identity=identity)  # openai 1 has none
        assert through(client).workload_identity == identity
