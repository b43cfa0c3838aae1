"""``agl export``: writes the model that a ``grpo`` run trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError

DIRECTORY = click.Path(path_type=Path)
Which = Literal["best", "last"]


@click.command("export")
@click.argument("run_dir", type=DIRECTORY)
@click.argument("out", type=DIRECTORY)
@click.option("--merge", is_flag=True, help="With LoRA: write the whole model, not only the adapters.")
@click.option("--which", type=click.Choice(["best", "last"]), help="Best on the validation set (default), or last.")
def export(run_dir: Path, out: Path, merge: bool, which: Which | None) -> None:
    """Write the model that a run trained to OUT, for from_pretrained and for model servers."""
    from agentlightning.plugin.registry import get_manager

    get_manager().get("algorithm", "grpo")  # raises an error with the install command if the extra is missing
    source = export_model(run_dir, out, merge=merge, which=which)
    echo(f"{source} -> {out}")


def export_model(run: Path, out: Path, *, merge: bool = False, which: Which | None = None) -> Path:
    """Writes the model of a run, finished or not, to a new directory, and returns the directory that was read.

    ``merge`` writes the whole model instead of LoRA adapters. ``which`` is ``best`` on the validation set or ``last``;
    None: the best, or the last if nothing was evaluated.

    Raises:
        ConfigError: no such model in the run, or ``out`` exists.
    """
    from agentlightning_algorithms.grpo.model.checkpoint import atomic_directory, recover_directory

    models = {"best": recover_directory(run / "best"), "last": recover_directory(run / "checkpoint")}
    models = {name: path for name, path in models.items() if path.is_dir()}
    chosen: str | None = which or next(iter(models), None)
    if chosen is None or chosen not in models:
        raise ConfigError(
            f"{run} holds no {chosen or 'trained'} model; it has: {', '.join(models) or 'none'}. Models appear with "
            "the first checkpoint"
        )
    if out.exists():
        raise ConfigError(f"{out} exists; give a directory that does not")
    from agentlightning_algorithms.grpo.model.lora import read_lora  # torch, transformers and peft
    from agentlightning_algorithms.grpo.model.policy import load_policy

    source = models[chosen]
    lora = source / "adapter_config.json"
    with atomic_directory(out) as scratch:
        if lora.is_file():
            policy = load_policy(json.loads(lora.read_text(encoding="utf-8"))["base_model_name_or_path"])
            read_lora(policy.model, source)
        else:
            policy = load_policy(source)
        policy.save(scratch, merge=merge)
    return source
