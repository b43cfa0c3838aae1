"""Measures the utilization of the machine's GPUs with ``nvidia-smi``."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
from typing import Final

_TOOL: Final = "nvidia-smi"
_QUERY: Final = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class GPUMonitor:
    """Samples this machine's GPUs until :meth:`stop`; without ``nvidia-smi`` it reports nothing."""

    def __init__(self, interval_s: int = 2) -> None:
        """Starts to sample every ``interval_s`` seconds."""
        self._samples: list[tuple[float, float]] = []
        """Utilization in percent, and memory in MiB."""
        self._process: subprocess.Popen[str] | None = None
        tool = shutil.which(_TOOL)
        if tool is not None:
            command = [tool, *_QUERY, f"--loop={interval_s}"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), name="agl-gpu", daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                busy, _, used = line.partition(",")
                with contextlib.suppress(ValueError):  # a GPU may not report a value
                    self._samples.append((float(busy), float(used)))

    def take(self) -> dict[str, float]:
        """Returns the mean utilization and the largest memory use of a GPU since the last call."""
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        busy, used = zip(*samples, strict=True)
        return {"gpu_utilization": statistics.fmean(busy) / 100, "gpu_memory_gb_max": max(used) * 2**20 / 1e9}

    def stop(self) -> None:
        """Stops; may be called at any time."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
