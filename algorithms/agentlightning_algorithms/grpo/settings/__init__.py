"""The settings of ``grpo``, with their checks."""

from agentlightning_algorithms.grpo.settings.grpo import GRPOSettings
from agentlightning_algorithms.grpo.settings.lora import LoraSettings
from agentlightning_algorithms.grpo.settings.policy import PolicySettings
from agentlightning_algorithms.grpo.settings.teacher import TeacherSettings
from agentlightning_algorithms.grpo.settings.update import UpdateSettings

__all__ = ["GRPOSettings", "LoraSettings", "PolicySettings", "TeacherSettings", "UpdateSettings"]
