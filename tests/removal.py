"""Removes each of our plugins in turn and uses the others: ``python -m tests.removal`` prints failures as JSON.

Everything runs in one process. Modules of the plugins that stay are imported once: that no plugin imports another one
at its top is a rule of `tests/test_rules.py`; here plugins need each other when they are used.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import importlib.abc
import importlib.metadata
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.waiting import LIMIT_S

GROUP = "agentlightning"


class _Blocker(importlib.abc.MetaPathFinder):
    """Refuses to import a package, as if its folder did not exist."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == self._package or fullname.startswith(self._package + "."):
            raise ModuleNotFoundError(f"No module named {fullname!r} (taken away)", name=fullname)


@contextmanager
def _without(package: str) -> Iterator[None]:
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]
    parent, _, name = package.rpartition(".")
    if hasattr(sys.modules.get(parent), name):  # `from parent import name` would find it
        delattr(sys.modules[parent], name)
    blocker = _Blocker(package)
    sys.meta_path.insert(0, blocker)
    try:
        yield
    finally:
        sys.meta_path.remove(blocker)


def _use_the_rest(points: list[importlib.metadata.EntryPoint]) -> Iterator[str]:
    """Yields each failure, with its traceback."""
    from click.testing import CliRunner

    registry = importlib.import_module("agentlightning.plugin.registry")
    manager = registry.PluginManager(points)
    registry.get_manager = lambda: manager
    cli = importlib.import_module("agentlightning.cli")
    cli.get_manager = registry.get_manager
    for plugin in manager.plugins.values():
        if plugin.state != "loaded":
            yield f"plugin {plugin.name}: {plugin.error}"
        for component in plugin.offers:
            if manager.missing_requirements(component.kind, component.name):
                continue
            try:
                manager.get(component.kind, component.name)
            except Exception:  # everything that fails is reported
                yield f"{component.kind} {component.name}: {traceback.format_exc(limit=-3)}"
    cli.add_plugin_commands(manager)
    calls = [["--help"], ["plugins", "--json"], *([name, "--help"] for name in cli.cli.commands)]
    for arguments in [call for call in calls if call[0] in ("--help", *cli.cli.commands)]:
        result = CliRunner().invoke(cli.cli, arguments)
        if result.exit_code != 0:
            yield f"agl {' '.join(arguments)}: {result.output} {result.exception!r}"
    try:
        _train(manager)
    except Exception:  # everything that fails is reported
        yield f"a run: {traceback.format_exc(limit=-4)}"


def _first(manager: Any, kind: str, *names: str) -> str:
    return next(name for name in names if name in manager.components(kind))


def _train(manager: Any) -> None:
    """Runs one rollout with the plugins that are left."""
    import agentlightning as agl

    def agent(task: str) -> float:
        return float(task == "right")

    @agl.algo
    async def one_rollout(*, store: agl.LightningStore, train_dataset: agl.Dataset[Any]) -> None:
        rollout = await store.enqueue_rollout(train_dataset[0])
        await store.wait_for_rollouts([rollout.rollout_id], timeout=LIMIT_S)

    with tempfile.TemporaryDirectory() as folder:
        urls = {"memory": "memory://", "sqlite": f"sqlite:///{folder}/store.db"}
        store = agl.create_store(urls[_first(manager, "store", *urls)])
        trainer = agl.Trainer(
            algorithm="baseline" if "baseline" in manager.components("algorithm") else one_rollout,
            tracer=_first(manager, "tracer", "otel", "dummy"),
            strategy=_first(manager, "strategy", "shm", "cs"),
            store=store,
            trackers=[],
        )
        run = trainer.fit(agent, ["right"])
        assert run.status == "succeeded", run
        asyncio.run(store.close())


def main() -> None:
    """Prints the failures for each removed plugin."""
    logging.disable()
    importlib.metadata.distribution = functools.cache(importlib.metadata.distribution)  # thousands of times the same
    points = [
        point
        for point in importlib.metadata.entry_points(group=GROUP)
        if point.dist is not None and point.dist.name == "lightning"
    ]
    failures = {}
    for gone in points:
        with _without(gone.value):
            failures[gone.name] = list(_use_the_rest([point for point in points if point is not gone]))
        gc.freeze()  # the collector would read all third-party modules again and again
    print("\n" + json.dumps(failures))


if __name__ == "__main__":
    main()
