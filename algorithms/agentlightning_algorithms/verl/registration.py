"""Registers our rollout backend and platform; verl loads this module through the entry-point group ``verl.plugins``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

if TYPE_CHECKING:
    from verl.workers.rollout.replica import RolloutReplica


def _load_replica() -> type[RolloutReplica]:
    from agentlightning_algorithms.verl.inference.replica import TransformersReplica

    return TransformersReplica


RolloutReplicaRegistry.register("transformers", _load_replica)
_ROLLOUT_REGISTRY["transformers", "async"] = "agentlightning_algorithms.verl.inference.replica.ServerAdapter"

if os.environ.get("VERL_PLATFORM") == "cpu":
    from agentlightning_algorithms.verl import cpu_platform

    cpu_platform.install()
