"""The policy that training is not to leave: as it was, or as it was on average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agentlightning.errors import ConfigError


class Reference:
    """Earlier values of the trained parameters, put in their place while the reference is asked.

    One copy of what is trained is all it costs; with LoRA that is next to nothing.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float | None = None) -> None:
        """Remembers the parameters as they are.

        Args:
            parameters: those that are trained.
            decay: after each update the reference becomes decay * reference + (1 - decay) * parameters, as the teacher
                of Tarvainen and Valpola 2017, arXiv:1703.01780; None: it stays.
        """
        self._parameters = parameters
        self._decay = decay
        self._values = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the model the reference until the block ends."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def follow(self) -> None:
        """Moves an averaging reference one update on."""
        if self._decay is not None:
            with torch.no_grad():
                for value, parameter in zip(self._values, self._parameters, strict=True):
                    value.lerp_(parameter, 1.0 - self._decay)

    def state(self) -> list[Tensor]:
        """What a checkpoint has to keep."""
        return self._values

    def restore(self, values: Sequence[Tensor]) -> None:
        """Takes back what ``state`` gave.

        Raises:
            ConfigError: it is of another model.
        """
        if [v.shape for v in values] != [v.shape for v in self._values]:
            raise ConfigError("the checkpoint's reference is of another model; resume with the settings it began with.")
        for own, value in zip(self._values, values, strict=True):
            own.copy_(value)

    def _swap(self) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.data, self._values[i] = self._values[i], parameter.data
