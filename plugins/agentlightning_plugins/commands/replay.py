"""``agl replay``: repeats a rollout with its recorded model responses."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from agentlightning import semconv
from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.frozen import thaw
from agentlightning.resources import LLM, Resource
from agentlightning.reward import find_final_reward, read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Span
from agentlightning_plugins.shared.instrumentation import Patches
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.terminal import StoreCommand, found, print_result, with_store

if TYPE_CHECKING:
    from agentlightning_plugins.shared.scripted_model.reply import Answer, RecordedRequest


@click.command("replay", cls=StoreCommand)
@click.argument("agent")
@click.argument("rollout_id")
@click.option("--attempt", default="latest", metavar="ID", help="The attempt to replay.")
@click.option("--reward", metavar="MODULE:ATTRIBUTE", help="reward(task, output, rollout), if the agent returns none.")
@with_store
async def command(
    store: LightningStore, agent: str, rollout_id: str, attempt: str, reward: str | None, as_json: bool
) -> None:
    """Run AGENT on a recorded rollout's task with the recorded model responses.

    AGENT is module:attribute, file.py:attribute, or a configuration file of `agl train`. Nothing is written to the
    store, and no model is called: clients that the agent creates itself get the recorded responses too. The agent runs
    in this process, so a debugger works. The exit code is 1 if the agent's requests or its reward differ from the
    recording.
    """
    from agentlightning_plugins.shared.configuration.assembly import load_agent_argument
    from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI

    litagent = load_agent_argument(agent, reward)
    rollout = found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    spans = (await store.query_spans(rollout_id, attempt)).items
    calls = _model_calls(spans)
    answers = iter([_to_answer(call) for call in calls])
    one_more = Answer(status=400, error=f"the recording has {len(calls)} model calls, and this is one more")
    update = None if rollout.resources_id is None else await store.get_resources_by_id(rollout.resources_id)
    resources = {} if update is None else update.resources
    with ScriptedOpenAI(lambda _: next(answers, one_more)) as server:
        replayed, rewards = await _run(litagent, rollout, resources, server.endpoint)
        requests = server.requests
    differences = list(_compare(calls, requests))
    before = find_final_reward(spans)
    if before != rewards:
        differences.append(f"reward: {before} then, {rewards} now")
    error = replayed.attempt.error if isinstance(replayed, AttemptedRollout) else None
    if error is not None:
        echo(error.traceback.rstrip(), err=True)
    result: dict[str, Any] = {
        "status": replayed.status,
        "reward": rewards,
        "recorded_reward": before,
        "calls": len(requests),
    }
    result |= {"recorded_calls": len(calls), "differences": differences}
    said = f"{replayed.status}, reward {rewards}, {len(requests)} of {len(calls)} recorded model calls"
    text = "\n".join([said, *(f"differs: {difference}" for difference in differences)])
    print_result(as_json, result, text)
    if differences:
        raise SystemExit(1)


async def _run(
    agent: Any, rollout: Rollout, resources: Mapping[str, Resource], endpoint: str
) -> tuple[Rollout, float | None]:
    from agentlightning.plugin.registry import get_manager
    from agentlightning.runner import LitAgentRunner
    from agentlightning.store.factory import create_store

    replaced = dict(resources)
    for name, llm in resources.items():
        if isinstance(llm, LLM):
            sampling = llm.sampling_parameters
            replaced[name] = LLM(endpoint=endpoint, model=llm.model, api_key="replay", sampling_parameters=sampling)
    os.environ["OPENAI_BASE_URL"] = endpoint  # for programs that the agent starts
    os.environ.setdefault("OPENAI_API_KEY", "replay")
    scratch = create_store("memory://")
    runner: LitAgentRunner[Any] = LitAgentRunner(get_manager().create("tracer", "otel"))
    try:
        with redirected(endpoint), runner.run_context(agent=agent, store=scratch):
            done = await runner.step(thaw(rollout.input), replaced, rollout.mode)
        return done, await read_final_reward(scratch, done)
    finally:
        await scratch.close()


def _model_calls(spans: Sequence[Span]) -> list[Span]:
    """Selects one span per call: the gateway's if there is one, else the client's."""
    calls = [span for span in spans if semconv.is_llm_call(span)]
    chosen = [span for span in calls if semconv.is_gateway_call(span)] or calls
    if not chosen:
        raise ConfigError("the attempt has no recorded model calls to replay; see `agl spans list`")
    return sorted(chosen, key=lambda span: (span.start_time or 0.0, span.sequence_id))


def _to_answer(span: Span) -> Answer:
    from agentlightning_plugins.shared.scripted_model.reply import Answer

    message = next(iter(semconv.read_output_messages(span)), None)
    if message is None:
        return Answer(status=500, error=span.status.description or "this call failed when it was recorded")
    calls = [
        (call["function"].get("name", ""), call["function"].get("arguments") or "{}")
        for call in message.get("tool_calls") or ()
    ]
    return Answer(content=message.get("content"), tool_calls=calls)


def _compare(calls: Sequence[Span], requests: Sequence[RecordedRequest]) -> Any:
    """Yields the differences between the agent's requests and the recorded requests."""
    for number, (call, request) in enumerate(zip(calls, requests, strict=False), 1):
        then = [(m.get("role"), m.get("content") or "") for m in semconv.read_input_messages(call)]
        now = [(m.get("role"), _text(m.get("content")) or "") for m in _messages(request.body)]
        pairs = itertools.zip_longest(then, now, fillvalue="nothing")
        changed = next(((index, *pair) for index, pair in enumerate(pairs, 1) if pair[0] != pair[1]), None)
        if changed is not None:
            yield f"call {number}, message {changed[0]}: {changed[1]} then, {changed[2]} now"
    if len(requests) != len(calls):
        yield f"{len(calls)} model calls then, {len(requests)} now"


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the messages of a request to any supported API."""
    given = body.get("messages", body.get("input", ()))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    system = body.get("instructions") or body.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _text(content: Any) -> Any:
    """Converts content to the form that spans have: the joined text of its parts."""
    if not isinstance(content, list):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


_CALLS: Final = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")
_OTHER_APIS: Final = (":generateContent", ":streamGenerateContent", "/api/chat", "/api/generate", "/v2/chat")


@contextlib.contextmanager
def redirected(endpoint: str) -> Iterator[None]:
    """Redirects model calls of httpx, requests and aiohttp to ``endpoint``; calls to unsupported APIs raise."""

    def httpx_send(wrapped: Any, client: Any, args: Any, kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        url = _find_url(request.method, str(request.url), getattr(request, "_content", b""), endpoint)
        if url is not None:
            request.url = type(request.url)(url)
            request.headers["Host"] = request.url.netloc.decode("ascii")
        return wrapped(*args, **kwargs)

    def requests_send(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        request.url = _find_url(request.method, request.url, request.body, endpoint) or request.url
        return wrapped(*args, **kwargs)

    def aiohttp_request(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
        method, url, *rest = args
        body = kwargs.get("json") or kwargs.get("data")
        return wrapped(method, _find_url(method, str(url), body, endpoint) or url, *rest, **kwargs)

    patches = Patches()
    for package, classes, method, wrapper in (
        ("httpx", ("Client", "AsyncClient"), "send", httpx_send),
        ("httpx2", ("Client", "AsyncClient"), "send", httpx_send),
        ("requests", ("Session",), "send", requests_send),
        ("aiohttp", ("ClientSession",), "_request", aiohttp_request),
    ):
        if importlib.util.find_spec(package) is not None:
            module = importlib.import_module(package)
            for name in classes:
                patches.wrap(getattr(module, name), method, wrapper)
    try:
        yield
    finally:
        patches.undo()


def _find_url(method: str, url: str, body: Any, endpoint: str) -> str | None:
    """Returns the URL of the same call at the endpoint, or None if the request is not a model call."""
    path = urlsplit(url).path
    if method.upper() != "POST":
        return None
    if path.endswith(_OTHER_APIS):
        raise ConfigError(f"{url} cannot be replayed: its API is neither OpenAI's nor Anthropic's; stub this call")
    call = next((call for call in _CALLS if path.endswith(call)), None)
    return None if call is None or not _names_a_model(body) else endpoint + call


def _names_a_model(body: Any) -> bool:
    if isinstance(body, str | bytes):
        with contextlib.suppress(ValueError):
            body = json.loads(body)
    return isinstance(body, dict) and "model" in body


add_commands = lazy_commands(f"{__name__}:command")
