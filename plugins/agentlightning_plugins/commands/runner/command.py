"""``agl runner``: runners against a store that others use too."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import click

_DEFAULT_STORE = "http://127.0.0.1:4747"


@click.command("runner")
@click.argument("agent")
@click.option("--store", default=_DEFAULT_STORE, show_default=True, metavar="URL", help="Token: AGL_TOKEN.")
@click.option("--run", default=None, metavar="NAME", help="Whose rollouts to run; default is the run `default`.")
@click.option("--reward", metavar="MODULE:ATTRIBUTE", help="reward(task, output, rollout), if the agent says none.")
@click.option("--n-runners", default=1, show_default=True, type=click.IntRange(min=1), help="Processes.")
@click.option("--max-concurrency", default=16, show_default=True, type=click.IntRange(min=1), help="Rollouts at once.")
@click.option("--max-rollouts", type=click.IntRange(min=1), help="Each process ends after so many.")
@click.option("--tracer", default="otel", show_default=True, help="Records what the agent does.")
def command(
    agent: str,
    store: str,
    run: str | None,
    reward: str | None,
    n_runners: int,
    max_concurrency: int,
    max_rollouts: int | None,
    tracer: str,
) -> None:
    """Run AGENT on the rollouts that wait in a store.

    AGENT is module:attribute, file.py:attribute, or a configuration file of `agl train`, whose agent is taken. Ctrl-C
    lets rollouts in flight finish; a second one does not.
    """
    from agentlightning.plugin.registry import get_manager
    from agentlightning.store.factory import create_store
    from agentlightning.trainer import LitAgentRunnerJob
    from agentlightning_plugins.commands.configuration.assembly import load_agent
    from agentlightning_plugins.commands.configuration.config import AgentConfig, read_config
    from agentlightning_plugins.commands.configuration.document import read_document
    from agentlightning_plugins.strategies.processes.child_process import RunnerProcesses
    from agentlightning_plugins.strategies.processes.stopping import until_sigterm
    from agentlightning_plugins.strategies.processes.supervisor import Supervisor

    if store.startswith("memory://"):
        raise click.UsageError("memory:// lives in one process; give the URL of a store that runners share")
    if Path(agent).suffix in (".yaml", ".yml", ".toml"):
        if reward is not None:
            raise click.UsageError("the configuration names the reward; leave --reward out")
        what = load_agent(read_config(read_document(Path(agent))).agent)
    else:
        what = load_agent(AgentConfig(target=agent, reward=reward))
    get_manager().check("tracer", tracer)
    token = os.environ.get("AGL_TOKEN") if store.startswith("http") else None
    job = LitAgentRunnerJob(what, tracer, max_rollouts=max_rollouts, max_concurrency=max_concurrency)

    async def serve() -> None:
        opened = create_store(store, run=run, token=token)
        try:
            whose = f"run {opened.run_id} of {re.sub('(?<=://)[^/@]*@', '', store)}"  # no password at the terminal
            click.echo(f"Looking for {whose}")
            await opened.statistics()  # a store that is not there is known before processes are started
            click.echo(f"Running {agent} for {whose}: {n_runners} x {max_concurrency} rollouts at once.")
            await Supervisor(RunnerProcesses(job, store, token, opened.run_id), opened, n_runners).run()
        finally:
            await opened.close()

    asyncio.run(until_sigterm(serve()))
