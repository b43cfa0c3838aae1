"""Presets: how to run a known coding agent, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentlightning.errors import ConfigError, suggest

FOLDER: Final = Path(__file__).parent
_VARIABLE: Final = re.compile(r"\$\{([A-Z_]+)\}")


class Preset(BaseModel):
    """How to run a coding agent. ``${NAME}`` is replaced by a variable of the attempt, such as ``OPENAI_BASE_URL``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: list[str] = Field(min_length=1)
    """Program and arguments; ``{task}`` is replaced by the task."""
    env: dict[str, str] = {}
    """Further variables of the environment."""
    home: dict[str, str] = {}
    """Texts of files in the home folder, by path."""
    ignore: list[str] = []
    """Patterns of names in the workspace whose changes are the agent's own and are not recorded."""
    api: Literal["chat", "responses", "messages", "google"] = "chat"
    """The API that the agent calls its model with."""
    install: str = ""
    """The command that installs the agent."""
    node: int | None = None
    """The oldest version of Node.js that runs the newest release."""
    tested: str = ""
    """The release that was tried."""
    prompt_kb: float | None = None
    """Size of the first request in kB: a model needs about a third as many thousand positions, and more to work."""

    @field_validator("home")
    @classmethod
    def _stay_at_home(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [path for path in value if Path(path).is_absolute() or ".." in Path(path).parts]:
            raise ValueError(f"{wrong[0]!r} is not below the home folder")
        return value

    def fill(self, text: str, variables: Mapping[str, str]) -> str:
        """Replaces the variables in a text.

        Raises:
            ConfigError: a variable has no value, for example because the run has no model.
        """

        def value(match: re.Match[str]) -> str:
            if match[1] not in variables:
                raise ConfigError(
                    f"the preset needs {match[1]}, and the resources have no model; add one, such as an LLM"
                )
            return variables[match[1]]

        return _VARIABLE.sub(value, text)


def list_presets() -> list[str]:
    """Returns the names of our presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """Loads a preset of ours by name, or another one by the path of its YAML file.

    Raises:
        ConfigError: there is no such preset, or it is invalid.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    known = list_presets()
    if not path.is_file():
        raise ConfigError(
            f"preset = {name!r}: there is no such preset.{suggest(name, known)} Presets: {', '.join(known)}; or give "
            "the path of a YAML file"
        )
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Preset.model_validate(content)
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"the preset {path} is invalid: {error}") from None
