"""The dataset that verl reads: indices. Tasks are any Python objects and stay with the algorithm."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import Dataset

PREFIX: Final = "indices:"


class IndexDataset(Dataset[dict[str, Any]]):  # type: ignore[misc] # mypy does not read torch
    """One item per task: its ``index``, and the other fields that verl reads of every item."""

    def __init__(self, data_files: Any, **_: Any) -> None:
        """Called by verl; ``data_files`` is ``indices:N`` for N tasks."""
        text = str(data_files if isinstance(data_files, str) else data_files[0])
        self._size = int(text.removeprefix(PREFIX))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "raw_prompt": [{"role": "user", "content": str(index)}],
            "data_source": "tasks",
            "reward_model": {"style": "agent", "ground_truth": ""},
            "extra_info": {"index": index},
        }
