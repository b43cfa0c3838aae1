"""Any one plugin of ours can be taken away, folder and entry point, and the others work on."""

from __future__ import annotations

import functools
import json

import pytest

from agentlightning.plugin.registry import GROUP
from tests.source import pyproject, run_python

PLUGINS = sorted(pyproject()["project"]["entry-points"][GROUP])


@functools.cache
def failures_by_plugin() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(run_python("-m", "tests.removal", timeout_s=1000).splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1020)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_other_plugins_work_without(plugin: str) -> None:
    failures = failures_by_plugin()[plugin]
    assert not failures, "\n\n".join(failures)
