"""Serves the names of Agent Lightning 0.3 in addition to ours; docs/migration.md lists them all."""

from __future__ import annotations

import enum
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import agentlightning as agl
from agentlightning import semconv
from agentlightning.errors import suggest

_HERE: Final = "agentlightning_plugins.legacy.compat"
S = TypeVar("S")

_MOVED: Final[Mapping[str, str]] = {
    "": "llm_proxy logging utils",
    "adapter": "adapter.base adapter.messages",
    "algorithm": "algorithm.apo algorithm.apo.apo algorithm.base algorithm.fast algorithm.verl "
    "algorithm.verl.interface verl verl.async_server verl.daemon verl.dataset verl.entrypoint verl.trainer",
    "emitter": "emitter.annotation emitter.exception emitter.message emitter.object",
    "execution": "execution.base execution.client_server execution.shared_memory",
    "litagent": "litagent.decorator litagent.litagent",
    "reward": "emitter.reward",
    "runner": "runner.agent runner.base",
    "semconv": "utils.otel",
    "store": "store.base store.client_server store.memory store.threading",
    "tracer": "tracer.agentops tracer.base tracer.otel",
    "trainer": "trainer.trainer",
    "types": "types.core types.resources types.tracer",
}
MODULES: Final[Mapping[str, str]] = {old: new for new, moved in _MOVED.items() for old in moved.split()}
"""Each module of 0.3 that no longer exists, and the module that has its names now; relative to ``agentlightning``."""

_SAME: Final = (
    *("emit_annotation", "emit_reward", "find_final_reward", "find_reward_spans", "get_reward_value"),
    *("get_rewards_from_span", "is_reward_span"),
)
_SPANS: Final = ("ANNOTATION", "EXCEPTION", "MESSAGE", "OBJECT", "OPERATION", "REWARD", "VIRTUAL")
_INSTEAD: Final = {
    "LightningStoreThreaded": "the store itself, which is thread-safe",
    "LightningSpanAttributes": "the constants of agentlightning.semconv",
    "LightningResourceAttributes": "the constants of agentlightning.semconv",
    "LinkAttributes": "agentlightning.semconv.link_attributes",
    "RewardAttributes": "agentlightning.emit_reward",
    "LinkPydanticModel": "agentlightning.semconv.read_links",
    "extract_links_from_attributes": "agentlightning.semconv.read_links",
    "extract_tags_from_attributes": "agentlightning.semconv.read_tags",
    "query_linked_spans": "agentlightning.semconv.read_links",
}
"""The names that this plugin implements, and what warnings recommend instead of them."""
NAMES: Final[Mapping[str, str]] = {
    **{name: f"{_HERE}.{name}" for name in _INSTEAD},
    **{name: f"agentlightning.{name}" for name in _SAME},
    **{f"AGL_{name}": f"agentlightning.semconv.SPAN_{name}" for name in _SPANS},
    **dict.fromkeys(
        ("configure_logger", "setup", "setup_module", "setup_module_logging"), "agentlightning.setup_logging"
    ),
    "BaseAlgorithm": "agentlightning.Algorithm",
    "BaseRunner": "agentlightning.Runner",
    "BaseTraceAdapter": "agentlightning.TraceAdapter",
    "BaseTracer": "agentlightning.Tracer",
    "RewardPydanticModel": "agentlightning.reward.Reward",
    "RolloutRawResultV2": "agentlightning.RolloutRawResult",
    "RolloutV2": "agentlightning.Rollout",
    "UNSET": "agentlightning.types.UNSET",
    "Unset": "agentlightning.types.Unset",
    "make_link_attributes": "agentlightning.semconv.link_attributes",
    "make_tag_attributes": "agentlightning.semconv.tag_attributes",
}
"""Names of 0.3 that have changed, whatever their module, and the current target of each."""


def _constants(name: str, members: str) -> Any:
    """Returns an enumeration of constants of ``semconv``."""
    make: Any = enum.Enum
    return make(name, {member: getattr(semconv, member) for member in members.split()})


LightningSpanAttributes: Final = _constants(
    "LightningSpanAttributes",
    "REWARD LINK TAG MESSAGE_BODY OBJECT_TYPE OBJECT_LITERAL OBJECT_JSON "
    "OPERATION_NAME OPERATION_INPUT OPERATION_OUTPUT",
)
LightningResourceAttributes: Final = _constants(
    "LightningResourceAttributes", "ROLLOUT_ID ATTEMPT_ID SPAN_SEQUENCE_ID TRACER_NAME"
)
LinkAttributes = enum.Enum("LinkAttributes", {"KEY_MATCH": "key_match", "VALUE_MATCH": "value_match"})
RewardAttributes = enum.Enum("RewardAttributes", {"REWARD_NAME": "name", "REWARD_VALUE": "value"})


class LinkPydanticModel(NamedTuple):
    """A reference to another span."""

    key_match: str
    value_match: Any


def LightningStoreThreaded(store: agl.LightningStore) -> agl.LightningStore:  # it was a class
    """Returns the store, which is thread-safe."""
    return store


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Returns the tags among the attributes of a span."""
    return semconv.read_tags(agl.Span.from_attributes(attributes=attributes))


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """Returns the links among the attributes of a span."""
    return [LinkPydanticModel(*link) for link in semconv.read_links(agl.Span.from_attributes(attributes=attributes))]


def query_linked_spans(spans: Sequence[S], links: Iterable[LinkPydanticModel]) -> list[S]:
    """Returns the spans that all links match; the keys ``trace_id`` and ``span_id`` mean the span's own ids.

    The spans are ours or OpenTelemetry's.
    """
    wanted = dict(links)

    def read(span: Any, key: str) -> Any:
        if key not in ("trace_id", "span_id"):
            return (span.attributes or {}).get(key)
        if isinstance(span, agl.Span):
            return getattr(span, key)
        return format(getattr(span.get_span_context(), key), "032x" if key == "trace_id" else "016x")

    return [span for span in spans if all(read(span, key) == value for key, value in wanted.items())]


class _CallableBool(int):
    """The value of the property ``proxy.is_running``, which programs for 0.3 call as a method."""

    def __call__(self) -> bool:
        _warn("LLMProxy.is_running()", "LLMProxy.is_running")
        return bool(self)


class _OldModule(types.ModuleType):
    """A module of 0.3 whose names are now in another module."""

    def __init__(self, name: str, new: str) -> None:
        super().__init__(name, f"Provides the names of {new}.")
        self.__dict__["_new"] = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _find(self.__name__, self.__dict__["_new"], name)


def install() -> None:
    """Adds the names; calling it again does nothing."""
    if "agentlightning.llm_proxy" in sys.modules:
        return
    for old, new in MODULES.items():
        _add_module(f"agentlightning.{old}", ".".join(filter(None, ("agentlightning", new))))
    for name in ("", ".emitter", ".reward", ".semconv", ".types", ".store", ".tracer", ".litagent"):
        _extend_module(importlib.import_module(f"agentlightning{name}"))
    _wrap_constructor(agl.Trainer, _convert_trainer)
    _wrap_constructor(agl.LightningStoreClient, _convert_client)
    for store in (agl.InMemoryLightningStore, agl.LightningStoreClient):
        _rename_requests(store)
    setattr(agl.LitAgent, "__init__", _init_agent)  # noqa: B010 # a type checker refuses the assignment
    proxy: Any = agl.LLMProxy
    is_running = proxy.is_running.fget
    proxy.is_running = property(lambda self: _CallableBool(is_running(self)))
    proxy.set_store = _set_store
    proxy.restart = _restart


def _add_module(old: str, new: str) -> None:
    module = _OldModule(old, new)
    sys.modules[old] = module
    parent, _, name = old.rpartition(".")
    setattr(sys.modules.get(parent) or importlib.import_module(parent), name, module)


def _extend_module(module: types.ModuleType) -> None:
    """Makes a module serve the ``NAMES`` that it does not have."""
    previous = getattr(module, "__getattr__", None)

    def __getattr__(name: str) -> Any:
        if previous is not None:
            try:
                return previous(name)
            except AttributeError:
                if name not in NAMES:
                    raise
        if name not in NAMES:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return _find(module.__name__, module.__name__, name)

    cast(Any, module).__getattr__ = __getattr__


def _find(old: str, new: str, name: str) -> Any:
    """Returns the value of a name of 0.3 and warns with its current name."""
    target = f"{new}.{name}"
    if name in NAMES and (old == new or not _has(new, name)):
        target = NAMES[name]
    elif not _has(new, name):
        known = [*NAMES, *dir(importlib.import_module(new))]
        raise AttributeError(
            f"{old} of 0.3 had no {name!r}, or it was removed.{suggest(name, known)} See docs/migration.md"
        )
    is_ours = target.startswith(new) and _has("agentlightning", name)
    _warn(f"{old}.{name}", _INSTEAD.get(name, f"agentlightning.{name}" if is_ours else target))
    module, _, attribute = target.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _has(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return name in getattr(found, "__all__", ()) or name in vars(found)


def _warn(old: str, new: str) -> None:
    """Warns at the first line outside this file, unless the import system only checks that a name exists."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    if not frame.f_code.co_filename.startswith("<frozen importlib"):
        warnings.warn(f"{old} is of Agent Lightning 0.3; use {new}", DeprecationWarning, stacklevel=level)


def _wrap_constructor(cls: type, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    original: Callable[..., None] = cls.__init__  # type: ignore[misc] # the constructor of this very class

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **convert(kwargs))

    setattr(cls, "__init__", __init__)  # noqa: B010 # a type checker refuses the assignment


def _init_agent(agent: Any, *, trained_agents: str | None = None) -> None:
    agent.trained_agents = trained_agents
    if trained_agents is not None:
        _warn("LitAgent(trained_agents=)", 'Trainer(adapter={"agent_match": ...})')


def _convert_trainer(kwargs: dict[str, Any]) -> dict[str, Any]:
    renamed = {"n_workers": "n_runners", "max_tasks": "max_rollouts", "triplet_exporter": "adapter"}
    ignored = {"daemon": "Trainer() without it", "dev": "Trainer.dev(agent, tasks)"}
    result: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in ignored:
            _warn(f"Trainer({name}=)", ignored[name])
            continue
        if name in renamed:
            _warn(f"Trainer({name}=)", f"Trainer({renamed[name]}=)")
        if isinstance(value, Mapping) and "type" in value and name != "initial_resources":
            _warn(f'Trainer({name}={{"type": ...}})', '{"name": ...}')
            value = {"name" if key == "type" else key: setting for key, setting in value.items()}
        result[renamed.get(name, name)] = value
    return result


def _rename_requests(store: type[agl.LightningStore]) -> None:
    original = store.enqueue_many_rollouts

    async def enqueue_many_rollouts(self: Any, requests: Any = None, *, rollouts: Any = None) -> Sequence[agl.Rollout]:
        if rollouts is not None:
            _warn("enqueue_many_rollouts(rollouts=)", "enqueue_many_rollouts(requests)")
        return await original(self, requests if rollouts is None else rollouts)

    setattr(store, "enqueue_many_rollouts", enqueue_many_rollouts)  # noqa: B010 # as above


def _convert_client(kwargs: dict[str, Any]) -> dict[str, Any]:
    ignored = ("retry_delays", "health_retry_delays", "request_timeout", "connection_timeout")
    for name in set(ignored) & kwargs.keys():
        _warn(f"LightningStoreClient({name}=)", "LightningStoreClient(retry_s=)")
    result = {name: value for name, value in kwargs.items() if name not in ignored}
    if "server_address" in result:
        _warn("LightningStoreClient(server_address=)", "LightningStoreClient(url)")
        result["url"] = result.pop("server_address").removesuffix("/v1/agl")
    return result


def _set_store(proxy: Any, store: agl.LightningStore) -> None:
    _warn("LLMProxy.set_store(store)", "LLMProxy.store = store")
    proxy.store = store


async def _restart(proxy: Any) -> None:
    _warn("LLMProxy.restart()", "await proxy.stop(), then await proxy.start()")
    await proxy.stop()
    await proxy.start()
