"""Settings of a policy, where a run trains several at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pydantic import ConfigDict

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.lora_setting import LoraSettings
from agentlightning_algorithms.grpo.update_setting import UpdateSettings

_RESERVED: Final = (
    "policy", "drift", "errors", "outcome", "resources", "reward", "rewards", "rollout", "sampler", "staleness",
    "test", "val",
)  # fmt: skip
"""Names that the base model, metrics of the whole run and parameters of agents have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """One of several policies: a LoRA adapter over the model that all of them share.

    Attributes:
        lora: its adapter; None: as the run's ``lora``.
        update: its weight updates; None: as the run's ``update``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lora: LoraSettings | None = None
    update: UpdateSettings | None = None


def complete_policies(
    policies: Mapping[str, PolicySettings | None], lora: LoraSettings | None, update: UpdateSettings
) -> dict[str, PolicySettings]:
    """Returns the settings of each policy without None; temperature and total updates are those of the run's update.

    Raises:
        ConfigError: no policy, a name that cannot be used, or a policy without LoRA.
    """
    if not policies:
        raise ConfigError("policies is empty; name at least one, as in policies: {writer: {}, reviewer: {}}")
    found = {}
    for name, given in policies.items():
        if not name.isidentifier() or name in _RESERVED:
            raise ConfigError(
                f"policies: {name!r} cannot be the name of a policy; take a Python identifier, by which agents ask for "
                f"the resource, other than {', '.join(_RESERVED)}"
            )
        own = given or PolicySettings()
        if own.lora is None and lora is None:
            raise ConfigError(
                f"policies: {name} has no lora; several policies are LoRA adapters over one model, because each would "
                "otherwise need a model and a server of its own. Set lora: {rank: 16}"
            )
        own_update = own.update or update
        total = own_update.total_updates or update.total_updates
        own_update = replace(own_update, temperature=update.temperature, total_updates=total)
        found[name] = PolicySettings(lora=own.lora or lora, update=own_update)
    return found
