"""Conformance tests for authors of stores, tracers and integrations. Import from its modules."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.store", f"{__name__}.tracer", "agentlightning_plugins.shared.agent_testing")
