"""Python imports this before a program that ``agl trace`` runs, because its folder is first in PYTHONPATH."""

import contextlib
import importlib
import os
import sys

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120 # pathlib would slow down every child process
if __name__ == "sitecustomize":
    own = sys.modules.pop("sitecustomize")
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # the environment's own
    sys.modules.setdefault("sitecustomize", own)  # without an entry, the import of this file fails
if os.environ.get("AGL_TRACE_FILE"):
    try:
        from agentlightning_plugins.commands.trace import start_recording
    except ImportError as error:
        sys.stderr.write(f"agl trace: {sys.executable} records nothing, because lightning is not installed: {error}\n")
    else:
        start_recording(os.environ["AGL_TRACE_FILE"])
