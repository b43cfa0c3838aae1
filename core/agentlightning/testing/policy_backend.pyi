"""Conformance tests for policy backends."""

from agentlightning_algorithms.shared.testing.policy_backend import PolicyBackendConformance as PolicyBackendConformance
