"""``agl trace``: records an existing program as a rollout."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import IO, Final

import click

from agentlightning import semconv
from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, AttemptFailure, Span

_BOOTSTRAP: Final = Path(__file__).parent / "bootstrap"
_STORE_EVERY_S: Final = 0.5


@click.command("trace", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--store",
    default="sqlite:///agl.db",
    show_default=True,
    metavar="URL",
    help="URL of the store; its token is read from AGL_TOKEN.",
)
@click.option("--run", default=None, metavar="NAME", help="Name of the run; default is `default`.")
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(store: str, run: str | None, arguments: tuple[str, ...]) -> None:
    """Run COMMAND and record its model calls as a rollout, with no line of it changed.

    Every Python process that COMMAND starts is recorded, if lightning is installed in its environment. The exit code
    is the command's.
    """
    raise SystemExit(asyncio.run(_trace(store, run, list(arguments))))


async def _trace(url: str, run: str | None, arguments: list[str]) -> int:
    store = create_store(url, run=run)
    try:
        rollout = await store.start_rollout({"command": arguments})
        with tempfile.NamedTemporaryFile(prefix="agl-trace-", suffix=".jsonl") as spans:
            code, calls = await _record(store, rollout, arguments, spans)
        failure = AttemptFailure(type="ExitCode", message=f"the command exited with code {code}", traceback="")
        await store.update_attempt(
            rollout.rollout_id,
            rollout.attempt.attempt_id,
            status="succeeded" if code == 0 else "failed",
            error=None if code == 0 else failure,
        )
    finally:
        await store.close()
    where = "" if url == "sqlite:///agl.db" else f" --store {url}"
    where += "" if run is None else f" --run {run}"
    echo(f"{calls} model calls recorded: agl rollouts show {rollout.rollout_id}{where}", err=True)
    return code


async def _record(
    store: LightningStore, rollout: AttemptedRollout, arguments: list[str], written: IO[bytes]
) -> tuple[int, int]:
    """Runs the command and stores the spans that its processes write to a file.

    Returns:
        The exit code of the command, and the number of model calls.
    """
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_BOOTSTRAP), os.environ.get("PYTHONPATH")))),
        "AGL_TRACE_FILE": written.name,
        "AGL_ROLLOUT_ID": rollout.rollout_id,
        "AGL_ATTEMPT_ID": rollout.attempt.attempt_id,
    }
    try:
        process = await asyncio.create_subprocess_exec(*arguments, env=env)
    except OSError as error:
        await store.cancel_rollout(rollout.rollout_id)
        raise ConfigError(f"the command {arguments[0]!r} cannot be started: {error.strerror or error}") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which gets it as well
    ended = asyncio.create_task(process.wait())
    calls, rest, is_running = 0, b"", True
    try:
        while is_running:
            done, _ = await asyncio.wait([ended], timeout=_STORE_EVERY_S)
            is_running = not done
            *lines, rest = (rest + written.read()).split(b"\n")
            spans = [Span.model_validate_json(line) for line in lines]
            calls += sum(map(semconv.is_llm_call, spans))
            if spans:
                await store.add_many_spans(spans)
    finally:
        signal.signal(signal.SIGINT, before)
    code = ended.result()
    return (code if code >= 0 else 128 - code), calls
