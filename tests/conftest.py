"""Set-up of all tests: no key, no download, one thread of arithmetic, a GPU only where marked.

A test runs in the environment ``main``, and in ``oldest`` too if it is in ``IN_OLDEST``. The folders ``tests/docs``,
``tests/frameworks``, ``tests/newest``, ``tests/oldest``, ``tests/verl`` and ``tests/vllm`` belong to other
environments. A module marked ``pytest.mark.environment("main", "newest")`` runs in these two, whatever its folder.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite(
    "tests.integrations.team",
    "tests.core.tracer_semantics",
    *(f"tests.plugins.stores.{name}" for name in ("actions", "queueing", "reading", "semantics", "waiting")),
)
# Hypothesis measures how long an example takes, and a machine with other work to do takes longer.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

for name in [name for name in os.environ if name.startswith(("AGL_", "OPENAI_"))]:
    del os.environ[name]  # a developer's own settings and keys must not reach a test
# Set before anything imports them, and inherited by the processes that tests start.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell sets this for background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # otherwise processes that tests start ignore Ctrl-C too


ENVIRONMENTS = ("main", "newest", "verl", "verl-vllm", "oldest", "vllm", "frameworks", "docs")
IN_OLDEST = """
    core/test_emitter.py core/test_record.py core/test_resources.py
    core/test_tracer.py integrations/test_pickling.py integrations/test_span_tree.py
    plugins/gateway/test_gateway.py plugins/gateway/test_gateway_dialects.py plugins/gateway/test_gateway_fault.py
    plugins/gateway/test_gateway_metrics.py plugins/gateway/test_gateway_stream.py
    plugins/stores/test_http_bad_input.py plugins/stores/test_http_events.py plugins/stores/test_http_otlp.py
    plugins/tracers
""".split()
"""Modules and folders whose result depends on the versions of libraries: pydantic, aiohttp, OpenTelemetry, click,
jinja2, pluggy. They prove the lower bounds of pyproject.toml, with ``tests/oldest`` and modules that name it."""
_FOLDER = Path(__file__).parent
_ZONE = os.environ.get("TZ")
_ZONES = ("UTC", "Pacific/Apia", "America/New_York", "Asia/Kathmandu")
"""Of workers while they collect."""
TEMPORARY = f"{tempfile.gettempdir()}/pytest-of-"  # where folders of tests are


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Restores what a test leaves behind in its process and another one would trip over.

    A handler of our logger would keep the next test's ``caplog`` empty; an import path or a module of a test's folder
    would give it another test's ``agent.py``; a trace would be its last one.
    """
    logger = logging.getLogger("agentlightning")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    path, modules = sys.path[:], {*sys.modules}
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(TEMPORARY):
            del sys.modules[name]
    if tracing := sys.modules.get("agentlightning.tracer.tracer"):
        tracing._last_trace.set(None)
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--environment", choices=ENVIRONMENTS, default="main", help="tests that run; see .ci/environments.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Gives clients of httpx one certificate of an authority, because no test calls a server of the Internet.

    Reading all of them takes 30 ms of CPU for each client, a sixth of the time of many tests.

    Workers of pytest-xdist collect in different time zones, each with its own seed of hashes, and compare their lists:
    a name of a test that contains a hash or a time of day ends the run before its first test.
    """
    if hasattr(config, "workerinput"):
        assert os.environ.get("PYTHONHASHSEED", "random") == "random", "unset PYTHONHASHSEED: workers compare names"
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        os.environ["TZ"] = _ZONES[number % len(_ZONES)]
        time.tzset()
    bundles = {certifi.where(), os.environ.get("SSL_CERT_FILE", "")}
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(first + end)
    authority = file.name
    create = ssl.create_default_context

    @functools.wraps(create)
    def create_quickly(*args: Any, cafile: str | None = None, **more: Any) -> ssl.SSLContext:
        return create(*args, cafile=authority if cafile in bundles else cafile, **more)

    patch = pytest.MonkeyPatch()
    patch.setattr(ssl, "create_default_context", create_quickly)
    config.add_cleanup(Path(authority).unlink)
    config.add_cleanup(patch.undo)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files of other environments, whose imports need packages that are not installed here."""
    return None if config.getoption("--environment") in environments_of(collection_path) else True


def environments_of(path: Path) -> set[str]:
    """Returns the environments in which a file's tests run, or any tests of a folder."""
    if path.is_dir():
        return set().union(*map(environments_of, path.rglob("test_*.py")))
    mark = re.search(r"pytest\.mark\.environment\(([^)]*)\)", path.read_text(encoding="utf-8"))
    if mark:
        return set(re.findall(r"[\w-]+", mark[1]))
    place = path.relative_to(_FOLDER)
    if place.parts[0] in ENVIRONMENTS:
        return {place.parts[0]}
    return {"main", "oldest"} if any(map(place.is_relative_to, IN_OLDEST)) else {"main"}


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names bytes by their number: compressed ones may contain the time of day, and two workers must agree on names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    """Exempts imported modules from garbage collection, and collects less often: together a fifth of the CPU time."""
    if _ZONE is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = _ZONE
    time.tzset()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    SourceFileLoader.set_data = _write_if_installed


def _write_if_installed(
    self: SourceFileLoader, path: str, data: Any, *, _mode: int = 0o666, write: Any = SourceFileLoader.set_data
) -> None:
    """Writes the bytecode of a module of the environment: frameworks take a minute to compile.

    A module that a test writes twice within a second, with the same size, would be read from the first one's cache.
    """
    if path.startswith(sys.prefix):
        write(self, path, data, _mode=_mode)


def pytest_sessionfinish() -> None:
    """Closes the client that the demo's agent keeps for as long as its process runs."""
    agent = sys.modules.get("agentlightning_plugins.demo.agent")
    if agent is not None:
        agent.CLIENT.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` on a machine without a GPU; no other test may be skipped.

    In workers of pytest-xdist the modules that take longest come first, so that none is left to one worker at the end.
    """
    if hasattr(config, "workerinput"):
        seconds = Counter[Path]()
        for item in items:
            seconds[item.path] += 8 if item.get_closest_marker("slow") else 0.3  # means of a whole run
        items.sort(key=lambda item: -seconds[item.path])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
