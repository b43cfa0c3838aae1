"""Conformance tests for policy losses."""

from agentlightning_algorithms.shared.testing.policy_loss import PolicyLossConformance as PolicyLossConformance
