"""The reference policy of the KL penalty: the initial weights or a moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agentlightning.errors import ConfigError


class Reference:
    """Earlier values of the trained parameters, swapped in while the reference is evaluated.

    The reference needs memory for one copy of the trained parameters; with LoRA that is little.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float | None = None) -> None:
        """Copies the parameters.

        After each update the reference becomes decay * reference + (1 - decay) * parameters, as the teacher of
        Tarvainen and Valpola 2017, arXiv:1703.01780; without ``decay`` it does not change.
        """
        self._parameters = parameters
        self._decay = decay
        self._values = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the reference's weights until the block ends."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def follow(self) -> None:
        """Updates a moving average after an update of the parameters."""
        if self._decay is not None:
            with torch.no_grad():
                for value, parameter in zip(self._values, self._parameters, strict=True):
                    value.lerp_(parameter, 1.0 - self._decay)

    def state(self) -> list[Tensor]:
        """Returns the tensors that a checkpoint stores."""
        return self._values

    def restore(self, values: Sequence[Tensor]) -> None:
        """Restores what :meth:`state` returned; raises a ConfigError if the tensors are of another model."""
        if [v.shape for v in values] != [v.shape for v in self._values]:
            raise ConfigError("the checkpoint's reference is of another model; resume with the original settings.")
        for own, value in zip(self._values, values, strict=True):
            own.copy_(value)

    def _swap(self) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.data, self._values[i] = self._values[i], parameter.data
