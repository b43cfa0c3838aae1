"""The commands of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import click

DIRECTORY = click.Path(path_type=Path)


@click.command("export")
@click.argument("run_dir", type=DIRECTORY)
@click.argument("out", type=DIRECTORY)
@click.option("--merge", is_flag=True, help="With LoRA: write the whole model, not only the additions.")
@click.option("--which", type=click.Choice(["best", "last"]), help="Best on the validation set (default), or last.")
def export(run_dir: Path, out: Path, merge: bool, which: str | None) -> None:
    """Writes the model that a run trained to OUT, for from_pretrained and for model servers."""
    from agentlightning.plugin.registry import get_manager

    get_manager().get("algorithm", "grpo")  # an extra that is missing is an error that says how to install it
    from agentlightning_algorithms.grpo.model.export import export_model

    source = export_model(run_dir, out, merge=merge, which=cast("Literal['best', 'last'] | None", which))
    click.echo(f"{source} -> {out}")
