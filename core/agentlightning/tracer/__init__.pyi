"""Tracers: record agents as spans of their attempts."""

from agentlightning.tracer.tracer import OpenSpan as OpenSpan
from agentlightning.tracer.tracer import Trace as Trace
from agentlightning.tracer.tracer import Tracer as Tracer
from agentlightning.tracer.tracer import get_active_tracer as get_active_tracer
from agentlightning_plugins.tracers.agentops.tracer import AgentOpsTracer as AgentOpsTracer
from agentlightning_plugins.tracers.dummy import DummyTracer as DummyTracer
from agentlightning_plugins.tracers.openinference.tracer import OpenInferenceTracer as OpenInferenceTracer
from agentlightning_plugins.tracers.shared.processor import LightningSpanProcessor as LightningSpanProcessor
from agentlightning_plugins.tracers.shared.tracer import OtelTracer as OtelTracer
