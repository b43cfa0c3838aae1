"""The ``litellm`` provider, with a model server that speaks Anthropic's Messages only."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.plugins.gateway.gateway_setup import PROVIDER_KEY

pytestmark = [pytest.mark.environment("main"), pytest.mark.slow]


async def test_litellm_reaches_a_server_that_has_no_openai_api(tmp_path: Path) -> None:
    result = tmp_path / "outcome"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-m", "tests.plugins.gateway.litellm_gateway", str(result),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    outcome = json.loads(result.read_text(encoding="utf-8"))
    whole, pieces, call, response, limited, broken = outcome["said"]
    assert (whole, pieces, call, response) == ("Hello!", ["Hell", "o!"], ["add", '{"a": 1}'], "Hello!")
    assert "slow down" in limited
    assert "broke off" in broken
    assert outcome["requests"] == [["/v1/messages", PROVIDER_KEY, "claude-x"]] * 6
    assert [span["complete"] for span in outcome["spans"]] == [True] * 4 + [False] * 2
    assert {span["provider"] for span in outcome["spans"]} == {"litellm"}
    assert outcome["spans"][0]["output"] == [{"role": "assistant", "content": "Hello!"}]
    assert outcome["spans"][2]["output"][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert not outcome["leaks"]
    assert outcome["stolen"] == [0, [], 0], "no field of an agent redirects litellm, which has the provider's key"
    assert outcome["is_lazy"]
