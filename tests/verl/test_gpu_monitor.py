"""Utilization of GPUs, with a fake ``nvidia-smi``."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from agentlightning_algorithms.verl.metrics import GPUMonitor


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\necho '[N/A], [N/A]'\necho '50, 1000'\necho '100, 2000'\nexec sleep 60\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


def test_the_monitor_reports_mean_utilization_and_largest_memory_over_all_gpus(tool: Path) -> None:
    monitor = GPUMonitor()
    try:
        deadline = time.monotonic() + 60
        while len(monitor._samples) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert monitor.take() == {"gpu_utilization": 0.75, "gpu_memory_gb_max": pytest.approx(2000 * 2**20 / 1e9)}
        assert monitor.take() == {}
    finally:
        monitor.stop()
    assert monitor._process is not None
    assert monitor._process.poll() is not None


def test_without_a_gpu_nothing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monitor = GPUMonitor()
    assert monitor.take() == {}
    monitor.stop()
