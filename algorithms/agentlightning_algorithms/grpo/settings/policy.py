"""Settings of a policy in a run that trains several policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pydantic import ConfigDict

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.settings.lora import LoraSettings
from agentlightning_algorithms.grpo.settings.update import UpdateSettings

_RESERVED: Final = (
    "policy", "drift", "errors", "outcome", "resources", "reward", "rewards", "rollout", "sampler", "staleness",
    "test", "val",
)  # fmt: skip
"""Names taken by the base model, by metrics of the whole run and by parameters of agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """One of several policies: a LoRA adapter over the model that all of them share.

    Attributes:
        lora: settings of the policy's adapter; None: the run's ``lora``.
        update: settings of the policy's weight updates; None: the run's ``update``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lora: LoraSettings | None = None
    update: UpdateSettings | None = None


def complete_policies(
    policies: Mapping[str, PolicySettings | None], lora: LoraSettings | None, update: UpdateSettings
) -> dict[str, PolicySettings]:
    """Returns the settings of each policy with every None filled in; the temperature is always that of ``update``.

    Raises:
        ConfigError: there is no policy, a name cannot be used, or a policy has no LoRA settings.
    """
    if not policies:
        raise ConfigError("policies is empty; name at least one, as in policies: {writer: {}, reviewer: {}}")
    found = {}
    for name, given in policies.items():
        if not name.isidentifier() or name in _RESERVED:
            raise ConfigError(
                f"policies: {name!r} cannot be the name of a policy; agents request the resource by this name, so use "
                f"a Python identifier other than {', '.join(_RESERVED)}"
            )
        own = given or PolicySettings()
        if own.lora is None and lora is None:
            raise ConfigError(
                f"policies: {name} has no lora; several policies must be LoRA adapters over one model, because each "
                "would otherwise need its own model and server. Set lora: {rank: 16}"
            )
        own_update = own.update or update
        total = own_update.total_updates or update.total_updates
        own_update = replace(own_update, temperature=update.temperature, total_updates=total)
        found[name] = PolicySettings(lora=own.lora or lora, update=own_update)
    return found
