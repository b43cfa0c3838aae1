"""Conformance tests for environments."""

from agentlightning_plugins.shared.environments.conformance import EnvironmentConformance as EnvironmentConformance
from agentlightning_plugins.shared.environments.episode import Episode as Episode
