"""The dashboard: answers requests with pages, their JSON twins, static files and the results of actions."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote

from aiohttp import web
from jinja2 import Environment, PackageLoader
from pydantic_core import to_json

from agentlightning.errors import ConfigError, ConflictError, LightningError, NotFoundError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.dashboard import resources, rollout, rollouts, runs, training
from agentlightning_plugins.dashboard.access import Access, SignedIn
from agentlightning_plugins.dashboard.live import LiveRuns
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.loop_thread import LoopThread
from agentlightning_plugins.shared.monitoring.runs import find_newest_runs, find_run
from agentlightning_plugins.shared.rendering.page import make_environment, read_style
from agentlightning_plugins.shared.training_records.record import OUTCOMES
from agentlightning_plugins.shared.web.request import RequestRefused, read_body

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MAX_FORM: Final = 64 * 1024
_STATUSES = ((NotFoundError, 404), (ConflictError, 409), (ConfigError, 422), (ValueError, 422), (LightningError, 503))
_CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_STATIC_TYPES: Final = {"js": "text/javascript", "svg": "image/svg+xml"}


class _Page(NamedTuple):
    """A page; its JSON twin has the same path with ``.json``."""

    path: str
    """Path of the page, with ``{names}``, such as ``/runs/{run_id}/ledger``."""
    view: Callable[[Visit], Awaitable[dict[str, Any]]]
    """Returns the contents as plain values, which the JSON twin returns and the template renders."""
    template: str
    tab: str = ""
    """Label in the navigation of a run, or in the main navigation for a path without a run; empty for no entry."""


_PAGES: Final[tuple[_Page, ...]] = (
    _Page("/", runs.list_runs, "runs.html.jinja", "Runs"),
    _Page("/runs/{run_id}", runs.show_run, "run.html.jinja", "Overview"),
    _Page("/runs/{run_id}/rollouts", rollouts.list_rollouts, "rollouts.html.jinja", "Rollouts"),
    _Page("/runs/{run_id}/rollouts/{rollout_id}/tokens", training.show_tokens, "tokens.html.jinja"),
    _Page("/runs/{run_id}/rollouts/{rollout_id}", rollout.show_rollout, "rollout.html.jinja"),
    _Page("/runs/{run_id}/ledger", training.show_ledger, "ledger.html.jinja", "Ledger"),
    _Page("/runs/{run_id}/group", training.show_group, "group.html.jinja"),
    _Page("/runs/{run_id}/resources", resources.list_resources, "resources.html.jinja", "Resources"),
    _Page("/runs/{run_id}/resources/{resources_id}", resources.show_resources, "resource.html.jinja"),
    _Page("/fleet", runs.show_fleet, "fleet.html.jinja", "Fleet"),
    _Page("/compare", runs.compare, "compare.html.jinja", "Compare"),
)
"""All pages. To add one, write a view and a template, and add a line here."""
_ACTIONS: Final[dict[str, Callable[[Visit], Awaitable[str]]]] = {
    "/runs/{run_id}/rollouts/{rollout_id}/cancel": rollout.cancel,
    "/runs/{run_id}/rollouts/{rollout_id}/retry": rollout.retry,
    "/runs/{run_id}/rollouts/{rollout_id}/label": rollout.label,
    "/runs/{run_id}/resources/{resources_id}/promote": resources.promote,
}
"""The forms of pages: the path, and a function that performs the action and returns the path to show next."""


class Dashboard:
    """The pages of one store."""

    def __init__(self, store: LightningStore, tokens: Sequence[str] = (), *, read_only: bool = False) -> None:
        """Shows all runs of a store. Without tokens, only programs on this machine are admitted."""
        self._store = store
        self._access = Access(tokens)
        self._read_only = read_only
        self._live = LiveRuns()
        self._thread: LoopThread | None = None
        """Reads the records of all pages, which agents can make large, so that the loop of the server stays free."""

    def routes(self) -> Iterable[web.RouteDef]:
        """Returns all routes."""
        yield web.get("/login", self._show_login)
        yield web.post("/login", self._guarded(self._sign_in, is_open=True))
        yield web.post("/logout", self._guarded(self._sign_out, is_open=True))
        yield web.get("/static/{name}", self._answer_static)
        yield web.get("/live/{run_id}", self._guarded(self._answer_live))
        yield web.get("/runs/{run_id}/labelled.jsonl", self._guarded(self._export))
        for page in _PAGES:  # the twin first, because an id may contain a dot
            twin = "/index.json" if page.path == "/" else f"{page.path}.json"
            yield web.get(twin, self._page_handler(page, as_json=True))
            yield web.get(page.path, self._page_handler(page, as_json=False))
        if not self._read_only:
            for path, action in _ACTIONS.items():
                yield web.post(path, self._action_handler(action))

    def admits(self, request: web.Request) -> bool:
        """Returns whether a request comes from a client that has signed in."""
        return self._access.find_session(request) is not None

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Replaces the accepted tokens; sessions that were opened with other tokens end."""
        self._access.replace_tokens(tokens)

    async def stop(self) -> None:
        """Ends the streams of live pages, and the pages that are being made."""
        await self._live.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.close)

    async def _in_thread(self, work: Coroutine[Any, Any, T]) -> T:
        self._thread = self._thread or LoopThread("agl-pages")
        return await asyncio.wrap_future(self._thread.submit(work))

    def _guarded(self, handler: _Handler, *, as_json: bool = False, is_open: bool = False) -> _Handler:
        """Checks access, unless the handler is open to all, and turns errors into responses."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                if not is_open and self._access.find_session(request) is None:
                    return self._refuse(request, as_json)
                return await handler(request)
            except Exception as error:  # isolation point: a page may fail, the server may not
                return self._answer_error(request, error, as_json)

        return answer

    def _refuse(self, request: web.Request, as_json: bool) -> web.Response:
        if not self._access.needs_token:
            return self._error(request, 403, "Without a token, only this machine has access.", as_json)
        if as_json or request.method != "GET" or "authorization" in request.headers:
            return self._error(request, 401, "The token is missing or wrong: sign in, or send the store's token.", True)
        return _redirect(f"/login?next={quote(request.path_qs, safe='')}")

    def _answer_error(self, request: web.Request, error: Exception, as_json: bool) -> web.Response:
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
        status, message = error.status if isinstance(error, RequestRefused) else status, str(error)
        if status == 500:
            logger.error("%s %s failed", request.method, request.path, exc_info=error)
            message = "This page failed; the server's log has the reason."
        return self._error(request, status, message, as_json)

    def _error(self, request: web.Request, status: int, message: str, as_json: bool) -> web.Response:
        if as_json:
            return _json({"status": status, "message": message}, status)
        return self._html("error.html.jinja", request, None, status=status, data={"status": status, "message": message})

    def _visit(self, request: web.Request) -> Visit:
        return Visit(self._store, request.match_info, request.query)

    async def _read(self, page: _Page, visit: Visit) -> dict[str, Any]:
        """Returns the contents of a page; raises NotFoundError, with a list of runs, for an unknown run in its path."""
        if "run_id" in visit.names and visit.run_id != self._store.run_id and await find_run(visit.run_store) is None:
            known = ", ".join(run.run_id for run in await find_newest_runs(self._store)) or "none yet"
            raise NotFoundError(f"this store has no run {visit.run_id!r}; its newest runs: {known}")
        return await page.view(visit)

    def _page_handler(self, page: _Page, *, as_json: bool) -> _Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            data = await self._in_thread(self._read(page, self._visit(request)))
            if as_json:
                return await asyncio.to_thread(_json, data)
            return await asyncio.to_thread(self._html, page.template, request, page, data=data)

        return self._guarded(answer, as_json=as_json)

    def _action_handler(self, action: Callable[[Visit], Awaitable[str]]) -> _Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            form = await self._read_own_form(request)
            return _redirect(await action(Visit(self._store, request.match_info, form)))

        return self._guarded(answer)

    async def _read_own_form(self, request: web.Request) -> dict[str, str]:
        """Returns the fields of a form; raises RequestRefused unless one of our pages in this session sent it."""
        form, session = await _read_form(request), self._access.find_session(request)
        if not self._access.allows_form(request, session, form.pop("form_token", "")):
            raise RequestRefused(403, "The form did not come from this page; reload the page and try again.")
        return form

    def _html(
        self, template: str, request: web.Request, page: _Page | None, status: int = 200, **values: Any
    ) -> web.Response:
        session: SignedIn | None = self._access.find_session(request)
        run_id = request.match_info.get("run_id") if session is not None else None
        tabs = [
            (each.tab, each.path.replace("{run_id}", quote(run_id or "", safe="")), each is page)
            for each in _PAGES
            if each.tab and ("{run_id}" not in each.path or run_id)
        ]
        found = _environment().get_template(template)
        html = found.render(
            request=request,
            query=dict(request.query),
            path=request.rel_url.raw_path,
            run_id=run_id,
            live_run=run_id or values["data"].get("live_run"),
            tabs=tabs,
            form_token=self._access.form_token(session),
            can_act=not self._read_only,
            can_sign_out=session is not None and self._access.needs_token,
            signed_in=session is not None,
            **values,
        )
        return _respond(html.encode("utf-8", "replace"), status, content_type="text/html", charset="utf-8")

    async def _show_login(self, request: web.Request) -> web.StreamResponse:
        data = {"wrong": False, "next": request.query.get("next", "/")}
        return self._html("login.html.jinja", request, None, data=data)

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        form = await _read_form(request)
        token, target = form.get("token", ""), form.get("next", "/")
        if not target.startswith("/") or target.startswith(("//", "/\\")) or not target.isprintable():
            target = "/"
        allowed = self._access.allows_form(request, None, self._access.form_token(None))
        response = _redirect(target)
        if allowed and await self._access.sign_in(request, response, token):
            return response
        return self._html("login.html.jinja", request, None, status=401, data={"wrong": True, "next": target})

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        await self._read_own_form(request)
        response = _redirect("/login")
        self._access.sign_out(request, response)
        return response

    async def _answer_static(self, request: web.Request) -> web.StreamResponse:
        found = _static_files().get(request.match_info["name"])
        if found is None:
            return web.Response(status=404, text="not found\n", headers=_HEADERS)
        headers = {**_HEADERS, "cache-control": "no-cache"}
        return web.Response(body=found[1], content_type=found[0], charset="utf-8", headers=headers)

    async def _export(self, request: web.Request) -> web.StreamResponse:
        disposition = {"content-disposition": 'attachment; filename="labelled.jsonl"'}
        response = web.StreamResponse(headers={**_HEADERS, **disposition})
        response.content_type = "application/x-ndjson"
        records = rollout.read_labelled(self._visit(request).run_store)

        async def read_line() -> bytes:
            async for record in records:
                return await asyncio.to_thread(to_json, record, inf_nan_mode="null") + b"\n"
            return b""

        await response.prepare(request)
        while line := await self._in_thread(read_line()):
            await response.write(line)
        return response

    async def _answer_live(self, request: web.Request) -> web.StreamResponse:
        return await self._live.answer(request, self._visit(request).run_store, self.admits)


async def _read_form(request: web.Request) -> dict[str, str]:
    body = await read_body(request, _MAX_FORM, _MAX_FORM)
    return dict(parse_qsl(body.decode(errors="replace"), max_num_fields=20))


def _redirect(target: str) -> web.Response:
    return web.Response(status=303, headers={**_HEADERS, "location": target})


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return _respond(to_json(data, inf_nan_mode="null", indent=2) + b"\n", status, content_type="application/json")


def _respond(body: bytes, status: int, **kind: str) -> web.Response:
    response = web.Response(body=body, status=status, headers=_HEADERS, **kind)  # type: ignore[arg-type] # text only
    if len(body) > 4096:
        response.enable_compression()
    return response


@functools.cache
def _environment() -> Environment:
    """Returns the templates of the dashboard and of all pages."""
    environment = make_environment(PackageLoader("agentlightning_plugins.dashboard"))
    environment.globals.update(describe_row=training.describe_row, sorts=tuple(rollouts.SORTS), outcomes=OUTCOMES)
    return environment


@functools.cache
def _static_files() -> dict[str, tuple[str, bytes]]:
    """Returns type and contents of each file that pages load, by name."""
    found = {
        file.name: (_STATIC_TYPES[file.name.rpartition(".")[2]], file.read_bytes())
        for file in (files("agentlightning_plugins.dashboard") / "static").iterdir()
        if file.name.rpartition(".")[2] in _STATIC_TYPES
    }
    return {**found, "dashboard.css": ("text/css", read_style().encode())}
