"""All pages, downloads and actions. To add a page, write a view and a template, and add a line here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from agentlightning_plugins.dashboard.page import Action, Page, Visit
from agentlightning_plugins.dashboard.views import actions, rollout, rollouts, runs

PAGES: Final[tuple[Page, ...]] = (
    Page("/", runs.list_runs, "runs.html.jinja", "Runs"),
    Page("/runs/{run_id}", runs.show_run, "run.html.jinja", "Overview"),
    Page("/runs/{run_id}/rollouts", rollouts.list_rollouts, "rollouts.html.jinja", "Rollouts"),
    Page("/runs/{run_id}/rollouts/{rollout_id}", rollout.show_rollout, "rollout.html.jinja"),
)
DOWNLOADS: Final[tuple[tuple[str, Callable[[Visit], Awaitable[web.StreamResponse]]], ...]] = ()
ACTIONS: Final[tuple[Action, ...]] = (
    Action("/runs/{run_id}/rollouts/{rollout_id}/cancel", actions.cancel),
    Action("/runs/{run_id}/rollouts/{rollout_id}/retry", actions.retry),
    Action("/runs/{run_id}/rollouts/{rollout_id}/label", actions.label),
)
