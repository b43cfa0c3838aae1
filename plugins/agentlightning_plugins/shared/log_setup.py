"""The log of Lightning, which is silent below WARNING: ``setup_logging`` for scripts, and the log of servers."""

from __future__ import annotations

import functools
import json
import logging
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import click

from agentlightning.cli import PrintableFormatter

REQUEST_ID_HEADER: Final = "x-request-id"
request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""The id of the request that a server is answering; empty outside of requests."""
access_logger: Final = logging.getLogger("agentlightning.access")
"""One INFO record for each answered request, if ``setup_server_log`` has enabled these records."""
access_logger.setLevel(logging.WARNING)  # a store inside another program, such as `agl train`, writes none
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_TEXT: Final = "%(asctime)s %(levelname)s %(request_id)s%(message)s"


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``, which a live display may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # it is closed
            self.handleError(record)


def setup_logging(
    level: int | str = "INFO",
    *,
    console: bool = True,
    files: str | Path | Mapping[str, str | Path] | None = None,
    apply_to: Sequence[str] = (),
) -> logging.Logger:
    """Sends Lightning's log to standard error, with time and level. Calling it again changes the level and adds files.

    Args:
        level: the lowest level that is written.
        console: whether to write to standard error.
        files: a file to append to, or a file for each logger name, such as ``agentlightning``.
        apply_to: names of other loggers that are set up in the same way.
    """
    names = dict.fromkeys(("agentlightning", *apply_to))
    paths = files if isinstance(files, Mapping) else {} if files is None else dict.fromkeys(names, files)
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if console and not logger.handlers:
            _add_handler(logger, _StandardError())
            logger.propagate = False
    for name, path in paths.items():
        logger, absolute = logging.getLogger(name), Path(path).absolute()
        if not any(getattr(handler, "baseFilename", None) == str(absolute) for handler in logger.handlers):
            absolute.parent.mkdir(parents=True, exist_ok=True)
            _add_handler(logger, logging.FileHandler(absolute, encoding="utf-8"))
    return logging.getLogger("agentlightning")


def _add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)


def setup_server_log(level: int | str, style: Literal["text", "json"], *, access: bool = False) -> None:
    """Sends the log of a server to standard error, with time, level and the id of the request.

    It has text, or JSON with the keys time, level, logger, message, request_id and error; with ``access``, also a line
    for each request. ``agl --debug`` writes all levels.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonFormatter() if style == "json" else PrintableFormatter(_TEXT))
    logger = logging.getLogger("agentlightning")
    logger.handlers[:] = [handler]
    logger.propagate = False
    if logger.level != logging.DEBUG:
        logger.setLevel(level)
    access_logger.setLevel(logging.INFO if access else logging.CRITICAL)


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command that serves the options ``--log-level`` and ``--log-format``, and sets up its log."""

    @click.option(
        "--log-level",
        default=lambda: "info" if sys.stderr.isatty() else "warning",
        envvar="AGL_LOG_LEVEL",
        show_envvar=True,
        show_default="info on a terminal, else warning",
        type=click.Choice(["debug", "info", "warning"]),
    )
    @click.option(
        "--log-format",
        default="text",
        envvar="AGL_LOG_FORMAT",
        show_envvar=True,
        show_default=True,
        type=click.Choice(["text", "json"]),
    )
    @functools.wraps(command)
    def run(
        *args: Any, log_level: str, log_format: Literal["text", "json"], access_log: bool = False, **options: Any
    ) -> Any:
        if click.get_current_context().invoked_subcommand is None:
            setup_server_log(log_level.upper(), log_format, access=access_log)
        return command(*args, **options)

    return run


def begin_request(given: str | None) -> str:
    """Returns the id of a request, for the log and the answer: the one that the client sent, or a new one."""
    own = given if given is not None and _ID.fullmatch(given) else secrets.token_hex(8)
    request_id.set(own)
    return own


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; times are UTC."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if request_id.get():
            fields["request_id"] = request_id.get()
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = f"[{request_id.get()}] " if request_id.get() else ""
    return True
