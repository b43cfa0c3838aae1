"""Conformance tests for dialects of the gateway."""

from agentlightning_plugins.gateway.testing import DialectConformance as DialectConformance
