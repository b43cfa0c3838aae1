"""``agl runner``: runs an agent on the rollouts of a shared store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentlightning.cli import echo
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.log_setup import log_options
from agentlightning_plugins.shared.terminal import DEFAULT_STORE, StoreCommand, find_store


@click.command("runner", cls=StoreCommand)
@click.argument("agent")
@click.option(
    "--store",
    "where",
    metavar="URL",
    help="URL of the store, or directory of a run, also without --store. Default: AGL_STORE, else the store of the "
    f"configuration, else {DEFAULT_STORE}. The token of a store is read from AGL_TOKEN.",
)
@click.option(
    "--run",
    envvar="AGL_RUN",
    show_envvar=True,
    metavar="NAME",
    help="The run; default is the name in the configuration, else `default`.",
)
@click.option("--reward", metavar="MODULE:ATTRIBUTE", help="reward(task, output, rollout), if the agent returns none.")
@click.option("--n-runners", default=1, show_default=True, type=click.IntRange(min=1), help="Number of processes.")
@click.option(
    "--max-concurrency",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Concurrent rollouts per process.",
)
@click.option("--max-rollouts", type=click.IntRange(min=1), help="Number of rollouts after which a process stops.")
@click.option("--tracer", default="otel", show_default=True, help="The tracer.")
@log_options
def command(
    agent: str,
    where: str | None,
    run: str | None,
    reward: str | None,
    n_runners: int,
    max_concurrency: int,
    max_rollouts: int | None,
    tracer: str,
) -> None:
    """Run AGENT on the queued rollouts of a store.

    AGENT is module:attribute, file.py:attribute, or a configuration file of `agl train`. Ctrl-C waits for
    the rollouts in flight; a second Ctrl-C stops them.
    """
    from agentlightning.plugin.registry import get_manager
    from agentlightning.run.job import LitAgentRunnerJob
    from agentlightning.store.factory import create_store
    from agentlightning.store.url import hide_password
    from agentlightning_plugins.shared.configuration.assembly import expand, is_config_file, load_agent_argument
    from agentlightning_plugins.shared.configuration.document import anchor, read_document
    from agentlightning_plugins.shared.processes.child_process import RunnerProcesses
    from agentlightning_plugins.shared.processes.job_process import JobTarget
    from agentlightning_plugins.shared.processes.stopping import until_sigterm
    from agentlightning_plugins.shared.processes.supervisor import Supervisor

    configured = None
    if is_config_file(agent) and (values := read_document(Path(agent)).values).get("store"):
        configured = anchor(Path(agent).resolve().parent, expand(values["store"]))
    store = find_store(where, configured)
    if store == configured:
        run = run or values.get("name") or Path(agent).stem
    if store.startswith("memory://"):
        raise click.UsageError("memory:// cannot be shared between processes; use another store")
    url = anchor(Path.cwd(), store)  # the configuration's folder becomes the working directory
    litagent = load_agent_argument(agent, reward)
    get_manager().check("tracer", tracer)
    job = LitAgentRunnerJob(litagent, tracer, max_rollouts=max_rollouts, max_concurrency=max_concurrency)

    async def serve() -> None:
        opened = create_store(url, run=run)
        try:
            whose = f"run {opened.run_id} of {hide_password(store)}"
            echo(f"Connecting to {whose}")
            await opened.statistics()  # fails here, before processes are started, if the store is unreachable
            echo(f"Running {agent} for {whose}: {n_runners} x {max_concurrency} concurrent rollouts.")
            target = JobTarget.of_this_process(url, None, opened.run_id)  # the processes read AGL_TOKEN themselves
            await Supervisor(RunnerProcesses(job, target), opened, n_runners).run()
        finally:
            await opened.close()

    asyncio.run(until_sigterm(serve()))


add_commands = lazy_commands(f"{__name__}:command")
