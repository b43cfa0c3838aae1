"""The dataset that verl sees: positions. Tasks are any Python objects and stay with the algorithm."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import Dataset

PREFIX: Final = "positions:"


class PositionDataset(Dataset[dict[str, Any]]):
    """As many rows as there are tasks; ``index`` says which, the rest is what verl reads of every row."""

    def __init__(self, data_files: Any, **_: Any) -> None:
        """As verl calls it.

        Args:
            data_files: ``positions:N`` for N rows.
        """
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
