"""Settings of LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from agentlightning.plugin.settings import require_least


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters, trained instead of the weights (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
        rank: rank of the adapters.
        alpha: adapters are scaled by alpha / rank; a learning rate about ten times that of full training is usual.
        target_modules: names of the linear layers to adapt; ``all-linear``: all but the output layer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        require_least(1, rank=self.rank)
