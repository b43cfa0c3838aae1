"""``agl demo``: trains an ordinary agent on this machine, and shows what it learned."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import click

from agentlightning.cli import echo
from agentlightning.errors import PluginError, install_command
from agentlightning_plugins.shared.lazy import lazy_commands

_NEEDED = ("torch", "transformers", "peft", "safetensors", "openai")


@click.command("demo")
@click.option("--seed", default=0, show_default=True, help="Seed of task order, sampling and minibatches.")
@click.option("--steps", default=None, type=click.IntRange(min=1), help="Maximum number of weight updates.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the run; default runs/demo-<n>.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Continue an interrupted run.")
@click.option("--show-agent", is_flag=True, help="Print the agent's source and stop.")
def command(seed: int, steps: int | None, run_dir: Path | None, resume: Path | None, show_agent: bool) -> None:
    """Train a calculator agent by GRPO on a tiny model: no key, no GPU, about two minutes."""
    if show_agent:
        echo(Path(__file__).with_name("agent.py").read_text(encoding="utf-8"), nl=False)
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginError(f"the demo needs {', '.join(missing)}. Install with: {install_command('demo')}")
    if resume is not None and run_dir is not None:
        raise click.UsageError("--resume already names the directory; omit --run-dir")
    if resume is not None and not (resume / "checkpoint").is_dir():
        raise click.UsageError(
            f"{resume} holds no checkpoint; a run is saved after its first step. Start with: agl demo"
        )
    if run_dir is not None and run_dir.exists() and not run_dir.is_dir():
        raise click.UsageError(f"{run_dir} is a file; choose a directory for the run")
    if run_dir is not None and run_dir.exists() and any(run_dir.iterdir()):
        raise click.UsageError(
            f"{run_dir} is not empty; choose another, or continue it with: agl demo --resume {run_dir}"
        )
    free = next(path for n in itertools.count(1) if not (path := Path("runs") / f"demo-{n}").exists())
    from agentlightning_plugins.demo.training import run_demo

    run_demo(run_dir or resume or free, seed=seed, steps=steps, resume=resume is not None)


add_commands = lazy_commands(f"{__name__}:command")
