"""The agents of this example, which work on the same tasks: the smallest one of ours, and three that others made."""

import sys
from pathlib import Path
from typing import Any

from examples.coding.problems import WORKSPACES

import agentlightning as agl

_CHECKED: dict[str, Any] = {
    "prompt": "{text}",
    "workspace": f"{WORKSPACES}/{{name}}",
    "restore": ["check.py"],
    "reward": ["python3", "-I", "-c", "import sys; sys.path.insert(0, '.'); import check"],
}
bash = agl.CommandAgent([sys.executable, "-I", "-S", str(Path(__file__).with_name("bash_agent.py"))], **_CHECKED)
mini = agl.CommandAgent(preset="mini-swe-agent", **_CHECKED)
claude = agl.CommandAgent(preset="claude-code", **_CHECKED)
codex = agl.CommandAgent(preset="codex", **_CHECKED)
