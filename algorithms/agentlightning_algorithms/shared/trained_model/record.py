"""The record of a training of weights, ``training.json`` in the directory of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from agentlightning.errors import ConfigError
from agentlightning.resources import SECRET_NAME
from agentlightning.store.url import hide_password

_FILE: Final = "training.json"
_SECRET_HEADER: Final = re.compile(r"(^|[-.])(authorization|api-key)$", re.IGNORECASE)


class TrainingRecord(BaseModel):
    """Settings to serve the model that a run trained, and facts for its model card."""

    model_config = ConfigDict(frozen=True)

    algorithm: str
    base: str
    """The model that the training started from: a directory or a name on the hub."""
    resource_name: str = "llm"
    sampling: Mapping[str, Any] = Field(default_factory=dict)
    """Sampling parameters of evaluation, which agents pass to model calls."""
    device: str = "cpu"
    dtype: str = "float32"
    train_tasks: int = 0
    val_tasks: int = 0
    settings: Mapping[str, Any] = Field(default_factory=dict)
    checkpoints: str | None = None
    """The directory of verl's checkpoints."""

    def write(self, run: Path) -> None:
        """Writes the record of a run, without secrets; a resumed run replaces it."""
        settings = _hide_secrets(to_jsonable_python(self.settings, fallback=str))
        shown = self.model_copy(update={"settings": settings})
        draft = run / f".{_FILE}.draft"
        draft.write_text(shown.model_dump_json(indent=2, fallback=str), encoding="utf-8")
        draft.replace(run / _FILE)


def _hide_secrets(value: Any) -> Any:
    """Replaces secret settings, and passwords in URLs, by ``***``; ``value`` consists of JSON types."""
    if isinstance(value, dict):
        return {name: "***" if child and _is_secret(name) else _hide_secrets(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_hide_secrets(child) for child in value]
    return hide_password(value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(name) or _SECRET_HEADER.search(name))


def read_training(run: Path) -> TrainingRecord | None:
    """Returns the record of a run; None if the directory has no record, because the run did not train weights.

    Raises:
        ConfigError: the record is damaged.
    """
    file = run / _FILE
    try:
        return TrainingRecord.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(f"{file} is not the record of a training: {error}") from error
