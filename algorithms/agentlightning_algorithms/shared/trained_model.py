"""The models that runs trained: their records, their checkpoints, and serving them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from agentlightning.errors import ConfigError, install_command
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import LLM, Resource, hide_secrets
from agentlightning.run.directory import inside
from agentlightning_algorithms.shared.policy_backend import PolicyBackend, PolicySetup

STEPS: Final = "steps"
"""The folder of a run that holds the weights of single steps."""
_ADAPTER: Final = "adapter_config.json"
_FILE: Final = "training.json"
"""The record of a training of weights, in the directory of its run."""


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
        settings = hide_secrets(to_jsonable_python(self.settings, fallback=str))
        shown = self.model_copy(update={"settings": settings})
        draft = run / f".{_FILE}.draft"
        draft.write_text(shown.model_dump_json(indent=2, fallback=str), encoding="utf-8")
        draft.replace(run / _FILE)


def read_training(run: Path) -> TrainingRecord | None:
    """Returns the record of a run; None if the directory has no record, because the run did not train weights."""
    file = inside(run, run / _FILE)
    try:
        return TrainingRecord.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(f"{file} is not the record of a training: {error}") from error


def list_checkpoints(run: Path) -> dict[str, Path]:
    """Returns the models that a run saved: ``best`` on the validation set, ``latest``, then steps in order."""
    found = {}
    for name, place in (("best", run / "best"), ("latest", run / "checkpoint")):
        # A directory that is being replaced is moved to `.old` first.
        places = [folder for folder in (place, place.with_name(f"{place.name}.old")) if folder.is_dir()]
        if places:
            found[name] = places[0]
    steps = {folder.name: folder for folder in (run / STEPS).glob("*") if folder.name.isdecimal()}
    record = read_training(run)
    verl = run / "checkpoints" if record is None or record.checkpoints is None else Path(record.checkpoints)
    for folder in verl.glob("global_step_*/actor"):
        steps[folder.parent.name.removeprefix("global_step_")] = folder
    ordered = {name: steps[name] for name in sorted(steps, key=int)}
    if ordered:
        found.setdefault("latest", next(reversed(ordered.values())))
    return found | ordered


def find_checkpoint(run: Path, name: str | None, *, trust: bool = False) -> tuple[str, Path]:
    """Returns a model that a run saved, with its name; None selects the first of best and latest.

    Raises:
        ConfigError: there is no such model or, without ``trust``, a file of it is not in the run's directory.
    """
    known = list_checkpoints(run)
    chosen = name or next(iter(known), None)
    if chosen is None or chosen not in known:
        raise ConfigError(
            f"{run} holds no {chosen or 'trained'} model; it has: {', '.join(known) or 'none'}. Models appear with "
            "the first checkpoint"
        )
    for file in () if trust else (known[chosen], *known[chosen].rglob("*")):
        inside(run, file)
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
        if list_policies(trained) or has_adapters(trained) or _has_shards(trained):
            raise ConfigError(
                f"model = {model!r}: that run saved LoRA adapters or shards; write the whole model with `agl export "
                f"{model} DIR` (adapters: with --merge), and give DIR or, of several policies, the folder of one in it"
            )
        return str(trained)
    if not path.is_dir() and (path.is_absolute() or model.startswith((".", "~")) or path.exists()):
        raise ConfigError(f"model = {model!r}: there is no such directory; give one, or the name of a model on the hub")
    return model


def _has_shards(checkpoint: Path) -> bool:
    """Whether verl wrote a checkpoint, as one file for each training process."""
    return any(checkpoint.glob("*_world_size_*_rank_*.pt"))


@contextlib.contextmanager
def readable(checkpoint: Path, *, trust: bool = False) -> Iterator[Path]:
    """Yields a directory for ``from_pretrained``: the checkpoint, or a temporary one with verl's shards merged.

    Raises:
        ConfigError: it has shards, which are pickles and can run any code, and ``trust`` is false.
    """
    if not _has_shards(checkpoint):
        yield checkpoint
        return
    if not trust:
        raise ConfigError(f"{checkpoint} has shards, which can run code when they are read; add --trust if it is yours")
    with tempfile.TemporaryDirectory(prefix="agl-model-") as scratch:
        merged = Path(scratch) / "merged"
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(checkpoint), "--target_dir", str(merged)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise ConfigError(
                f"verl could not merge the shards in {checkpoint}: {lines[-1] if lines else 'no message'}; merging "
                f"needs the environment of the training. Install with: {install_command('verl')}"
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


@dataclass(frozen=True)
class ServedModel:
    """A model that is being served."""

    source: str
    """The model, as text for the user."""
    endpoint: str
    model: str
    backend: PolicyBackend
    record: TrainingRecord | None
    """The record of the run that trained the model."""
    policies: Sequence[str] = ()
    """Names of the policies of a run that trained several; their models and resources have the same names."""

    def resources(self) -> dict[str, Resource]:
        """Returns the resources by which agents of the run receive the model, or each of its policies."""
        if self.record is None:
            return {}
        sampling = dict(self.record.sampling)
        key = str(self.backend.model_entry.get("api_key", "none"))
        models = {name: name for name in self.policies} or {self.record.resource_name: self.model}
        return {
            name: LLM(endpoint=self.endpoint, model=model, api_key=key, sampling_parameters=sampling)
            for name, model in models.items()
        }


@contextlib.contextmanager
def open_model(source: str, checkpoint: str | None = None, *, trust: bool = False) -> Iterator[tuple[str, Path | str]]:
    """Yields a text for the user, and a directory or hub name: of a run's checkpoint, or ``source`` itself.

    ``trust``: as in ``find_checkpoint`` and ``readable``.
    """
    run = Path(source)
    is_run = read_training(run) is not None or bool(list_checkpoints(run)) or (run / "run.json").is_file()
    if not is_run and checkpoint is None:
        yield source, source
        return
    name, found = find_checkpoint(run, checkpoint, trust=trust)
    with readable(found, trust=trust) as model:
        yield f"{source} ({name if not name.isdecimal() else f'step {name}'})", model


@contextlib.contextmanager
def serve_model(
    source: str,
    checkpoint: str | None = None,
    *,
    trust: bool = False,
    name: str = "policy",
    device: str | None = None,
    dtype: str | None = None,
    **settings: Any,
) -> Iterator[ServedModel]:
    """Serves the model of a run, or another model, with the policy backend ``transformers``.

    Args:
        source: the directory of a run or of a model, or a hub name.
        checkpoint: ``best``, ``latest`` or a step of the run; None: the first of best and latest.
        trust: whether files that can run code, and files outside of the run's directory, may be read.
        name: name of the model in requests.
        device: by default the device of the training, or else ``cpu``.
        dtype: by default the type of the training, or else ``float32``.
        settings: settings of the backend.

    Raises:
        ConfigError: there is no such model.
        LightningError: the server did not start.
    """
    record = read_training(Path(source))
    with contextlib.ExitStack() as stack:
        shown, model = stack.enter_context(open_model(source, checkpoint, trust=trust))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-serve-")))
        backend = cast(PolicyBackend, get_manager().create("policy_backend", {"name": "transformers", **settings}))
        policies = list_policies(Path(model))
        setup = PolicySetup(
            model=read_base(next(iter(policies.values()))) if policies else str(model),
            model_name=name,
            directory=logs,
            device=device or (record.device if record else "cpu"),
            dtype=dtype or (record.dtype if record else "float32"),
            threads=record.settings.get("sample_threads") if record else None,
        )
        stack.callback(lambda: asyncio.run(backend.stop()))
        asyncio.run(backend.start(setup))
        for policy, path in policies.items():
            asyncio.run(backend.load_adapter(policy, path, 0))
        endpoint = str(backend.model_entry["endpoint"])
        yield ServedModel(shown, endpoint, name, backend, record, tuple(policies))
