"""The model that tests of algorithms train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.algorithms.tiny_model import save_tiny_model

if TYPE_CHECKING:
    from agentlightning_algorithms.shared.policy.model import Policy


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that ``from_pretrained`` reads; copy it before you change it."""
    directory = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(directory)
    return directory


@pytest.fixture
def tiny_policy(tiny_model: Path) -> Policy:
    """A fresh policy over :func:`tiny_model`."""
    import torch

    from agentlightning_algorithms.shared.policy.model import load_policy

    torch.set_num_threads(1)
    return load_policy(tiny_model)


@pytest.fixture(scope="module")
def server_thread() -> Iterator[None]:
    """Makes a thread of each policy server that the tests of a module start."""
    from tests.algorithms.server_thread import threads_for_servers

    with threads_for_servers():
        yield
