"""What every test may rely on: no key, no download, one thread of arithmetic, a GPU where it says so."""

from __future__ import annotations

import os

import pytest

for name in [name for name in os.environ if name.startswith(("AGL_", "OPENAI_"))]:
    del os.environ[name]  # a developer's own settings and keys must not reach a test
# Set before anything imports them, and inherited by the processes that tests start.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out GPU tests where there is no GPU: the only tests that may be skipped."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
