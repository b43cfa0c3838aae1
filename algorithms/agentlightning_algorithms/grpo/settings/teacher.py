"""Settings of on-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning_algorithms.trained_model.checkpoint import find_model


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """On-policy distillation from a second model (:class:`~agentlightning_algorithms.grpo.learning.teacher.Teacher`).

    Attributes:
        model: the teacher, which must have the policy's tokenizer: a directory, a hub name, or the directory of a run
            that trained it. With an endpoint, the model's name there.
        endpoint: OpenAI base URL of a server that returns ``prompt_logprobs`` as vLLM does; None: the teacher is loaded
            into the training process.
        api_key: API key of the endpoint.
        timeout_s: timeout of a request to the endpoint.
        coefficient: weight of log(teacher / policy) in the advantage of each token.
        reward_coefficient: weight of the advantage that comes from rewards; 0: the policy learns from the teacher only.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: str
    endpoint: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    coefficient: float = 1.0
    reward_coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise ConfigError(f"teacher: coefficient = {self.coefficient}; it must be above 0.")
        require_least(0, reward_coefficient=self.reward_coefficient)
        require_least(0.001, timeout_s=self.timeout_s)
        if self.endpoint is None:
            object.__setattr__(self, "model", find_model(self.model))

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Raises a ConfigError if the teacher cannot score tokens that were sampled with these parameters."""
        if self.endpoint is not None and not (sampling["force"] and sampling["temperature"] == 1):
            raise ConfigError(
                f"teacher: endpoint with sampling: temperature = {sampling['temperature']}, force = "
                f"{sampling['force']}: a server returns log-probabilities at temperature 1 only; set temperature = 1 "
                "and force = true, or leave endpoint out."
            )
