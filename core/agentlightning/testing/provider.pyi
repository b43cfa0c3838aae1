"""Conformance tests for providers of the gateway."""

from agentlightning_plugins.gateway.testing import ProviderConformance as ProviderConformance
