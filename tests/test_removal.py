"""Each of our plugins can be removed, folder and entry point, and the other plugins still work."""

from __future__ import annotations

import functools
import json

import pytest

from agentlightning.plugin.registry import GROUP
from tests.source import pyproject, run_python

PLUGINS = sorted(pyproject()["project"]["entry-points"][GROUP])


@functools.cache
def failures_by_plugin() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(run_python("-m", "tests.removal", timeout_s=850).splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_all_other_plugins_work_without_the_plugin(plugin: str) -> None:
    failures = failures_by_plugin()[plugin]
    assert not failures, "\n\n".join(failures)
