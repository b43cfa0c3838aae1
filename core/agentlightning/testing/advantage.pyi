"""Conformance tests for estimators of advantages."""

from agentlightning_algorithms.shared.testing.advantage import AdvantageConformance as AdvantageConformance
from agentlightning_algorithms.shared.testing.advantage import score as score
