"""All pages and actions. To add a page, write a view and a template, and add a line here."""

from __future__ import annotations

from typing import Final

from agentlightning_plugins.dashboard.page import Action, DashboardPage
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

PAGES: Final[tuple[DashboardPage, ...]] = (
    DashboardPage("/", runs.list_runs, "runs.html.jinja", "Runs"),
    DashboardPage("/runs/{run_id}", runs.show_run, "run.html.jinja", "Overview"),
    DashboardPage("/runs/{run_id}/rollouts", rollouts.list_rollouts, "rollouts.html.jinja", "Rollouts"),
    DashboardPage("/runs/{run_id}/rollouts/{rollout_id}/tokens", training.show_tokens, "tokens.html.jinja"),
    DashboardPage("/runs/{run_id}/rollouts/{rollout_id}", rollout.show_rollout, "rollout.html.jinja"),
    DashboardPage("/runs/{run_id}/ledger", training.show_ledger, "ledger.html.jinja", "Ledger"),
    DashboardPage("/runs/{run_id}/group", training.show_group, "group.html.jinja"),
    DashboardPage("/runs/{run_id}/resources", resources.list_resources, "resources.html.jinja", "Resources"),
    DashboardPage("/runs/{run_id}/resources/{resources_id}", resources.show_resources, "resource.html.jinja"),
    DashboardPage("/fleet", fleet.show_fleet, "fleet.html.jinja", "Fleet"),
    DashboardPage("/compare", comparison.compare, "compare.html.jinja", "Compare"),
)
ACTIONS: Final[tuple[Action, ...]] = (
    Action("/runs/{run_id}/rollouts/{rollout_id}/cancel", actions.cancel),
    Action("/runs/{run_id}/rollouts/{rollout_id}/retry", actions.retry),
    Action("/runs/{run_id}/rollouts/{rollout_id}/label", actions.label),
    Action("/runs/{run_id}/resources/{resources_id}/promote", resources.promote),
)
