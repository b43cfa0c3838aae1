"""The log of `agl store`: text or JSON lines, each with the id of the request that it is about."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal

from agentlightning.cli import PrintableFormatter

REQUEST_ID_HEADER: Final = "x-request-id"
request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""The id of the request that is being answered; empty if its client gave none."""
access_logger: Final = logging.getLogger("agentlightning.access")
"""One INFO record for each answered request, if ``setup_server_log`` has enabled these records."""
access_logger.setLevel(logging.WARNING)  # a store inside another program, such as `agl train`, writes none
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_TEXT: Final = "%(asctime)s %(levelname)s %(request_id)s%(message)s"


def read_request_id(given: str | None) -> str:
    """Returns the id that a client sent; an empty string if it sent none or one that cannot be shown."""
    return given if given is not None and _ID.fullmatch(given) else ""


def new_request_id() -> str:
    return secrets.token_hex(8)


def setup_server_log(level: str, style: Literal["text", "json"], *, access: bool) -> None:
    """Sends the log to standard error.

    Args:
        level: the lowest level that is written.
        style: lines of text, or of JSON with the keys time, level, logger, message, request_id and error.
        access: whether to write a line for each request.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonFormatter() if style == "json" else PrintableFormatter(_TEXT))
    logger = logging.getLogger("agentlightning")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    access_logger.setLevel(logging.INFO if access else logging.CRITICAL)


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
