"""The tasks of a prompt search."""

from __future__ import annotations

from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.types import Dataset


def check_datasets(
    train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns the training and the validation tasks; if one dataset is missing, the other is used for both."""
    train = train_dataset if train_dataset is not None and len(train_dataset) else val_dataset
    val = val_dataset if val_dataset is not None and len(val_dataset) else train_dataset
    if train is None or val is None or not len(train):
        raise ConfigError("a prompt search needs tasks: give a train_dataset, and a val_dataset to compare prompts on")
    return train, val
