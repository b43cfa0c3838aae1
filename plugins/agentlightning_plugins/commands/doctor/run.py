"""Runs one rollout in this process, with the gateway, store, tracer and adapter that training uses, and checks it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentlightning import __version__, semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.errors import LightningError
from agentlightning.litagent import LitAgent, wrap
from agentlightning.litagent.function import first_resources
from agentlightning.plugin.registry import GROUP, get_manager
from agentlightning.resources import LLM, Resource, read_resources
from agentlightning.runner import LitAgentRunner
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, RolloutConfig
from agentlightning_plugins.commands.doctor.checks import (
    NAMES,
    Check,
    RolloutChecks,
    broken,
    check_model,
    describe_failure,
    ok,
    one_line,
    unchecked,
)
from agentlightning_plugins.shared.configuration.assembly import load_agent
from agentlightning_plugins.shared.configuration.config import AgentConfig, CommandConfig, NamedAgentConfig
from agentlightning_plugins.shared.configuration.sources import load_attribute

if TYPE_CHECKING:
    from agentlightning.tracer.tracer import Tracer
    from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest

logger = logging.getLogger("agentlightning")
_SCRIPTED: Final = "scripted"
_DEMO: Final = "demo"
_DEMO_TASK: Final = {"question": "Tom has 3 apples and gets 4 more. How many apples has Tom now?", "answer": 7}
NO_TASK: Final = object()
"""Value of ``Request.task`` if the user gave no task."""


@dataclass(frozen=True)
class Request:
    """The arguments of ``agl doctor``."""

    agent: str | AgentConfig | CommandConfig | NamedAgentConfig
    """``module:attribute``, ``path/to/file.py:attribute``, ``demo``, or the agent section of a configuration."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server; None uses a scripted server."""
    model: str | None = None
    """Name of the model; None selects the first model that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    gateway_store: str | None = None
    """URL of the store of an `agl gateway`, if that is the endpoint."""
    task: Any = NO_TASK
    reward: str | None = None
    """Reward function, as ``module:function``."""
    resources: Mapping[str, Resource | str] = field(default_factory=dict)
    """The agent's resources, by name; calls to any ``LLM`` go through the gateway."""
    tracer: str = "otel"
    agent_match: str | None = None
    trains_weights: bool = True
    reads_calls: bool = True
    """Whether the algorithm needs the agent's model calls; `baseline` needs rewards only."""
    local_model: str | None = None
    """Directory or hub name of the model that the algorithm samples and trains."""
    timeout_s: float = 60.0


async def run_checks(request: Request) -> list[Check]:
    """Runs every check; after a failure, the checks that depend on it are marked as unchecked."""
    checks = [check_environment()]
    agent, check = _load_agent(request)
    checks.append(check)
    async with contextlib.AsyncExitStack() as stack:
        endpoint, model, check = await _find_endpoint(request, stack)
        checks.append(check)
        if agent is None or model is None:
            return _fill(checks)
        store = create_store("memory://")
        stack.push_async_callback(store.close)
        key = request.api_key if request.gateway_store is None else await _begin_attempt(request.gateway_store, stack)
        proxy = get_manager().get("gateway", "gateway")(
            model_list=[{"model": model, "endpoint": endpoint, "api_key": key or "none"}], store=store, num_retries=0
        )
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        llm = proxy.as_resource(model=model)
        rollout, check = await _roll_out(request, agent, store, llm)
        checks.append(check)
        if rollout is None:
            return _fill(checks)
        await proxy.flush()
        spans = list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))
        adapter = TraceToTriplet(agent_match=request.agent_match)
        update = await store.get_resources_by_id(rollout.resources_id or "")
        rollout_checks = RolloutChecks(
            rollout,
            spans,
            adapter,
            request.endpoint is None,
            request.trains_weights,
            request.reads_calls,
            resources={} if update is None else update.resources,
            server=f"{model} at {endpoint}",
            has_own_task=request.task is not NO_TASK or request.agent == _DEMO,
        )
        was_disabled, logger.disabled = logger.disabled, True  # the log would only repeat the checks
        try:
            checks += rollout_checks.checks()
        finally:
            logger.disabled = was_disabled
        model_check = unchecked("model", "no algorithm of CONFIG samples a model of its own")
        if request.local_model is not None and request.trains_weights:
            calls = [span for span in spans if semconv.is_gateway_call(span)]
            model_check = await asyncio.to_thread(check_model, request.local_model, calls)
        return [*checks, model_check]


async def _begin_attempt(url: str, stack: contextlib.AsyncExitStack) -> str:
    """Starts a rollout of the run ``doctor`` in the store of a gateway, until the stack ends; returns its key."""
    from agentlightning.run import attempt_token  # imports cryptography that few checks need

    store = create_store(url, run="doctor")
    stack.push_async_callback(store.close)
    rollout = await store.start_rollout("agl doctor")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    stack.push_async_callback(store.update_attempt, *ids, status="succeeded")
    return attempt_token.issue(store.token, *ids, store.now())


def _fill(checks: list[Check]) -> list[Check]:
    cause = next(check.name for check in checks if check.state == "broken")
    return checks + [unchecked(name, f"depends on the check {cause!r}") for name in NAMES[len(checks) :]]


def _load_agent(request: Request) -> tuple[LitAgent[Any] | None, Check]:
    spec = "agentlightning_plugins.demo.agent:calculator_agent" if request.agent == _DEMO else request.agent
    try:
        reward = None if request.reward is None else load_attribute(request.reward)
        found = load_attribute(spec) if isinstance(spec, str) else load_agent(spec)
        agent = wrap(found, reward)
        TraceToTriplet(agent_match=request.agent_match)
        get_manager().create("tracer", request.tracer)
        describe = getattr(getattr(agent, "agent", agent), "describe_program", str)
        program = describe()
    except (LightningError, ImportError) as error:
        fix = "make sure that `python -c 'import ...'` of the module works in this environment"
        return None, broken("agent", one_line(error), fix if "importing" in str(error) else "follow the message")
    name = spec if isinstance(spec, str) else getattr(spec, "target", "the command")
    kind = "a function" if type(found).__name__ == "function" else type(found).__name__
    runs = f"; it runs {program}" if program else ""
    return agent, ok("agent", f"{name} is {kind}, {'async' if agent.is_async() else 'sync'}{runs}")


async def _find_endpoint(request: Request, stack: contextlib.AsyncExitStack) -> tuple[str, str | None, Check]:
    if request.endpoint is not None:
        check, model = await check_endpoint(request.endpoint, request.model, request.api_key)
        return request.endpoint, model, check
    from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI

    server = stack.enter_context(ScriptedOpenAI(answer_request))
    said = "a scripted server answers; to check your own model server: --endpoint URL"
    return server.endpoint, request.model or _SCRIPTED, ok("endpoint", said)


async def _roll_out(
    request: Request, agent: LitAgent[Any], store: LightningStore, llm: Resource
) -> tuple[AttemptedRollout | None, Check]:
    task = request.task
    if task is NO_TASK:
        task = _DEMO_TASK if request.agent == _DEMO else "Say hello."
    try:
        tracer: Tracer = get_manager().create("tracer", request.tracer)
        given = first_resources(agent, read_resources(request.resources)) or {}
        models = [name for name, resource in given.items() if isinstance(resource, LLM)]
        resources = {**given, **dict.fromkeys(models or ["llm"], llm)}
    except LightningError as error:
        return None, broken("rollout", one_line(error), "follow the message")
    resources_id = (await store.add_resources(resources)).resources_id
    runner: LitAgentRunner[Any] = LitAgentRunner(tracer, max_rollouts=1)
    with runner.run_context(agent=agent, store=store):
        config = RolloutConfig(timeout_seconds=request.timeout_s)
        queued = await store.enqueue_rollout(task, mode="train", resources_id=resources_id, config=config)
        with contextlib.suppress(TimeoutError):  # the agent cannot be stopped, but the attempt has ended
            await asyncio.wait_for(runner.iter(), request.timeout_s + 10.0)
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert isinstance(rollout, AttemptedRollout), "it was dequeued"
    if rollout.status == "succeeded":
        return rollout, ok("rollout", f"the agent ran on the task {one_line(repr(task), 80)}")
    return rollout, broken("rollout", describe_failure(rollout), _suggest_fix(request, rollout, task))


def _suggest_fix(request: Request, rollout: AttemptedRollout, task: Any) -> str:
    error = rollout.attempt.error
    message = "" if error is None else error.message
    if "but no resource has this name" in message:
        return "give the missing prompt: --resource NAME=TEXT"
    if rollout.attempt.status == "timeout":
        return "raise --timeout, or find out what the agent waits for"
    if urllib.request.getproxies().keys() & {"http", "https", "all"} and re.search(
        "connect|proxy|50[234]", message, re.IGNORECASE
    ):
        return (
            "the environment has a proxy, and the agent's client may use it for the gateway on this machine: make "
            "the client in the agent's function, or start with NO_PROXY=127.0.0.1,localhost. If the error names a "
            "server and its proxy, the proxy does not reach that server: add it to NO_PROXY"
        )
    if request.task is NO_TASK and request.agent != _DEMO:
        return f"the task was {task!r}; give a task that the agent accepts, as JSON or text: --task ..."
    return "fix the agent; the log above has its traceback"


_TIMEOUT_S: Final = 10.0
_EXAMPLES: Final[dict[str, Any]] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


async def check_endpoint(endpoint: str, model: str | None, api_key: str | None) -> tuple[Check, str | None]:
    """Lists a server's models, which costs nothing; returns the check and the model to use, None if it failed."""
    try:
        models = await asyncio.to_thread(_list_models, endpoint, api_key)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            said = f"{endpoint} refuses the key ({error.code} {error.reason})"
            return broken("endpoint", said, "give a valid key: --api-key, or OPENAI_API_KEY"), None
        if error.code == 404 and model is not None:  # not every server has a list
            return ok("endpoint", f"{endpoint} answers, but lists no models; using {model}"), model
        said = f"{endpoint}/models answers {error.code} {error.reason}"
        return broken("endpoint", said, _suggest_url(endpoint)), None
    except OSError as error:
        said = f"{endpoint} cannot be reached: {one_line(getattr(error, 'reason', error))}"
        return broken("endpoint", said, "start the model server, or give another --endpoint"), None
    except (ValueError, http.client.HTTPException) as error:
        said = f"{endpoint}/models is not an OpenAI-compatible server: {one_line(error)}"
        return broken("endpoint", said, _suggest_url(endpoint)), None
    if model is None and not models:
        return broken("endpoint", f"{endpoint} serves no model", "load a model there, or name one with --model"), None
    if model is not None and models and model not in models:
        said = f"{endpoint} has no model {model!r}; it has: {', '.join(models[:10])}"
        return broken("endpoint", said, "name one of them with --model"), None
    chosen = model or models[0]
    return ok("endpoint", f"{endpoint} answers; model {chosen}"), chosen


def _suggest_url(endpoint: str) -> str:
    if endpoint.rstrip("/").endswith("/v1"):
        return "give the base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"
    return "the base URL usually ends in /v1, such as http://127.0.0.1:8000/v1"


def _list_models(endpoint: str, api_key: str | None) -> list[str]:
    request = urllib.request.Request(endpoint.rstrip("/") + "/models")  # noqa: S310 # the user's own endpoint
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 # as above
        answer = json.load(response)
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        raise ValueError("the response is not a list of models")
    return [str(item["id"]) for item in data if isinstance(item, dict) and "id" in item]


def answer_request(request: RecordedRequest) -> Answer:
    """Answers as the scripted server: calls the first tool once, with valid arguments, then replies with text.

    The text is JSON if the request asks for it, and follows the schema.
    """
    from agentlightning_plugins.shared.scripted_model.server import Answer

    tools = request.body.get("tools") or ()
    messages = request.body.get("messages") or ()
    has_called = any(message.get("role") == "tool" for message in messages)
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    if functions and not has_called:
        function = functions[0]
        return Answer(tool_calls=[(function["name"], _example(function.get("parameters") or {}))])
    form = request.body.get("response_format") or (request.body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        return Answer(json.dumps(_example(form.get("json_schema", form).get("schema") or {})))
    return Answer("{}" if form.get("type") == "json_object" else "This is a scripted answer.")


def _example(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Returns a value that is valid under a JSON schema; supports the keywords that tool parameters use.

    References are resolved in ``root``, by default the schema itself.
    """
    root = schema if root is None else root
    if "$ref" in schema:
        return _example(functools.reduce(lambda node, key: node[key], schema["$ref"].split("/")[1:], root), root)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _example(options[0], root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = schema.get("required", properties)
        return {name: _example(value, root) for name, value in properties.items() if name in wanted}
    if kind == "array":
        return [_example(schema.get("items") or {}, root)] * schema.get("minItems", 0)
    return _EXAMPLES.get(kind, "1")


_OURS = "lightning"
_OWN_PLACE = "the two cannot share an environment: create a new one, and install this Lightning there from its checkout"


def check_environment() -> Check:
    """Looks for conflicting distributions, unsupported versions and broken plugins."""
    foreign = _find_foreign()
    if foreign is not None:
        return broken("environment", foreign, _OWN_PLACE)
    if wrong := list(_find_wrong_versions()):
        return broken("environment", "; ".join(sorted(set(wrong))), "install the required versions")
    plugins = get_manager().plugins.values()
    faulty = [
        f"{plugin.name} of {plugin.origin}: {plugin.error}"
        for plugin in plugins
        if plugin.state in ("broken", "refused")
    ]
    if faulty:
        return broken(
            "environment", one_line("plugins cannot be loaded: " + "; ".join(faulty)), "repair or uninstall them"
        )
    python = ".".join(map(str, sys.version_info[:3]))
    return ok("environment", f"Python {python}, Lightning {__version__}, {len(plugins)} plugins")


def _find_foreign() -> str | None:
    """Finds PyTorch Lightning, which has the same distribution name."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and canonicalize_name(name) == _OURS and not any(p.group == GROUP for p in distribution.entry_points):
            return f"PyTorch Lightning (distribution lightning {distribution.version}) is installed here"
    if importlib.util.find_spec(_OURS) is not None:
        return "a module named lightning can be imported; it belongs to PyTorch Lightning, not to this package"
    return None


def _find_wrong_versions() -> Iterator[str]:
    """Yields each installed distribution whose version this package, or an extra that uses it, does not support."""
    distributions = (plugin.distribution for plugin in get_manager().plugins.values())
    ours = next((d for d in distributions if d is not None and canonicalize_name(d.name) == _OURS), None)
    if ours is None:
        return
    by_extra: dict[str, list[Requirement]] = {"": []}
    for requirement in map(Requirement, ours.requires or ()):
        for extra in ("", *(ours.metadata.get_all("Provides-Extra") or ())):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                by_extra.setdefault(extra, []).append(requirement)
                if requirement.marker is None or not extra:
                    break
    users = Counter(each.name for extra, needed in by_extra.items() for each in needed if extra not in ("all", "demo"))
    for extra, needed in by_extra.items():
        installed = {each.name: version for each in needed if (version := _find_version(each.name)) is not None}
        missing = [each.name for each in needed if each.name not in installed]
        if not extra:
            yield from (f"{name} is missing" for name in missing)
        for each in needed:  # openai is wrong for an extra only if the rest of the extra is there too
            is_used = each.name in installed and (not extra or not missing or users[each.name] == 1)
            if is_used and not each.specifier.contains(installed[each.name], prereleases=True):
                yield f"{each.name} {installed[each.name]} is installed, but {each.specifier} is required"


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
