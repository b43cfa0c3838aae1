"""Conformance tests for environments."""

from agentlightning_plugins.shared.environments.episode import EnvironmentEpisode as EnvironmentEpisode
from agentlightning_plugins.shared.environments.testing import EnvironmentConformance as EnvironmentConformance
