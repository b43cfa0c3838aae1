"""Finds and reads the models that a run saved, and writes directories atomically."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.trained_model.record import read_training

STEPS: Final = "steps"
"""The folder of a run that holds the weights of single steps."""
_ADAPTER: Final = "adapter_config.json"


def list_checkpoints(run: Path) -> dict[str, Path]:
    """Returns the models that a run saved: ``best`` on the validation set, ``latest``, then steps in order."""
    found = {}
    for name, folder in (("best", run / "best"), ("latest", run / "checkpoint")):
        # A directory that is being replaced is moved to `.old` first.
        for place in (folder, folder.with_name(f"{folder.name}.old")):
            if place.is_dir():
                found[name] = place
                break
    steps = {folder.name: folder for folder in (run / STEPS).glob("*") if folder.name.isdecimal()}
    record = read_training(run)
    verl = run / "checkpoints" if record is None or record.checkpoints is None else Path(record.checkpoints)
    for folder in verl.glob("global_step_*/actor"):
        steps[folder.parent.name.removeprefix("global_step_")] = folder
    ordered = {name: steps[name] for name in sorted(steps, key=int)}
    if ordered:
        found.setdefault("latest", next(reversed(ordered.values())))
    return found | ordered


def find_checkpoint(run: Path, name: str | None) -> tuple[str, Path]:
    """Returns a model that a run saved, with its name; None selects the first of best and latest.

    Raises:
        ConfigError: the run has no such model.
    """
    known = list_checkpoints(run)
    chosen = name or next(iter(known), None)
    if chosen is None or chosen not in known:
        raise ConfigError(
            f"{run} holds no {chosen or 'trained'} model; it has: {', '.join(known) or 'none'}. Models appear with "
            "the first checkpoint"
        )
    return chosen, known[chosen]


def has_adapters(model: Path) -> bool:
    """Whether a directory has LoRA adapters instead of all weights."""
    return (model / _ADAPTER).is_file()


def list_policies(model: Path) -> dict[str, Path]:
    """Returns the LoRA adapters of a run that trained several policies, by name; empty for any other model."""
    if has_adapters(model) or not model.is_dir():
        return {}
    return {folder.name: folder for folder in sorted(model.iterdir()) if has_adapters(folder)}


def read_base(adapters: Path) -> str:
    """Returns the model that LoRA adapters belong to: a directory or hub name."""
    return str(json.loads((adapters / _ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])


def find_model(model: str) -> str:
    """Returns the directory or hub name of a model; for a run's directory, the model that the run trained.

    Raises:
        ConfigError: the path has no model, or the run trained LoRA adapters or saved its model in shards.
    """
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        if read_training(path) is None:
            raise ConfigError(
                f"model = {model!r}: that directory has no config.json; give a directory that save_pretrained "
                "wrote, or the directory of a run"
            )
        _, trained = find_checkpoint(path, None)
        if several := list_policies(trained):
            raise ConfigError(
                f"model = {model!r}: that run trained several policies; write one of them as a whole model with `agl "
                f"export {model} DIR --merge`, and give DIR/{next(iter(several))}"
            )
        if has_adapters(trained):
            raise ConfigError(
                f"model = {model!r}: that run trained LoRA adapters; write the whole model with `agl export {model} "
                "DIR --merge`, and give DIR"
            )
        if _has_shards(trained):
            raise ConfigError(
                f"model = {model!r}: verl saved the model of that run in shards; write it as a whole with `agl export "
                f"{model} DIR`, and give DIR"
            )
        return str(trained)
    if not path.is_dir() and (path.is_absolute() or model.startswith((".", "~")) or path.exists()):
        raise ConfigError(f"model = {model!r}: there is no such directory; give one, or the name of a model on the hub")
    return model


def _has_shards(checkpoint: Path) -> bool:
    """Whether verl wrote a checkpoint, as one file for each training process."""
    return any(checkpoint.glob("*_world_size_*_rank_*.pt"))


@contextlib.contextmanager
def readable(checkpoint: Path) -> Iterator[Path]:
    """Yields a directory that ``from_pretrained`` reads: the checkpoint, or a temporary one with verl's shards merged.

    Raises:
        ConfigError: verl cannot merge the shards.
    """
    if not _has_shards(checkpoint):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="agl-model-") as scratch:
        merged = Path(scratch) / "merged"
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(checkpoint), "--target_dir", str(merged)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise ConfigError(
                f"verl could not merge the shards in {checkpoint}: {lines[-1] if lines else 'no message'}; merging "
                "needs the environment of the training. Install with: pip install 'lightning[verl]'"
            )
        yield _join_adapters(merged)


def _join_adapters(merged: Path) -> Path:
    """Returns the directory of the adapters that verl writes below the base model, after adding the missing files."""
    adapters = merged / "lora_adapter"
    if not adapters.is_dir():
        return merged
    for file in merged.glob("*"):
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, adapters)
    config = json.loads((adapters / _ADAPTER).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(merged)
    (adapters / _ADAPTER).write_text(json.dumps(config), encoding="utf-8")
    return adapters


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that replaces ``target``, durably, when the block ends without an error.

    An existing ``target`` is first moved to ``<target>.old``; if the process is killed before the replacement,
    :func:`recover_directory` restores it.
    """
    scratch = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            _fsync(path)
        old = target.with_name(f"{target.name}.old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        scratch.rename(target)
        _fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def recover_directory(target: Path) -> Path:
    """Returns ``target``, after restoring its predecessor if the process was killed while replacing it."""
    old = target.with_name(f"{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)
    return target


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
