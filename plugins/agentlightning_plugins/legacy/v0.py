"""The protocol of Agent Lightning 0.1: a server over a store, its client, and ``fit_v0`` for its agents.

GET /task                    claims a rollout       GET /resources/{id}, /resources/latest    its resources
POST /rollout                reports its end
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, QuotaError, StoreError
from agentlightning.resources import scope_to_attempt, with_attempt_key
from agentlightning.run import attempt_token
from agentlightning.types import AttemptedRollout, AttemptFailure, Triplet
from agentlightning_plugins.legacy.v0_messages import RolloutLegacy, Task, TaskIfAny, read_spans
from agentlightning_plugins.shared.web.request import (
    RequestRefused,
    check_local,
    client_url,
    is_loopback,
    parse_json,
    read_body,
)
from agentlightning_plugins.shared.web.server import WebServer

logger = logging.getLogger("agentlightning")
_HEARTBEAT_S: Final = 5.0
_FINISH_S: Final = 3.0
_CONFIG: Final = agl.RolloutConfig(max_attempts=5, retry_condition=["timeout", "unresponsive"])
"""Like 0.1, retries a task whose agent was lost: its time is over, or this server did not renew its lease."""
_MAX_BODY_BYTES: Final = 64 * 2**20
_MAX_ITEMS: Final = 5_000_000
_MAX_ERROR: Final = 2000
"""Largest number of characters in the message about a malformed report."""
_MALFORMED: Final = (ValueError, AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors from pydantic, or from a malformed trace."""
_METHODS: Final = {
    "train": ("training_rollout", "rollout"),
    "val": ("validation_rollout", "rollout", "training_rollout"),
}
"""The methods that run a rollout, by mode. The first one that the agent's class defines is called."""


class AgentLightningServer:
    """Serves the rollouts of a store to agents of 0.1, and has the methods that algorithms of 0.1 call."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        task_timeout_seconds: float = 300.0,
        *,
        store: agl.LightningStore | None = None,
    ) -> None:
        """Prepares the server.

        Args:
            host: address to listen on.
            port: port to listen on; 0 chooses a free port.
            task_timeout_seconds: time after which an agent that has not reported loses its rollout. Rollouts of
                ``queue_task`` are queued again, up to five attempts; others according to their configuration.
            store: any store; default is an in-memory store.
        """
        self.store = store if store is not None else agl.InMemoryLightningStore()
        self.host, self.port = host, port
        self.task_timeout_seconds = task_timeout_seconds
        self._worker_id = f"v0-{secrets.token_hex(4)}"
        self._claimed: dict[str, tuple[AttemptedRollout, float]] = {}
        """Claimed rollouts by id, each with the time of its claim on the event loop's clock."""
        self._queued: set[str] = set()
        """Ids from ``queue_task``. Only the reports on these rollouts are kept, for the caller to retrieve."""
        self._completed: dict[str, RolloutLegacy] = {}
        self._news = asyncio.Event()
        self._server: WebServer | None = None
        self._beat: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """URL for agents."""
        return client_url(self.host, self.port)

    async def start(self) -> None:
        """Starts serving."""
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/task", self._answer_task)
        application.router.add_get("/resources/{resources_id}", self._answer_resources)
        application.router.add_post("/rollout", self._take_rollout)
        self._server = WebServer(application, finish_s=_FINISH_S)
        self.port = await self._server.start(self.host, self.port)
        self._beat = asyncio.create_task(self._renew_leases())

    async def stop(self) -> None:
        """Stops serving."""
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()

    async def run_forever(self) -> None:
        """Serves until it is cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def queue_task(
        self,
        sample: Any,
        mode: Literal["train", "val", "test"] | None = None,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Queues a rollout and returns its id."""
        rollout = await self.store.enqueue_rollout(sample, mode, resources_id, _CONFIG, metadata)
        self._queued.add(rollout.rollout_id)
        return rollout.rollout_id

    async def update_resources(self, resources: Mapping[str, agl.Resource | str]) -> str:
        """Publishes resources and returns their id."""
        return (await self.store.add_resources(resources)).version_id

    async def get_completed_rollout(self, rollout_id: str) -> RolloutLegacy | None:
        """Removes and returns the report on a rollout; None if it has not arrived yet."""
        return self._completed.pop(rollout_id, None)

    async def poll_completed_rollout(self, rollout_id: str, timeout: float | None = None) -> RolloutLegacy | None:
        """Like ``get_completed_rollout``, but waits up to ``timeout`` seconds for the report."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while rollout_id not in self._completed:
                    self._news.clear()
                    await self._news.wait()
        return self._completed.pop(rollout_id, None)

    async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
        """Removes and returns all reports."""
        reports, self._completed = list(self._completed.values()), {}
        return reports

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses web pages and malformed reports."""
        assert self._server is not None
        try:
            if is_loopback(self.host):
                check_local(request, "this server")
            if request.headers.get("Sec-Fetch-Site", "none") != "none":  # /task claims a rollout, and is a GET
                return _refuse(403, "this server does not answer web pages")
            self._server.admit(request)
            return await handler(request)
        except RequestRefused as error:
            return _refuse(error.status, str(error))
        except StoreError as error:
            return _refuse(503, str(error))
        except web.HTTPException:
            raise
        except Exception:  # isolation point: a request may fail, the server may not
            logger.exception("%s %s failed", request.method, request.path)
            return _refuse(500, "the server failed; see its log")

    async def _answer_task(self, request: web.Request) -> web.Response:
        await self._renew()
        rollout = await self.store.dequeue_rollout(self._worker_id)
        if rollout is None:
            return _respond(TaskIfAny(is_available=False))
        self._claimed[rollout.rollout_id] = rollout, asyncio.get_running_loop().time()
        task = Task(
            rollout_id=rollout.rollout_id,
            input=rollout.model_dump(mode="json")["input"],
            mode=rollout.mode,
            resources_id=rollout.rollout_id,  # its own id, so that its agent's calls are attributed to it
            create_time=rollout.start_time,
            last_claim_time=rollout.attempt.start_time,
            num_claims=rollout.attempt.sequence_id,
            metadata=dict(rollout.metadata or {}),
        )
        return _respond(TaskIfAny(is_available=True, task=task))

    async def _answer_resources(self, request: web.Request) -> web.Response:
        """Answers with the resources of an id or of a claimed rollout, or with the latest ones."""
        asked = request.match_info["resources_id"]
        rollout = self._claimed[asked][0] if asked in self._claimed else None
        wanted = asked if rollout is None else rollout.resources_id
        if wanted in (None, "latest"):
            update = await self.store.get_latest_resources()
        else:
            update = await self.store.get_resources_by_id(wanted or "")
        if update is None and rollout is None:
            return _refuse(404, f"there are no resources {asked!r}")
        resources = {} if update is None else dict(update.resources)
        if rollout is not None:
            ids = rollout.rollout_id, rollout.attempt.attempt_id
            key = attempt_token.issue(self.store.token, *ids, self.store.now(), self.task_timeout_seconds)
            resources = scope_to_attempt(with_attempt_key(resources, key), rollout)
        content = {name: resource.model_dump(mode="json") for name, resource in resources.items()}
        time = 0.0 if update is None else update.create_time
        answer = {"resources_id": asked, "resources": content, "create_time": time, "update_time": time, "version": 1}
        return web.json_response(answer)

    async def _take_rollout(self, request: web.Request) -> web.Response:
        content = await parse_json(await read_body(request, _MAX_BODY_BYTES, _MAX_BODY_BYTES), max_items=_MAX_ITEMS)
        try:
            report = RolloutLegacy.model_validate(content)
            claimed = self._claimed.get(report.rollout_id)
            if claimed is None:
                return _refuse(404, f"{report.rollout_id!r} is not a claimed rollout")
            ids = report.rollout_id, claimed[0].attempt.attempt_id
            spans = read_spans(report, *ids)
        except _MALFORMED as problem:
            return _refuse(400, f"the report is malformed: {str(problem)[:_MAX_ERROR]}")
        del self._claimed[report.rollout_id]
        try:
            try:
                await self.store.add_many_spans(spans)
            except QuotaError:
                await self.store.update_attempt(*ids, spans_dropped=len(spans))
            if spans:
                await self.store.update_attempt(*ids, status="succeeded", reward=agl.find_final_reward(spans))
            else:  # an agent of 0.1 that raised an error
                error = AttemptFailure(type="NoResult", message="the agent reported neither a reward nor a trace")
                await self.store.update_attempt(*ids, status="failed", error=error)
        except (ConflictError, NotFoundError) as error:  # the attempt has ended without the report
            return _refuse(409, str(error))
        except (StoreError, ConfigError) as error:
            self._claimed[report.rollout_id] = claimed  # the agent may report again
            if isinstance(error, ConfigError):
                return _refuse(400, f"the report is malformed: {str(error)[:_MAX_ERROR]}")
            raise
        if report.rollout_id in self._queued:
            self._queued.discard(report.rollout_id)
            self._completed[report.rollout_id] = report
            self._news.set()
        return web.json_response({"status": "ok", "message": f"rollout {report.rollout_id} is stored"})

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                await self._renew()
            except (StoreError, OSError) as error:
                logger.warning("the leases of agents of 0.1 could not be renewed: %s", error)

    async def _renew(self) -> None:
        """Sends heartbeats on behalf of agents of 0.1, which send none, until their time is over."""
        now = asyncio.get_running_loop().time()
        for rollout_id, (rollout, since) in list(self._claimed.items()):
            if now - since > self.task_timeout_seconds and self._claimed.pop(rollout_id, None) is not None:
                try:
                    await self.store.update_attempt(rollout_id, rollout.attempt.attempt_id, status="timeout")
                except (ConflictError, NotFoundError):
                    pass  # it has ended already
                except (StoreError, OSError):
                    self._claimed.setdefault(rollout_id, (rollout, since))  # tried again at the next renewal
                    raise
        attempts = [rollout.attempt.attempt_id for rollout, _ in self._claimed.values()]
        await self.store.update_worker(self._worker_id, attempt_ids=attempts)


def _respond(answer: BaseModel) -> web.Response:
    return web.Response(text=answer.model_dump_json(), content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"detail": message}, status=status)


@dataclass
class AgentLightningClient:
    """The client of agents of 0.1, which connects at the first request."""

    endpoint: str
    """URL of the server."""
    poll_interval: float = 5.0
    """Seconds between requests for a task."""
    timeout: float = 10.0
    """Seconds to wait for an answer."""

    async def poll_next_task_async(self) -> Task:
        """Waits for a task."""
        while True:
            with contextlib.suppress(OSError):  # the server is not there yet
                answer = TaskIfAny.model_validate(await asyncio.to_thread(self._request, "/task"))
                if answer.task is not None:
                    return answer.task
            await asyncio.sleep(self.poll_interval)

    async def get_resources_by_id_async(self, resource_id: str) -> agl.ResourcesUpdate:
        """Returns the resources of a task."""
        return agl.ResourcesUpdate.model_validate(await asyncio.to_thread(self._request, f"/resources/{resource_id}"))

    async def get_latest_resources_async(self) -> agl.ResourcesUpdate:
        """Returns the latest resources."""
        return await self.get_resources_by_id_async("latest")

    async def post_rollout_async(self, rollout: RolloutLegacy) -> Any:
        """Reports the end of a task."""
        return await asyncio.to_thread(self._request, "/rollout", rollout.model_dump_json().encode())

    def poll_next_task(self) -> Task:
        """Waits for a task."""
        return asyncio.run(self.poll_next_task_async())

    def get_resources_by_id(self, resource_id: str) -> agl.ResourcesUpdate:
        """Returns the resources of a task."""
        return asyncio.run(self.get_resources_by_id_async(resource_id))

    def get_latest_resources(self) -> agl.ResourcesUpdate:
        """Returns the latest resources."""
        return asyncio.run(self.get_latest_resources_async())

    def post_rollout(self, rollout: RolloutLegacy) -> Any:
        """Reports the end of a task."""
        return asyncio.run(self.post_rollout_async(rollout))

    def _request(self, path: str, body: bytes | None = None) -> Any:
        url = self.endpoint.rstrip("/") + path
        request = urllib.request.Request(url, body, {"content-type": "application/json"})  # noqa: S310 # see below
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:  # noqa: S310 # the URL is the user's
            return json.loads(answer.read())


class _Agent(agl.LitAgent[Any]):
    """An agent of 0.1, whose methods may take ``(task, rollout_id, resources)``."""

    def __init__(self, agent: agl.LitAgent[Any]) -> None:
        self.agent = agent
        self.results: dict[str, Any] = {}

    def is_async(self) -> bool:
        return self.agent.is_async()

    def rollout(self, task: Any, resources: Any, rollout: agl.Rollout) -> Any:
        return self._keep(rollout, self._call("", task, resources, rollout))

    async def rollout_async(self, task: Any, resources: Any, rollout: agl.Rollout) -> Any:
        return self._keep(rollout, await self._call("_async", task, resources, rollout))

    def _call(self, suffix: str, task: Any, resources: Any, rollout: agl.Rollout) -> Any:
        names = [name + suffix for name in _METHODS["train" if rollout.mode == "train" else "val"]]
        own = [name for name in names if getattr(type(self.agent), name) is not getattr(agl.LitAgent, name)]
        method = getattr(self.agent, (own or names)[0])
        if "rollout_id" in inspect.signature(method).parameters:
            return method(task, rollout_id=rollout.rollout_id, resources=resources)
        return method(task, resources, rollout)

    def _keep(self, rollout: agl.Rollout, result: Any) -> Any:
        """Keeps triplets and reports, which agents can no longer return."""
        if isinstance(result, RolloutLegacy):
            self.results[rollout.rollout_id] = result
            return result.final_reward
        if isinstance(result, list) and result and isinstance(result[0], Triplet):
            self.results[rollout.rollout_id] = RolloutLegacy(rollout_id="", triplets=result)
            return result[-1].reward
        return result


def fit(trainer: agl.Trainer, agent: Any, data: str | AgentLightningClient) -> None:
    """Runs an agent on the tasks of a server of 0.1, ``n_runners`` at a time, until ``max_rollouts`` or Ctrl-C.

    Raises ConfigError if ``data`` is not the URL of a server.
    """
    if isinstance(data, str) and not data.startswith(("http://", "https://")):
        raise agl.ConfigError(f"train_data = {data!r}: give the URL of the server, as in http://127.0.0.1:8000")
    if not isinstance(data, (str, AgentLightningClient)):
        raise agl.ConfigError("fit_v0 takes its tasks from a server, so give its URL; for a dataset use Trainer.fit")
    client = AgentLightningClient(data) if isinstance(data, str) else data
    asyncio.run(_run(trainer, _Agent(agl.wrap(agent)), client))


async def _run(trainer: agl.Trainer, agent: _Agent, client: AgentLightningClient) -> None:
    left = iter(range(trainer.max_rollouts)) if trainer.max_rollouts is not None else iter(int, 1)
    adapter = trainer.adapter if isinstance(trainer.adapter, agl.TraceToTriplet) else agl.TraceToTriplet()
    store = agl.InMemoryLightningStore()
    tracer = trainer.tracer if isinstance(trainer.tracer, agl.Tracer) else agl.OtelTracer()
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(tracer)

    async def work() -> None:
        for _ in left:
            task = await client.poll_next_task_async()
            resources = (await client.get_resources_by_id_async(task.resources_id or "latest")).resources
            mode: Any = task.mode
            done = await runner.step(task.input, resources, mode)
            spans = (await store.query_spans(done.rollout_id)).items
            report = agent.results.pop(done.rollout_id, RolloutLegacy(rollout_id="")).model_copy()
            report.rollout_id, report.task = task.rollout_id, task
            if done.status == "succeeded":
                report.triplets = report.triplets or list(adapter.adapt(spans))
                report.trace = report.trace or [span.model_dump(mode="json") for span in spans]
                report.final_reward = agl.find_final_reward(spans, done)
            await client.post_rollout_async(report)
            await store.delete_rollouts([done.rollout_id])

    with runner.run_context(agent=agent, store=store):
        try:
            await asyncio.gather(*(work() for _ in range(trainer.n_runners)))
        finally:
            await store.close()
