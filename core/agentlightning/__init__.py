"""Lightning makes AI agents that already exist better: ``import agentlightning as agl``.

Nothing is imported until it is used: ``agl.Trainer`` loads the trainer, ``agl.GRPO`` asks the plugins for it.
"""

from typing import TYPE_CHECKING

from agentlightning.facade import resolve_lazily
from agentlightning.version import __version__ as __version__

if TYPE_CHECKING:
    from agentlightning import semconv as semconv
    from agentlightning.adapter import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
    from agentlightning.adapter import TraceAdapter as TraceAdapter
    from agentlightning.adapter import TracerTraceToTriplet as TracerTraceToTriplet
    from agentlightning.adapter import TraceToMessages as TraceToMessages
    from agentlightning.adapter import TraceToTriplet as TraceToTriplet
    from agentlightning.algorithm import APO as APO
    from agentlightning.algorithm import GEPA as GEPA
    from agentlightning.algorithm import GRPO as GRPO
    from agentlightning.algorithm import VERL as VERL
    from agentlightning.algorithm import Algorithm as Algorithm
    from agentlightning.algorithm import Baseline as Baseline
    from agentlightning.algorithm import FastAlgorithm as FastAlgorithm
    from agentlightning.algorithm import FunctionalAlgorithm as FunctionalAlgorithm
    from agentlightning.algorithm import LiveLearning as LiveLearning
    from agentlightning.algorithm import RunContext as RunContext
    from agentlightning.algorithm import algo as algo
    from agentlightning.comparison import Comparison as Comparison
    from agentlightning.comparison import compare_rollouts as compare_rollouts
    from agentlightning.emitter import emit_annotation as emit_annotation
    from agentlightning.emitter import emit_exception as emit_exception
    from agentlightning.emitter import emit_message as emit_message
    from agentlightning.emitter import emit_object as emit_object
    from agentlightning.emitter import emit_reward as emit_reward
    from agentlightning.emitter import operation as operation
    from agentlightning.errors import AdapterError as AdapterError
    from agentlightning.errors import ConfigError as ConfigError
    from agentlightning.errors import ConflictError as ConflictError
    from agentlightning.errors import LightningError as LightningError
    from agentlightning.errors import NotFoundError as NotFoundError
    from agentlightning.errors import PluginError as PluginError
    from agentlightning.errors import RolloutError as RolloutError
    from agentlightning.errors import StoreError as StoreError
    from agentlightning.execution import ClientServerExecutionStrategy as ClientServerExecutionStrategy
    from agentlightning.execution import ExecutionStrategy as ExecutionStrategy
    from agentlightning.execution import SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy
    from agentlightning.hook import Hook as Hook
    from agentlightning.hookspecs import Component as Component
    from agentlightning.hookspecs import hookimpl as hookimpl
    from agentlightning.litagent import LitAgent as LitAgent
    from agentlightning.litagent import llm_rollout as llm_rollout
    from agentlightning.litagent import prompt_rollout as prompt_rollout
    from agentlightning.litagent import rollout as rollout
    from agentlightning.litagent import wrap as wrap
    from agentlightning.live import LiveResources as LiveResources
    from agentlightning.logging import setup_logging as setup_logging
    from agentlightning.resources import LLM as LLM
    from agentlightning.resources import NamedResources as NamedResources
    from agentlightning.resources import PromptTemplate as PromptTemplate
    from agentlightning.resources import ProxyLLM as ProxyLLM
    from agentlightning.resources import Resource as Resource
    from agentlightning.resources import ResourcesUpdate as ResourcesUpdate
    from agentlightning.reward import find_final_reward as find_final_reward
    from agentlightning.reward import find_reward_spans as find_reward_spans
    from agentlightning.reward import get_reward_value as get_reward_value
    from agentlightning.reward import get_rewards_from_span as get_rewards_from_span
    from agentlightning.reward import is_reward_span as is_reward_span
    from agentlightning.runner import LitAgentRunner as LitAgentRunner
    from agentlightning.runner import Runner as Runner
    from agentlightning.store import InMemoryLightningStore as InMemoryLightningStore
    from agentlightning.store import LightningStore as LightningStore
    from agentlightning.store import LightningStoreClient as LightningStoreClient
    from agentlightning.store import LightningStoreServer as LightningStoreServer
    from agentlightning.store import PostgresLightningStore as PostgresLightningStore
    from agentlightning.store import SqliteLightningStore as SqliteLightningStore
    from agentlightning.store import create_store as create_store
    from agentlightning.tracer import AgentOpsTracer as AgentOpsTracer
    from agentlightning.tracer import DummyTracer as DummyTracer
    from agentlightning.tracer import OtelTracer as OtelTracer
    from agentlightning.tracer import Tracer as Tracer
    from agentlightning.tracer import get_active_tracer as get_active_tracer
    from agentlightning.tracker import Tracker as Tracker
    from agentlightning.trainer import Trainer as Trainer
    from agentlightning.types import Attempt as Attempt
    from agentlightning.types import AttemptedRollout as AttemptedRollout
    from agentlightning.types import AttemptStatus as AttemptStatus
    from agentlightning.types import Dataset as Dataset
    from agentlightning.types import EnqueueRolloutRequest as EnqueueRolloutRequest
    from agentlightning.types import PaginatedResult as PaginatedResult
    from agentlightning.types import Rollout as Rollout
    from agentlightning.types import RolloutConfig as RolloutConfig
    from agentlightning.types import RolloutMode as RolloutMode
    from agentlightning.types import RolloutRawResult as RolloutRawResult
    from agentlightning.types import RolloutStatus as RolloutStatus
    from agentlightning.types import Run as Run
    from agentlightning.types import Span as Span
    from agentlightning.types import TaskInput as TaskInput
    from agentlightning.types import Triplet as Triplet
    from agentlightning.types import Worker as Worker
    from agentlightning.types import WorkerStatus as WorkerStatus
    from agentlightning_plugins.command_agent import CommandAgent as CommandAgent
    from agentlightning_plugins.gateway import LLMProxy as LLMProxy

__all__ = [
    "APO",
    "GEPA",
    "GRPO",
    "LLM",
    "VERL",
    "AdapterError",
    "AgentOpsTracer",
    "Algorithm",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "Baseline",
    "ClientServerExecutionStrategy",
    "CommandAgent",
    "Comparison",
    "Component",
    "ConfigError",
    "ConflictError",
    "Dataset",
    "DummyTracer",
    "EnqueueRolloutRequest",
    "ExecutionStrategy",
    "FastAlgorithm",
    "FunctionalAlgorithm",
    "Hook",
    "InMemoryLightningStore",
    "LLMProxy",
    "LightningError",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "LitAgent",
    "LitAgentRunner",
    "LiveLearning",
    "LiveResources",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "NotFoundError",
    "OtelTracer",
    "PaginatedResult",
    "PluginError",
    "PostgresLightningStore",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutError",
    "RolloutMode",
    "RolloutRawResult",
    "RolloutStatus",
    "Run",
    "RunContext",
    "Runner",
    "SharedMemoryExecutionStrategy",
    "Span",
    "SqliteLightningStore",
    "StoreError",
    "TaskInput",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTriplet",
    "Tracer",
    "TracerTraceToTriplet",
    "Tracker",
    "Trainer",
    "Triplet",
    "Worker",
    "WorkerStatus",
    "__version__",
    "algo",
    "compare_rollouts",
    "create_store",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_active_tracer",
    "get_reward_value",
    "get_rewards_from_span",
    "hookimpl",
    "is_reward_span",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "rollout",
    "semconv",
    "setup_logging",
    "wrap",
]

_HOME = {
    "agentlightning.adapter": (
        "LlmProxyTraceToTriplet",
        "TraceAdapter",
        "TraceToMessages",
        "TraceToTriplet",
        "TracerTraceToTriplet",
    ),
    "agentlightning.algorithm": (
        "APO",
        "Algorithm",
        "Baseline",
        "FastAlgorithm",
        "FunctionalAlgorithm",
        "GEPA",
        "GRPO",
        "LiveLearning",
        "RunContext",
        "VERL",
        "algo",
    ),
    "agentlightning.comparison": (
        "Comparison",
        "compare_rollouts",
    ),
    "agentlightning.emitter": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "operation",
    ),
    "agentlightning.errors": (
        "AdapterError",
        "ConfigError",
        "ConflictError",
        "LightningError",
        "NotFoundError",
        "PluginError",
        "RolloutError",
        "StoreError",
    ),
    "agentlightning.execution": (
        "ClientServerExecutionStrategy",
        "ExecutionStrategy",
        "SharedMemoryExecutionStrategy",
    ),
    "agentlightning.hook": ("Hook",),
    "agentlightning.hookspecs": (
        "Component",
        "hookimpl",
    ),
    "agentlightning.litagent": (
        "LitAgent",
        "llm_rollout",
        "prompt_rollout",
        "rollout",
        "wrap",
    ),
    "agentlightning.live": ("LiveResources",),
    "agentlightning.logging": ("setup_logging",),
    "agentlightning.resources": (
        "LLM",
        "NamedResources",
        "PromptTemplate",
        "ProxyLLM",
        "Resource",
        "ResourcesUpdate",
    ),
    "agentlightning.reward": (
        "find_final_reward",
        "find_reward_spans",
        "get_reward_value",
        "get_rewards_from_span",
        "is_reward_span",
    ),
    "agentlightning.runner": (
        "LitAgentRunner",
        "Runner",
    ),
    "agentlightning.store": (
        "InMemoryLightningStore",
        "LightningStore",
        "LightningStoreClient",
        "LightningStoreServer",
        "PostgresLightningStore",
        "SqliteLightningStore",
        "create_store",
    ),
    "agentlightning.tracer": (
        "AgentOpsTracer",
        "DummyTracer",
        "OtelTracer",
        "Tracer",
        "get_active_tracer",
    ),
    "agentlightning.tracker": ("Tracker",),
    "agentlightning.trainer": ("Trainer",),
    "agentlightning.types": (
        "Attempt",
        "AttemptStatus",
        "AttemptedRollout",
        "Dataset",
        "EnqueueRolloutRequest",
        "PaginatedResult",
        "Rollout",
        "RolloutConfig",
        "RolloutMode",
        "RolloutRawResult",
        "RolloutStatus",
        "Run",
        "Span",
        "TaskInput",
        "Triplet",
        "Worker",
        "WorkerStatus",
    ),
}

__getattr__ = resolve_lazily(
    __name__,
    {
        **{name: module for module, names in _HOME.items() for name in names},
        "CommandAgent": ("agent", "command"),
        "LLMProxy": ("gateway", "gateway"),
        "semconv": "agentlightning.semconv",
    },
)
