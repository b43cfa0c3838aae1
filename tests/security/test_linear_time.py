"""Readers of texts of agents and models take time in proportion to their length."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from agentlightning.resources import PromptTemplate
from agentlightning.store.url import hide_password
from agentlightning_algorithms.shared.policy.server.tool_format import FORMATS, split_calls
from agentlightning_algorithms.shared.prompt_search.critique import read_prompt
from agentlightning_plugins.commands.doctor.checks import check_prompts
from agentlightning_plugins.gateway.backends.provider import KeyRedactor

pytestmark = pytest.mark.serial

REDACT = KeyRedactor("sk-the/real-provider-key").redact_error
READERS: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "keys in answers": (lambda text: REDACT(text.encode()), ["\\", "%25", "%", "&#", "s\\", "sk-the/", "\\u0073"]),
    "tool calls": (
        lambda text: [split_calls(text, form) for form in FORMATS.values()],
        [
            *(
                "<tool_call>",
                "<tool_call></tool_call",
                "<tool_call>{",
                '<tool_call>{"name":"f","arguments":{}}</tool_call>',
            ),
            *("<think>", "</think>", "[TOOL_CALLS]", "<tool_call><function=f>\n</function>\n</tool_call>"),
            "<tool_call><function=f>\n<parameter=a>\n",
        ],
    ),
    "an edited prompt": (read_prompt, ["<prompt", "<prompt>", "</prompt", "```\n", "```  "]),
    "passwords in errors": (hide_password, ["://a", "://", "?password", "&password="]),
    "a prompt in Jinja": (lambda text: check_prompts({"p": PromptTemplate(text, "jinja")}, []), ["{{", "{%", "{#a"]),
}


def cpu_s(read: Callable[[str], object], text: str) -> float:
    """Returns the CPU time of the fastest of three calls."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        read(text)
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize("name", READERS)
def test_four_times_the_text_takes_less_than_ten_times_the_time(name: str) -> None:
    read, units = READERS[name]
    for unit in units:
        text = "x" + unit * (100_000 // len(unit))
        once, four = cpu_s(read, text), cpu_s(read, text * 4)
        assert four < max(10 * once, 0.05), f"{unit!r}: {once * 1000:.0f} ms and {four * 1000:.0f} ms"  # 16: quadratic
