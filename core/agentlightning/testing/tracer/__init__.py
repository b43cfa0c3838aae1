"""Conformance tests for tracers.

Use them like this::

    class TestMyTracer(TracerConformance):
        @pytest.fixture
        def tracer(self):
            return MyTracer()
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.delivery", f"{__name__}.shape", f"{__name__}.fixtures")

from agentlightning.testing.tracer.delivery import DeliveryTests  # noqa: E402 # after the registration of its imports
from agentlightning.testing.tracer.shape import ShapeTests  # noqa: E402 # as above

__all__ = ["TracerConformance"]


@pytest.mark.asyncio
class TracerConformance(ShapeTests, DeliveryTests):
    """Tests that every tracer must pass.

    Subclass it and define one fixture, ``tracer``: a new tracer, before ``init``. Tests are asynchronous and need
    ``pytest-asyncio``, in either of its modes.
    """
