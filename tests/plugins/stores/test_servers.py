"""Several store servers over one database: a second one adds throughput."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from tests.benchmarks.bench_servers import GROUPS, measure
from tests.postgresql import running_server

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries


@pytest.mark.soak
async def test_two_servers_have_more_throughput_than_one_and_rarely_wait_for_locks(tmp_path: Path) -> None:
    share = 0.25 if os.access(GROUPS, os.W_OK) else 0.0  # without root: the load and the database share the cores
    ratios = []
    with running_server(Path("/tmp")) as place:
        for _ in range(3):
            one, _ = await measure(place, 1, share, 5.0)
            two, locks = await measure(place, 2, share, 5.0)
            assert locks < 0.05
            ratios.append(two / one)
    assert statistics.median(ratios) >= (1.3 if share else 0.9), ratios
