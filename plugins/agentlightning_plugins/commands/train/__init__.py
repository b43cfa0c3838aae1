"""``agl train`` and ``agl config``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, LightningError, PluginImportError
from agentlightning.run.directory import RECORD_NAME, check_plugins, make_directory, read_record
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.log_setup import setup_logging
from agentlightning_plugins.shared.terminal import failing_run, shorten, use_store

if TYPE_CHECKING:
    from agentlightning.resources import LLM
    from agentlightning_plugins.shared.configuration.assembly import Parts
    from agentlightning_plugins.shared.configuration.config import TrainConfig

_ANSWER_S: Final = 5.0
"""Time limit for the answer of a store or an endpoint in a dry run."""
EXIT_CODES: Final = """
\b
Exit codes:
  0    success
  1    the algorithm or every rollout failed; the reason is printed above
  2    the configuration, the data or an argument is invalid; nothing was run
  130  stopped by Ctrl-C; 143 by SIGTERM. Continue with --resume.
"""


@click.command("train", epilog=EXIT_CODES)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the run; default runs/<name>.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Continue an interrupted run.")
@click.option("--new-store", is_flag=True, help="With --resume: the run's store is lost; run its rollouts again.")
@click.option("--print-config", is_flag=True, help="Print the resolved configuration and exit.")
@click.option("--profile", is_flag=True, help="Write where the second update's time went, to profile.txt of the run.")
@click.option("--dry-run", is_flag=True, help="Check agent, data, plugins and endpoints, and exit.")
def command(
    config: Path | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: Path | None,
    new_store: bool,
    print_config: bool,
    profile: bool,
    dry_run: bool,
) -> None:
    """Train the agent of CONFIG, a YAML file.

    KEY=VALUE overrides a setting for this run: algorithm.steps=20.
    """
    from agentlightning_plugins.shared.configuration.assembly import check_setup, load_parts, make_trainer
    from agentlightning_plugins.shared.configuration.config import read_config
    from agentlightning_plugins.shared.configuration.document import enter_folder, read_with_overrides
    from agentlightning_plugins.shared.configuration.run_directory import CONFIG_NAME, choose_directory

    overrides = (*overrides, "algorithm.profile_step=1") if profile else overrides
    if resume is not None:
        if run_dir is not None:
            raise click.UsageError("--resume already names the directory; remove --run-dir")
        overrides = (str(config), *overrides) if config is not None else overrides
        if config is not None and "=" not in str(config):
            raise click.UsageError(f"--resume uses the run's own configuration; remove {config}")
        check_plugins(resume, read_record(resume))
        config = resume / CONFIG_NAME
    if config is None:
        raise click.UsageError("give a configuration file, or a run to continue: agl train --resume RUN_DIR")
    document = read_with_overrides(config, overrides)
    from_start = enter_folder(config)
    checked = read_config(document)
    if checked.algorithm is None:
        raise ConfigError(f"{document.name}: algorithm is missing; set one, as in algorithm: baseline")
    resume = None if resume is None else Path(from_start(str(resume)))
    if resume is not None and checked.store is None and not new_store:
        file = resume / "store.db"
        if not file.is_file() or not file.stat().st_size:
            raise ConfigError(
                f"{file} is {'empty' if file.is_file() else 'missing'}, so finished rollouts would run again; restore "
                "it from a copy, or add --new-store"
            )
    if print_config:
        _print_config(checked, document)
        return
    parts = load_parts(checked, document)
    if dry_run:
        if not _check_run(checked, parts):
            raise SystemExit(2)
        return
    check_setup(checked, parts)  # before the directory is created
    named = checked.run_dir if run_dir is None else str(run_dir)
    directory = resume or choose_directory(named, checked.name or config.stem, from_start)
    if resume is None and (directory / RECORD_NAME).exists():
        raise ConfigError(f"{directory} already contains a run; continue it with: agl train --resume {directory}")
    try:
        trainer = make_trainer(checked, parts, directory, resume=resume is not None)
    except LightningError:
        with contextlib.suppress(OSError):  # nothing was run, so remove the empty directories
            directory.rmdir()
            directory.parent.rmdir()
        raise
    trainer.run_config = document.values
    if resume is None:
        make_directory(directory)
        try:
            (directory / CONFIG_NAME).write_text(_dump(document.values), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{directory / CONFIG_NAME} cannot be written: {error.strerror or error}") from error
    setup_logging(min(logging.getLogger("agentlightning").level or logging.INFO, logging.INFO))
    if trainer.strategy.role == "algorithm":
        _show_runner_command(trainer, checked.store, config)
    _fit(trainer, parts, directory)


@click.group("config")
def config_command() -> None:
    """Describe the configuration format."""


@config_command.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the configuration, for editors."""
    from agentlightning_plugins.shared.configuration.config import config_schema

    echo(json.dumps(config_schema(), indent=2))


def _print_config(checked: Any, document: Any) -> None:
    """Prints the configuration, followed by the algorithm's resolved settings, if any, as a second document."""
    from agentlightning_plugins.shared.configuration.assembly import compose_algorithm

    echo(_dump(document.values), nl=False)
    try:
        composed = compose_algorithm(checked, document)
    except PluginImportError as error:  # the file is resolved without the algorithm's packages
        echo(f"the algorithm's own defaults are not shown: {error}", err=True)
        return
    if composed is not None:
        echo(f"---  # the algorithm's resolved settings\n{_dump(composed)}", nl=False)


def _show_runner_command(trainer: Any, store: str | None, config: Path) -> None:
    """Prints the command that starts the runners of this run."""
    strategy = trainer.strategy
    url = store or f"http://{strategy.server_host}:{strategy.server_port}"
    run = "" if trainer.store.run_id == DEFAULT_RUN_ID else f" --run {trainer.store.run_id}"
    echo(f"this process runs no agents; start runners with:\n\n    agl runner {config} --store {url}{run}\n", err=True)


def _fit(trainer: Any, parts: Any, directory: Path) -> None:
    from agentlightning_plugins.shared.configuration.assembly import fit

    try:
        with failing_run():
            run = fit(trainer, parts)
    except (KeyboardInterrupt, SystemExit) as stop:
        echo(f"\nstopped; continue with:\n\n    agl train --resume {directory}\n", err=True)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    if run.status == "failed":
        echo(f"failed: no rollout of {directory} succeeded; agl report {directory} lists the errors", err=True)
        raise SystemExit(1)
    echo(f"done: {directory}; next: agl report {directory}, agl dashboard {directory}", err=True)


def _dump(values: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _check_run(config: TrainConfig, parts: Parts) -> bool:
    """Prints one line about each part; returns whether all are valid."""
    echo(f"ok    agent        {parts.agent!r}")
    for name, dataset in (("train", parts.train), ("val", parts.val)):
        if dataset is not None:
            echo(f"ok    data.{name:<8}{len(dataset)} tasks; the first: {shorten(repr(dataset[0]), 80)}")
    for key, component in parts.components.items():
        several = component if isinstance(component, list) else [component]
        echo(f"ok    {key:<13}{', '.join(type(each).__name__ for each in several)}")
    is_fine = True
    for doubt in _find_doubts(parts):
        echo(f"note  {doubt}")
    for what, problem in _problems(config, parts):
        is_fine &= problem is None
        echo(f"ok    {what}" if problem is None else f"WRONG {what}: {problem}")
    return is_fine


def _problems(config: TrainConfig, parts: Parts) -> Iterator[tuple[str, str | None]]:
    """Yields each part that is tried, with the problem, if any."""
    from agentlightning.resources import LLM, resolve_secrets
    from agentlightning_plugins.shared.configuration.assembly import check_setup, expand
    from agentlightning_plugins.shared.token import find_token

    if config.store is not None and not config.store.startswith(("memory://", "sqlite://")):
        yield "store", _try_store(expand(config.store))
    if isinstance(config.gateway, str) and "://" in config.gateway:
        url = expand(config.gateway).rstrip("/").removesuffix("/v1")
        yield f"gateway      {url}", _try_endpoint(LLM(endpoint=f"{url}/v1", model="", api_key=find_token()))
    for name, resource in resolve_secrets(parts.resources or {}).items():
        if isinstance(resource, LLM):
            yield f"resources.{name:<13}{resource.endpoint}", _try_endpoint(resource)
    yield "resources", _try_agent(parts)
    try:
        called = check_setup(config, parts)
    except LightningError as error:
        yield "algorithm", str(error)
        return
    for llm in {(each.endpoint, each.model): each for each in called}.values():
        yield f"algorithm    {llm.model} at {llm.endpoint}", _try_endpoint(llm)


def _try_store(url: str) -> str | None:
    try:
        use_store(url, None, lambda store: asyncio.wait_for(store.statistics(), _ANSWER_S))
    except (LightningError, OSError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try_agent(parts: Parts) -> str | None:
    """Fills the parameters of the agent's function. Returns the problem, or None if each has a resource."""
    from agentlightning.litagent.function import FunctionalLitAgent, first_resources

    agent = getattr(parts.agent, "agent", parts.agent)  # without its reward function
    if isinstance(agent, FunctionalLitAgent):
        has_model = parts.components["algorithm"].default_adapter == "triplet" or "gateway" in parts.components
        try:
            agent.check_resources(first_resources(parts.agent, parts.resources) or {}, has_model=has_model)
        except ConfigError as error:
            return str(error)
    return None


def _find_doubts(parts: Parts) -> Iterator[str]:
    """Yields what is probably a mistake in a prompt, but may be what the agent needs."""
    from agentlightning.litagent.function import first_resources
    from agentlightning.resources import PromptTemplate
    from agentlightning_algorithms.shared.prompt_search.candidate import find_placeholders

    data = parts.train if parts.train is not None else parts.val
    columns = list(data[0]) if data is not None and isinstance(data[0], Mapping) else []
    for name, prompt in (first_resources(parts.agent, parts.resources) or {}).items():
        if not isinstance(prompt, PromptTemplate) or prompt.engine == "poml":
            continue
        fields = find_placeholders(prompt)
        if not fields:
            yield f"resources.{name}: no placeholder, so the agent has to add the task to the text"
        elif columns and (unknown := sorted(fields.difference(columns))):
            shown = ", ".join(f"{{{field}}}" for field in unknown)
            yield f"resources.{name}: the agent has to fill {shown}: the tasks have only {', '.join(columns)}"


def _try_endpoint(llm: LLM) -> str | None:
    """Lists the models, a request that costs nothing. Returns the problem, or None if the server answers."""
    import http.client
    import urllib.request

    request = urllib.request.Request(llm.endpoint.rstrip("/") + "/models")  # noqa: S310 # the user's own endpoint
    if llm.api_key is not None:
        request.add_header("Authorization", f"Bearer {llm.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:  # noqa: S310 # as above
            listed = response.read(2**20)
        try:
            names = [str(each["id"]) for each in json.loads(listed)["data"]]
        except (ValueError, LookupError, TypeError):  # not every server has a list
            return None
        if llm.model and names and llm.model not in names:
            return f"no model {llm.model!r}; it has {shorten(', '.join(names), 200)}"
        return None
    except urllib.error.HTTPError as error:
        with error:
            return f"answers {error.code} {error.reason}" if error.code in (401, 403) or error.code >= 500 else None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"cannot be reached: {getattr(error, 'reason', error)}"


add_commands = lazy_commands(f"{__name__}:command", f"{__name__}:config_command")
