"""Options, paths and metrics in the deployment files exist, and nginx accepts its example."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.cli import add_plugin_commands, cli
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import bind_settings
from agentlightning.store.engine import BackendStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway import command as gateway_command
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.control import GatewayMetrics
from agentlightning_plugins.gateway.limits import Admission
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.stores.http.client import connection
from agentlightning_plugins.stores.http.server.application import StoreApplication
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from agentlightning_plugins.stores.postgresql.store import PostgresLightningStore
from tests.benchmarks.simulate_fleet import Fleet, simulate
from tests.failures import read_table
from tests.source import REPO

DEPLOY = REPO / "deploy"
PROGRAM = "/opt/lightning/.venv/bin/agl "


def documents(run: str = "mine") -> list[tuple[Path, Any]]:
    """Returns the YAML documents of all files, with the name of a run as ``envsubst`` inserts it."""
    paths = sorted([*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")])
    texts = [(path, path.read_text().replace("$AGL_RUN", run)) for path in paths]
    return [(path, document) for path, text in texts for document in yaml.safe_load_all(text)]


def command_lines() -> Iterator[tuple[Path, list[str]]]:
    """Yields every command line of `agl` without the program, and its file."""
    for path in DEPLOY.rglob("*.service"):
        (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
        assert line.startswith(PROGRAM), path
        yield path, line.removeprefix(PROGRAM).replace("%i", "4747").split()
    for path, document in documents():
        for service in document.get("services", {}).values():
            if "postgres" not in service["image"]:
                yield path, service["command"]
        if document.get("kind") in ("Deployment", "Job"):
            for container in document["spec"]["template"]["spec"]["containers"]:
                yield path, container["args"]


def test_agl_accepts_every_command_line_of_the_deployment_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda self, value, parameter, context: value)  # paths of other machines
    add_plugin_commands(get_manager())
    found = list(command_lines())
    assert len(found) >= 8
    for path, (name, *words) in found:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, (path, name)
        command.make_context(name, list(map(str, words)))  # raises if the command does not accept the line


def test_runners_of_every_deployment_file_serve_the_run_that_their_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_plugin_commands(get_manager())
    monkeypatch.setenv("AGL_RUN", "mine")
    for path, (name, *words) in command_lines():
        if name == "runner":
            command = cli.get_command(click.Context(cli), name)
            assert command is not None
            assert command.make_context(name, list(map(str, words))).params["run"] == "mine", path
            assert "AGL_RUN" in path.read_text(), path


def test_the_gateway_accepts_its_configuration_and_reads_the_key_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-this-test")
    settings = yaml.safe_load((DEPLOY / "gateway.yaml").read_text())
    bind_settings(LLMProxy, settings, "deploy/gateway.yaml")
    (backend,) = ModelTable(settings["model_list"]).backends
    assert backend.api_key == "key-of-this-test"


def test_every_command_with_a_store_option_reads_the_url_from_the_environment() -> None:
    add_plugin_commands(get_manager())
    context, named = click.Context(cli), set()
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        within = command.commands.values() if isinstance(command, click.Group) else ()
        options = [option for each in (command, *within) for option in each.params if "--store" in option.opts]
        for option in options:
            assert isinstance(option, click.Option), name
            assert option.envvar == "AGL_STORE" or "Default: AGL_STORE" in (option.help or ""), name
        named.update([name] * len(options))
    assert {"gateway", "runner", "trace", "rollouts"} <= named


async def test_prometheus_rules_and_the_grafana_dashboard_use_metrics_that_store_and_gateway_export() -> None:
    store = InMemoryLightningStore()
    text = (await StoreApplication(store)._metrics.render()).decode()
    models = ModelTable([{"model": "m", "endpoint": "http://127.0.0.1:9/v1"}])
    gateway = GatewayMetrics(models, Admission(), SpanWriter.shared(store), [])
    text += (await gateway.render()).decode()
    await store.close()
    exported = {family.name for family in text_string_to_metric_families(text)}
    exported |= {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    dashboard = json.loads((DEPLOY / "grafana" / "lightning-store.json").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"\b(?:agl|process)_[a-z_]+", expression)}
    assert {name.removesuffix("_bucket") for name in used} <= exported
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"]: "credentials_file" in job["authorization"] for job in scraped} == {
        "lightning-store": True, "lightning-gateway": True
    }  # fmt: skip
    plotted = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert {name for name in exported if name.startswith("agl_gateway") and name in plotted} > {
        "agl_gateway_calls_total", "agl_gateway_call_seconds", "agl_gateway_backend_up", "agl_gateway_spans_dropped"
    }  # fmt: skip
    gauges = re.findall(r"# TYPE (agl_store_\w+) gauge", text)
    for expression, name in itertools.product(expressions, gauges):  # each server reports the whole database
        for aggregation in re.findall(rf"(\w+ *(?:by \([^)]*\))? *\(?){name}\b", expression):
            assert not aggregation.startswith(("sum", "avg", "count")), expression


async def test_runners_are_scaled_by_a_metric_that_the_store_exports() -> None:
    store = InMemoryLightningStore()
    await store.with_run("mine").enqueue_rollout("waits")
    text = (await StoreApplication(store)._metrics.render()).decode()
    await store.close()
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["external"]
    (scaler,) = [each for _, each in documents() if each.get("kind") == "HorizontalPodAutoscaler"]
    (metric,) = [each["external"] for each in scaler["spec"]["metrics"]]
    assert metric["metric"]["selector"]["matchLabels"] == {"run": "mine"}
    assert metric["metric"]["name"] == rule["name"]["as"]
    assert f'{rule["seriesQuery"]}{{run="mine"}} 1.0' in text.splitlines()
    assert rule["metricsQuery"].startswith(f"max by (run) ({rule['seriesQuery']}{{")
    deployed = {each["metadata"]["name"] for _, each in documents() if each.get("kind") == "Deployment"}
    assert scaler["spec"]["scaleTargetRef"]["name"] in deployed
    (keda,) = [each["spec"] for _, each in documents() if each.get("kind") == "ScaledObject"]
    assert keda["scaleTargetRef"]["name"] in deployed
    assert keda["triggers"][0]["metadata"]["query"] == f'max({rule["seriesQuery"]}{{run="mine"}})'


def test_runners_and_scalers_of_two_runs_are_separate() -> None:
    found: dict[str, list[str]] = {}
    for run in ("mine", "yours"):
        for path, document in documents(run):
            if document.get("kind") in ("Deployment", "Job", "HorizontalPodAutoscaler", "ScaledObject"):
                name, spec = document["metadata"]["name"], document["spec"]
                pods = spec.get("template", {"spec": {"containers": []}})
                if "runner" not in name:
                    continue
                assert name == f"lightning-runner-{run}", path
                for container in pods["spec"]["containers"]:
                    assert {"name": "AGL_RUN", "value": run} in container["env"], path
                    assert pods["metadata"]["labels"]["run"] == run
                if document["kind"] == "Deployment":
                    assert spec["selector"]["matchLabels"] == pods["metadata"]["labels"]
                found.setdefault(run, []).append(f"{document['kind']} of {path.name}")
    assert found["mine"] == found["yours"]
    assert len(found["mine"]) == 4


def test_deployment_files_that_were_never_run_have_a_comment_about_it() -> None:
    unused = [DEPLOY / "Dockerfile", DEPLOY / "compose.yaml", *(DEPLOY / "kubernetes").iterdir()]
    unused += (DEPLOY / "prometheus").iterdir()
    for path in unused:
        assert re.search(
            r"^# Not (built|started|applied|loaded) .*docs/operations.md", path.read_text(), re.MULTILINE
        ), path


def test_pods_do_not_run_as_root_and_probes_use_the_probe_paths() -> None:
    assert re.search(r"^USER 10001$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]
        for _, document in documents()
        if document.get("kind") in ("Deployment", "Job")
    }
    for name, pod in pods.items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert all(container["securityContext"]["allowPrivilegeEscalation"] is False for container in pod["containers"])
    for name in ("lightning-store", "lightning-gateway"):
        (container,) = pods[name]["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("unit", sorted(path.name for path in (DEPLOY / "systemd").iterdir()))
def test_systemd_knows_every_setting_of_the_units(unit: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / unit).read_text()
    sections = re.findall(r"^\[(\w+)\]$", text, re.MULTILINE)
    assert sections == ["Unit", "Service", "Install"]
    for line in text.splitlines():
        assert re.fullmatch(r"(#.*|\[\w+\]|[A-Z][A-Za-z]+=.+|)", line), line
    assert "TimeoutStopSec=" in text
    program = shutil.which("systemd-analyze")
    if program is not None:
        copy = tmp_path / unit
        copy.write_text(text.replace(PROGRAM.strip(), "/bin/true"))
        done = subprocess.run([program, "verify", copy], capture_output=True, text=True, check=False)
        assert unit not in done.stderr, done.stderr


def test_services_of_the_compose_file_have_their_dependencies_volumes_and_files() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    ports: list[str] = []
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        ports += [port.rpartition(":")[0] for port in service.get("ports", ())]
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or source == "./agents" or (DEPLOY / source).is_file(), name
        if "build" in service:
            assert (DEPLOY / service["build"]["dockerfile"].removeprefix("deploy/")).is_file()
    assert len(set(ports)) == len(ports) == 3
    assert all("healthcheck" in services[name] for name in ("postgres", "store-a", "store-b", "gateway"))


def test_parts_of_the_manifests_refer_to_each_other() -> None:
    found = [(path, document) for path, document in documents() if path.parent.name == "kubernetes"]
    pods = [(p, d["spec"]["template"]) for p, d in found if d["kind"] in ("Deployment", "Job")]
    for path, document in found:
        assert {"apiVersion", "kind", "metadata"} <= set(document), path
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"]), path
        selector = document.get("spec", {}).get("selector", {})
        if document["kind"] == "Service":
            chosen = [pod for _, pod in pods if selector.items() <= pod["metadata"]["labels"].items()]
            assert len(chosen) == 1, path
            containers = chosen[0]["spec"]["containers"]
            names = {port.get("name") for each in containers for port in each.get("ports", ())}
            numbers = {port["containerPort"] for each in containers for port in each.get("ports", ())}
            for port in document["spec"]["ports"]:
                assert port.get("targetPort", port["port"]) in names | numbers, path
        elif "matchLabels" in selector and document["kind"] == "Deployment":
            assert selector["matchLabels"].items() <= document["spec"]["template"]["metadata"]["labels"].items(), path
    for path, pod in pods:
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes, path


def test_a_test_of_each_row_of_the_table_of_failures_checks_its_messages() -> None:
    """Tests may share the code that checks, in the same file."""
    texts = [path.read_text() for path in (REPO / "tests").rglob("test_*.py") if path.name != "test_deploy.py"]
    table = read_table()
    assert len(table) >= 16
    for failure in table.values():
        assert failure.tests, failure.name
        files = {name: next(text for text in texts if f"def {name}(" in text) for name in failure.tests}
        assert any(f'check_messages("{failure.name}"' in text for text in files.values()), failure.name


def test_the_times_in_the_table_of_failures_are_the_defaults() -> None:
    def default(function: Callable[..., Any], name: str) -> str:
        return f"{inspect.signature(function).parameters[name].default:g} s"

    table = read_table()
    assert default(PostgresLightningStore, "reconnect_s") in table["PostgreSQL is killed"].how_long
    assert default(BackendStore, "lease_s") in table["a runner is killed"].how_long
    silence = f"events: {connection._SILENCE_S:g} s"
    assert silence in table["a connection is half open: a cable, a firewall"].how_long
    assert f"{gateway_command._FINISH_S:g} s" in table["a gateway gets SIGTERM"].how_long


def test_commands_and_metrics_in_the_table_of_symptoms_exist() -> None:
    add_plugin_commands(get_manager())
    page = (REPO / "docs" / "operations.md").read_text()
    table = page.partition("## Symptoms")[2].partition("## ")[0]
    lines = [line.split() for line in re.findall(r"`agl ([^`]+)`", table)]
    assert len(lines) >= 6
    for words in lines:
        name, command = words[0], cli.get_command(click.Context(cli), words[0])
        assert command is not None, words
        if isinstance(command, click.Group) and len(words) > 1:
            name, command = words[1], command.commands[words[1]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, (name, words)


def test_the_simulated_queue_bends_where_the_servers_are_full() -> None:
    fleet = Fleet(runners=0, concurrency=8, agent_s=5.0, servers=2, server_s=0.005)
    small, large = [simulate(replace(fleet, runners=number), 16_000) for number in (60, 500)]
    assert small.rate == pytest.approx(small.offered, rel=0.02)
    assert (small.lost_leases, small.server_load < 0.3, small.claim_s < 0.1) == (0, True, True)
    assert large.rate < 0.9 * large.offered
    assert large.rate <= 2 / 0.005
    assert large.server_load > 0.9
    assert large.claim_s > 1.0
