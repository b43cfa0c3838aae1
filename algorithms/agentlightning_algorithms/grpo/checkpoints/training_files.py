"""The record of a training, which remains after the training ends."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import fields
from pathlib import Path

from agentlightning_algorithms.grpo.settings.grpo import GRPOSettings, agent_sampling
from agentlightning_algorithms.trained_model.record import TrainingRecord


def write_record(directory: Path, settings: GRPOSettings, train: Sized, val: Sized | None) -> None:
    """Writes the record of a training, which is read to serve and to describe its model."""
    shown = {field.name: getattr(settings, field.name) for field in fields(GRPOSettings)}
    del shown["test_dataset"]
    TrainingRecord(
        algorithm="grpo",
        base=settings.model,
        resource_name=settings.resource_name,
        sampling=agent_sampling(settings.eval_sampling or {}),
        device=settings.device,
        dtype=settings.dtype,
        train_tasks=len(train),
        val_tasks=0 if val is None else len(val),
        settings=shown,
    ).write(directory)
