"""All pages and actions. To add a page, write a view and a template, and add a line here."""

from __future__ import annotations

from typing import Final

from agentlightning_plugins.dashboard.page import Action, Page
from agentlightning_plugins.dashboard.views import (
    actions,
    comparison,
    fleet,
    resources,
    rollout,
    rollouts,
    runs,
    training,
)

PAGES: Final[tuple[Page, ...]] = (
    Page("/", runs.list_runs, "runs.html.jinja", "Runs"),
    Page("/runs/{run_id}", runs.show_run, "run.html.jinja", "Overview"),
    Page("/runs/{run_id}/rollouts", rollouts.list_rollouts, "rollouts.html.jinja", "Rollouts"),
    Page("/runs/{run_id}/rollouts/{rollout_id}/tokens", training.show_tokens, "tokens.html.jinja"),
    Page("/runs/{run_id}/rollouts/{rollout_id}", rollout.show_rollout, "rollout.html.jinja"),
    Page("/runs/{run_id}/ledger", training.show_ledger, "ledger.html.jinja", "Ledger"),
    Page("/runs/{run_id}/group", training.show_group, "group.html.jinja"),
    Page("/runs/{run_id}/resources", resources.list_resources, "resources.html.jinja", "Resources"),
    Page("/runs/{run_id}/resources/{resources_id}", resources.show_resources, "resource.html.jinja"),
    Page("/fleet", fleet.show_fleet, "fleet.html.jinja", "Fleet"),
    Page("/compare", comparison.compare, "compare.html.jinja", "Compare"),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("/runs/{run_id}/rollouts/{rollout_id}/cancel", actions.cancel),
    Action("/runs/{run_id}/rollouts/{rollout_id}/retry", actions.retry),
    Action("/runs/{run_id}/rollouts/{rollout_id}/label", actions.label),
    Action("/runs/{run_id}/resources/{resources_id}/promote", resources.promote),
)
