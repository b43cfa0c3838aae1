"""``agl trace``: records an existing program as a rollout."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import IO, Final, Self

import click
from pydantic import ValidationError

from agentlightning import semconv
from agentlightning.cli import echo
from agentlightning.errors import ConfigError, StoreError
from agentlightning.plugin.registry import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning.store.url import hide_password
from agentlightning.tracer.tracer import Trace, Tracer, activate
from agentlightning.types import UNSET, AttemptedRollout, AttemptFailure, AttemptStatus, Span
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.terminal import run_option, written_store_option

_BOOTSTRAP: Final = Path(__file__).parent / "bootstrap"
_READ_EVERY_S: Final = 0.5
_READ_BYTES: Final = 8 * 2**20
"""Size of the spans to read at a time; the rest stays in the file until the store has accepted these spans."""
_HEARTBEAT_S: Final = 10.0
_GRACE_S: Final = 5.0
"""Time between SIGTERM and SIGKILL for a command whose recording has failed."""


@click.command("trace", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@written_store_option
@run_option
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(store: str, run: str | None, arguments: tuple[str, ...]) -> None:
    """Run COMMAND unchanged and record its model calls as a rollout.

    Every Python process that COMMAND starts is recorded, if lightning is installed in its environment. Exits with the
    exit code of COMMAND.
    """
    raise SystemExit(asyncio.run(_trace(store, run, list(arguments))))


async def _trace(url: str, run: str | None, arguments: list[str]) -> int:
    from agentlightning.store.factory import create_store

    store = create_store(url, run=run)
    writer = SpanWriter(store)
    writer.bind_loop()
    try:
        rollout = await store.start_rollout({"command": arguments})
        attempt = (rollout.rollout_id, rollout.attempt.attempt_id)
        with tempfile.NamedTemporaryFile(prefix="agl-trace-", suffix=".jsonl") as written:
            spans = _SpanFile(written, writer)
            try:
                code = await _record(store, rollout, arguments, spans)
                is_more = True
                while is_more:
                    is_more = spans.read()
                    await writer.flush(*attempt)
            except BaseException as error:
                with contextlib.suppress(StoreError):
                    await store.update_attempt(*attempt, status="failed", error=AttemptFailure.from_exception(error))
                raise
        lost = writer.dropped(*attempt) + spans.count_unreadable()
        failure = AttemptFailure(type="ExitCode", message=f"the command exited with code {code}") if code else None
        status: AttemptStatus = "failed" if code else "succeeded"
        await store.update_attempt(*attempt, status=status, error=failure, spans_dropped=lost or UNSET)
    finally:
        writer.close()
        await store.close()
    where = f" --store {hide_password(url)}" + ("" if run is None else f" --run {run}")
    if lost:
        echo(f"{lost} spans were lost: the store did not accept them, or they were written incompletely", err=True)
    echo(f"{spans.calls} model calls recorded: agl rollouts show {rollout.rollout_id}{where}", err=True)
    return code


async def _record(store: LightningStore, rollout: AttemptedRollout, arguments: list[str], spans: _SpanFile) -> int:
    """Runs the command, reads its spans until it exits, and returns its exit code. Forwards SIGTERM to the command."""
    loop, is_stopped = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, is_stopped.set)
    try:
        process = await _start(store, rollout, arguments, spans.name)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the command, which handles it
        ended = asyncio.create_task(process.wait())
        beats = asyncio.create_task(_beat(store, rollout))
        try:
            while not (await asyncio.wait([ended], timeout=_READ_EVERY_S))[0]:
                if is_stopped.is_set():
                    is_stopped.clear()
                    _terminate(process)
                if not spans.writer.queued:
                    spans.read()
            code = ended.result()
            return code if code >= 0 else 128 - code
        finally:
            beats.cancel()
            if process.returncode is None:
                _terminate(process)
                if not (await asyncio.wait([ended], timeout=_GRACE_S))[0]:
                    process.kill()
                await ended
            signal.signal(signal.SIGINT, before)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _beat(store: LightningStore, rollout: AttemptedRollout) -> None:
    """Renews the lease of the attempt until this task is cancelled: a command may make no call for minutes."""
    while True:
        await asyncio.sleep(_HEARTBEAT_S)
        with contextlib.suppress(StoreError, OSError):  # the next heartbeat may succeed
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, last_heartbeat_time=store.now())


async def _start(
    store: LightningStore, rollout: AttemptedRollout, arguments: list[str], path: str
) -> asyncio.subprocess.Process:
    """Starts the command, whose processes write their spans to the file ``path``."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_BOOTSTRAP), os.environ.get("PYTHONPATH")))),
        "AGL_TRACE_FILE": path,
        "AGL_ROLLOUT_ID": rollout.rollout_id,
        "AGL_ATTEMPT_ID": rollout.attempt.attempt_id,
    }
    try:
        return await asyncio.create_subprocess_exec(*arguments, env=env)
    except OSError as error:
        await store.cancel_rollout(rollout.rollout_id)
        raise ConfigError(f"the command {arguments[0]!r} cannot be started: {error.strerror or error}") from error


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        process.terminate()


class _SpanFile:
    """The file to which the processes of the command write their spans, one per line."""

    def __init__(self, file: IO[bytes], writer: SpanWriter) -> None:
        self.writer = writer
        self.calls = 0
        """Number of model calls read so far."""
        self.name = file.name
        self._file = file
        self._rest = b""
        self._unreadable = 0

    def read(self) -> bool:
        """Passes the next spans to the writer; returns False at the end of the file."""
        piece = self._file.read(_READ_BYTES)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            try:
                span = Span.model_validate_json(line)
            except ValidationError:
                self._unreadable += 1
            else:
                self.calls += semconv.is_llm_call(span)
                self.writer.put(span)
        return bool(piece)

    def count_unreadable(self) -> int:
        """Returns the number of spans that cannot be read, including an incomplete last span."""
        return self._unreadable + bool(self._rest)


class FileTrace(Trace):
    """Appends each span to a file when the span ends, so that a killed program loses only its open spans."""

    def __init__(self, path: str) -> None:
        super().__init__(os.environ["AGL_ROLLOUT_ID"], os.environ["AGL_ATTEMPT_ID"])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)  # several processes may write

    def add(self, span: Span) -> None:
        os.write(self._file, span.model_dump_json().encode() + b"\n")

    def for_late_spans(self) -> Self:
        return self


def start_recording(path: str) -> None:
    """Traces this process until it exits."""
    tracer: Tracer = get_manager().create("tracer", "otel")
    trace = FileTrace(path)
    trace.tracer = tracer
    stack = contextlib.ExitStack()
    stack.enter_context(activate(trace))
    stack.enter_context(tracer.root_context(trace, semconv.SPAN_ROLLOUT))
    atexit.register(stack.close)


add_commands = lazy_commands(f"{__name__}:command")
