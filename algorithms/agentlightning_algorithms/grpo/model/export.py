"""``agl export``: the model of a run, where others can use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.model.checkpoint import atomic_directory, recover_directory

Which = Literal["best", "last"]
_ADAPTER_CONFIG = "adapter_config.json"


def export_model(run: Path, out: Path, *, merge: bool = False, which: Which | None = None) -> Path:
    """Writes the model that a run trained to a directory of its own.

    Args:
        run: directory of the run; it may be running.
        out: where to; it must not exist.
        merge: of a run with LoRA, write the whole model with its additions in the weights; else only the additions.
        which: ``best`` on the validation set, or ``last``; None: the best, or the last where nothing was evaluated.

    Returns:
        The directory in the run that was read.

    Raises:
        ConfigError: no such model in the run, or ``out`` exists.
    """
    found = {"best": recover_directory(run / "best"), "last": recover_directory(run / "checkpoint")}
    there = [name for name, path in found.items() if path.is_dir()]
    chosen: str | None = which or next(iter(there), None)
    if chosen is None or chosen not in there:
        raise ConfigError(
            f"{run} holds no {chosen or 'trained'} model; it has: {', '.join(there) or 'none'}. A model is there after "
            "the first checkpoint"
        )
    if out.exists():
        raise ConfigError(f"{out} exists; give a directory that does not")
    source = found[chosen]
    from agentlightning_algorithms.grpo.model.lora import load_adapter, read_lora  # torch, transformers and peft
    from agentlightning_algorithms.grpo.model.policy import load_policy

    config = source / _ADAPTER_CONFIG
    with atomic_directory(out) as scratch:
        if config.is_file():
            base = str(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"])
            policy = load_policy(base)
            read_lora(policy.model, source)
            load_adapter(policy.model, source)
        else:
            policy = load_policy(source)
        if merge:
            policy.save(scratch)
        else:
            policy.save_trained(scratch)
    return source
