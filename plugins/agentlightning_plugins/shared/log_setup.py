"""``setup_logging``: sends the log of Lightning, which is silent below WARNING, to a terminal or files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentlightning.cli import PrintableFormatter


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
