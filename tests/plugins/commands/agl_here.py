"""`agl` in this process, which takes a tenth of the time of a separate process."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from agentlightning.cli import main


class Said(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def run_here(folder: Path, *arguments: str, module: str = "my_agents") -> Said:
    """Runs a command in ``folder``; the user's ``module`` is imported again."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    logger = logging.getLogger("agentlightning")  # restored, because fixtures of a module may call this too
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["agl", *arguments])
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(os, "environ", os.environ.copy())
        sys.modules.pop(module, None)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.modules.pop(module, None)
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
    return Said(code, out.getvalue(), err.getvalue())
