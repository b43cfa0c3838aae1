"""Checks that a conformance kit finds a planted mistake."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

import pytest


def assert_found(kit: type, test: str, request: pytest.FixtureRequest, message: str, **given: Any) -> None:
    """Runs a test of a kit with a faulty component; it must fail with a message that says what a correct one does.

    Args:
        kit: the kit, a class of tests.
        test: name of its test, which takes the fixtures ``given`` and others of pytest.
        request: looks up the other fixtures.
        message: a part of the failure's message.
        given: the faulty component, as the kit's fixture gives it.
    """
    method = getattr(kit(), test)
    names = inspect.signature(method).parameters
    arguments = {name: given[name] if name in given else request.getfixturevalue(name) for name in names}

    def run() -> None:
        result = method(**arguments)
        if inspect.isawaitable(result):
            asyncio.run(wait_for(result))

    with pytest.raises(AssertionError) as failure:
        run()
    assert message in str(failure.value), f"the kit says: {failure.value}"


async def wait_for(result: Awaitable[object]) -> object:
    return await result


def assert_each_test_finds_one(kit: type, found_by: list[str]) -> None:
    """Checks that every test of a kit finds at least one planted mistake."""
    assert {name for name in dir(kit) if name.startswith("test_")} == set(found_by)
