"""``agl export`` and ``agl serve``: write the model that a run trained to files, or serve it over HTTP."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import yaml

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, LightningError
from agentlightning.run.directory import RECORD_NAME, atomic_directory, inside
from agentlightning_algorithms.shared.trained_model import (
    ServedModel,
    find_checkpoint,
    has_adapters,
    list_policies,
    open_model,
    read_training,
    readable,
    serve_model,
)
from agentlightning_plugins.shared.rendering.text import to_code_block, to_markdown, without_html

_CHECK_S: Final = 1.0
DIRECTORY = click.Path(path_type=Path)
_CHECKPOINT = click.option(
    "--checkpoint",
    metavar="best|latest|N",
    help="Best on the validation set, latest, or step N. Default: best, or latest if nothing was evaluated.",
)

_TRUST = click.option(
    "--trust", is_flag=True, help="Read shards of verl, which can run code, and files outside of the run's directory."
)


@click.command("export")
@click.argument("run_dir", type=DIRECTORY)
@click.argument("out", type=DIRECTORY)
@click.option("--merge", is_flag=True, help="With LoRA: write the whole model, not only the adapters.")
@_CHECKPOINT
@_TRUST
def export(run_dir: Path, out: Path, merge: bool, checkpoint: str | None, trust: bool) -> None:
    """Write the model that a run trained to OUT, with a model card, for from_pretrained and for model servers.

    If the run trained several policies, each is written to OUT/NAME.
    """
    from agentlightning.plugin.registry import get_manager

    get_manager().get("algorithm", "grpo")  # raises an error with the install command if the extra is missing
    source = export_model(run_dir, out, merge=merge, checkpoint=checkpoint, trust=trust)
    echo(f"{source} -> {out}")


def export_model(
    run: Path, out: Path, *, merge: bool = False, checkpoint: str | None = None, trust: bool = False
) -> Path:
    """Writes the model of a run, finished or not, to a new directory, and returns the directory that was read.

    Several policies are written to folders named after them. ``merge`` writes the whole model instead of LoRA adapters.
    ``checkpoint`` is ``best`` on the validation set, ``latest`` or a step; None: the best, or the latest if nothing was
    evaluated. ``trust`` reads files that can run code, and files outside of the run's directory.

    Raises:
        ConfigError: the run has no such model, it cannot be read without ``trust``, or ``out`` exists.
    """
    name, source = find_checkpoint(run, checkpoint, trust=trust)
    if out.exists():
        raise ConfigError(f"{out} exists; give a directory that does not")
    with readable(source, trust=trust) as model, atomic_directory(out) as scratch:
        policies = list_policies(model) or {"": model}
        for policy, folder in policies.items():
            target = scratch / policy
            if merge and has_adapters(folder):
                from agentlightning_algorithms.shared.policy.model import load_policy  # transformers

                load_policy(folder).save(target, merge=True)
            else:
                shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pt"))
            write_model_card(target, run, name)
    return source


@click.command("serve")
@click.argument("source", metavar="RUN|MODEL")
@_CHECKPOINT
@_TRUST
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to bind; beyond loopback, --api-key is needed."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any free port.")
@click.option(
    "--api-key", envvar="AGL_API_KEY", show_envvar=True, help="Key that requests must send; not used with --command."
)
@click.option("--name", default="policy", show_default=True, help="Name of the model in requests.")
@click.option(
    "--adapters",
    metavar="DIR",
    help="Folder of LoRA adapters: the adapter in DIR/NAME is the model NAME, also later ones.",
)
@click.option("--device", help="Device, such as cpu or cuda:0; default is the device of the training.")
@click.option("--dtype", help="float32, bfloat16 or float16; default is the dtype of the training.")
@click.option(
    "--command", "own", metavar="TEXT", help="Start this server instead, as in 'vllm serve {model} --port {port}'."
)
def serve(
    source: str,
    checkpoint: str | None,
    trust: bool,
    host: str,
    port: int,
    api_key: str | None,
    name: str,
    adapters: str | None,
    device: str | None,
    dtype: str | None,
    own: str | None,
) -> None:
    """Serve the model that a run trained, or any other MODEL, behind an OpenAI-compatible address.

    MODEL is a directory or a name on the hub. In --command, {model}, {name}, {host} and {port} are replaced; {model}
    is the directory of a whole model, with LoRA adapters merged.
    """
    _check_port(host, port)  # before the model is read
    if own is not None:
        if adapters is not None:
            raise ConfigError("--adapters is for our server; give your --command the adapters in its own way")
        values = {"name": name, "host": host, "port": str(port)}
        sys.exit(_serve_with_command(source, checkpoint, own, values, trust=trust))
    with (
        _stopping() as stopped,
        serve_model(
            source,
            checkpoint,
            trust=trust,
            name=name,
            adapters=adapters,
            device=device,
            dtype=dtype,
            host=host,
            port=port,
            api_key=api_key,
        ) as served,
    ):
        echo(_describe(served))
        while not stopped.wait(_CHECK_S):
            served.backend.check()


def _check_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:  # the server reports other problems, such as a name that it does not know
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another --port, or 0 for a free one") from None


def _describe(served: ServedModel) -> str:
    key = '-H "Authorization: Bearer $AGL_API_KEY" ' if "api_key" in served.backend.model_entry else ""
    models = served.policies or [served.model]
    body = f'{{"model": "{models[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    names = f"model{'s' * (len(models) > 1)} {', '.join(models)}"
    return (
        f"Serving {served.source} at {served.endpoint} as the {names}. Try it:\n\n"
        f"    curl {served.endpoint}/chat/completions -H 'Content-Type: application/json' {key}-d '{body}'\n"
    )


def _serve_with_command(
    source: str, checkpoint: str | None, command: str, values: dict[str, str], *, trust: bool
) -> int:
    """Runs the user's model server on a whole model until it ends or this process is stopped."""
    with contextlib.ExitStack() as stack:
        shown, model = stack.enter_context(open_model(source, checkpoint, trust=trust))
        if isinstance(model, Path) and (policies := list_policies(model)):
            raise ConfigError(
                f"--command: {shown} has several policies ({', '.join(policies)}); write them with `agl export "
                f"{source} DIR`, and give DIR/NAME to your server as LoRA adapters, as in vllm serve --lora-modules"
            )
        if isinstance(model, Path) and has_adapters(model):
            model = stack.enter_context(_merged(model))
        words = shlex.split(command)
        for placeholder, value in {"model": str(model), **values}.items():
            words = [word.replace(f"{{{placeholder}}}", value) for word in words]
        echo(f"Serving {shown}: {shlex.join(words)}")
        stopped = stack.enter_context(_stopping())
        try:
            process = subprocess.Popen(words, start_new_session=True)  # Ctrl-C reaches only us; we then stop it
        except OSError as error:
            raise LightningError(f"--command {command!r} cannot be started: {error}") from error
        try:
            while process.poll() is None and not stopped.wait(_CHECK_S):
                pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        code = process.wait()
        return 0 if stopped.is_set() else code


@contextlib.contextmanager
def _merged(adapters: Path) -> Iterator[Path]:
    from agentlightning_algorithms.shared.policy.model import load_policy  # transformers

    with tempfile.TemporaryDirectory(prefix="agl-model-") as scratch:
        load_policy(adapters).save(Path(scratch), merge=True)
        yield Path(scratch)


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yields an event that SIGINT and SIGTERM set while the block runs."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ROWS: Final = 20
"""Maximum number of rows of the learning curve."""


def write_model_card(model: Path, run: Path, checkpoint: str) -> None:
    """Writes ``README.md`` next to the weights in ``model``, from the files in the run's directory."""
    training = read_training(run)
    base = "unknown" if training is None else training.base
    algorithm = "unknown" if training is None else training.algorithm
    library = "peft" if has_adapters(model) else "transformers"
    head = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["reinforcement-learning", algorithm]}
    if base != "unknown" and not Path(base).exists():  # the hub accepts names only
        head["base_model"] = base
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# {without_html(run.resolve().name)}",
        "",
    ]
    kind = "LoRA adapters" if library == "peft" else "weights"
    lines += [f"The {kind} of checkpoint `{checkpoint}`, trained with Lightning.", ""]
    rows = [("base model", f"`{base}`"), ("algorithm", f"`{algorithm}`")]
    if training is not None:
        rows.append(("data", f"{training.train_tasks} training tasks, {training.val_tasks} validation tasks"))
    lines += to_markdown(("", ""), rows)
    lines += ["", *_curve(inside(run, run / "metrics.jsonl"))]
    if training is not None:
        settings = yaml.safe_dump(dict(training.settings), sort_keys=False).strip()
        lines += ["## Settings", "", to_code_block(settings, "yaml"), ""]
    lines += _versions(inside(run, run / RECORD_NAME))
    (model / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _curve(file: Path) -> list[str]:
    """Returns a table of the training and validation reward at evenly spaced steps."""
    steps: dict[int, dict[str, float]] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote this line
                continue
            if "step" not in record:  # the line that records the end of the run
                continue
            found = {name: record[name] for name in ("reward", "val_reward") if name in record}
            steps.setdefault(int(record["step"]), {}).update(found)
    curve = sorted((step, values) for step, values in steps.items() if values)
    if not curve:
        return []
    lines = ["## Learning curve", "", "| step | training reward | validation reward |", "|---|---|---|"]
    for step, values in reversed(curve[:: -max(1, -(-len(curve) // _ROWS))]):  # the last step is shown
        reward, val_reward = (f"{values[name]:.3f}" if name in values else "" for name in ("reward", "val_reward"))
        lines.append(f"| {step} | {reward} | {val_reward} |")
    return [*lines, ""]


def _versions(file: Path) -> list[str]:
    if not file.is_file():
        return []
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    versions = to_markdown(("", ""), record.get("versions", {}).items())
    return ["## Versions", "", without_html(f"Seed {record.get('seed', 0)}."), "", *versions]
