"""Renders POML with the package ``poml``, in a child process without this process's environment variables."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl

_TIMEOUT_S: Final = 60.0
_PROGRAM: Final = """
import json, pathlib, poml
values = json.loads(pathlib.Path("values.json").read_text(encoding="utf-8"))
text = poml.poml(pathlib.Path("template.poml"), context=values, chat=False, format="raw")
pathlib.Path("result.json").write_text(text, encoding="utf-8")
"""


class PomlEngine:
    """Renders a template in a child process without this process's environment variables.

    POML can read files and run JavaScript: use only templates from trusted authors. Each rendering starts Node.js,
    which takes about a second.
    """

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Renders a template to one text.

        Raises ConfigError if the template is wrong, takes too long, or has parts that are not text.
        """
        with tempfile.TemporaryDirectory(prefix="agl-poml-") as name:
            folder = Path(name)
            (folder / "template.poml").write_text(template, encoding="utf-8")
            (folder / "values.json").write_text(json.dumps(dict(values), default=str), encoding="utf-8")
            env = {"PATH": os.defpath, "HOME": name, "TMPDIR": name, "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-c", _PROGRAM]
            returncode, stderr = _run(command, folder, env)
            if returncode != 0:
                reason = re.search(r"^\w*Error: .+$", stderr, re.MULTILINE)
                shown = reason[0] if reason is not None else stderr.strip()[-1000:]
                raise ConfigError(f"poml prompt template cannot be rendered: {shown}")
            text = json.loads((folder / "result.json").read_text(encoding="utf-8"))["messages"]
        if not isinstance(text, str):
            raise ConfigError("poml prompt template renders to something other than text, such as an image")
        return text


def _run(command: list[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Returns the exit code and stderr. A timeout also kills Node.js, which the child starts."""
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes) as process:
        try:
            _, stderr = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"poml prompt template took longer than {_TIMEOUT_S:.0f} s") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stderr


@hookimpl
def components() -> list[Component]:
    summary = "prompts in POML, the Prompt Orchestration Markup Language"
    return [Component("template_engine", "poml", f"{__name__}:PomlEngine", extra="poml", summary=summary)]
