"""README and docs: Python blocks run, links resolve, and commands exist."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import pytest

from agentlightning.cli import cli
from agentlightning.plugin.registry import PluginManager
from agentlightning.store.backend import Backend
from tests.pages import FENCED, PAGES, blocks, read_page
from tests.source import REPO, ROOTS, pyproject, source_files
from tests.test_rules import PLUGINS

# A block marked ```python no-run: needs <this>``` is not executed.
REASONS = ("a GPU", "a key", "a model download", "the program of the agent", "its framework")

PATIENCE_S = 600.0

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())


def _prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", read_page(page)))


@pages
def test_backticks_of_a_paragraph_come_in_pairs(page: Path) -> None:
    """A missing backtick would swap code and text in the rest of the paragraph."""
    paragraphs = re.split(r"\n[ ]*\n", FENCED.sub("", read_page(page)))
    assert [paragraph for paragraph in paragraphs if paragraph.count("`") % 2] == []


def _run(program: str) -> None:
    """Runs a program as the main module of this process; its output goes to a file beside it."""
    os.chdir(Path(program).parent)
    with Path(f"{program}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    runpy.run_path(program, run_name="__main__")


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that are forks of one that has imported what many pages need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agentlightning", "openai", "aiohttp", "pydantic", "torch", "transformers"])
    return context


@pages
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, processes: Any) -> None:
    """A page is one program. Each block keeps its line number, so that a traceback points into the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and not block.mark and page.suffix == ".md":  # test_tutorials.py runs notebooks
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    if lines:
        program = tmp_path / f"{page.stem.lower()}_page.py"
        program.write_text("\n".join(lines) + "\n", encoding="utf-8")
        process = processes.Process(target=_run, args=[str(program)])
        process.start()
        process.join(PATIENCE_S)
        process.kill()
        assert process.exitcode == 0, Path(f"{program}.log").read_text(encoding="utf-8")


@pages
def test_a_block_names_its_language_and_a_block_that_does_not_run_has_an_allowed_reason(page: Path) -> None:
    allowed = {"", *(f"no-run: needs {reason}" for reason in REASONS)}
    if page.parent.name == "integrations":
        allowed = {"calculator.py"}  # tests/recipes.py runs it where its framework is
    fenced = list(blocks(page))
    assert [f"line {b.line}: {b.mark}" for b in fenced if b.language == "python" and b.mark not in allowed] == []
    assert [f"line {b.line}: {b.language!r}" for b in fenced if b.language in ("", "py", "python3")] == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.+?)\s*$", read_page(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_relative_link_of_a_page_resolves(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"", _prose(page)):
        target, _, anchor = (link[0] or link[1]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix in (".md", ".ipynb") and anchor not in _anchors(path)):
            broken.append(link[0] or link[1])
    assert broken == []


def test_the_list_of_pages_has_every_page() -> None:
    folder = REPO / "docs"
    links = re.findall(r"^ *- \[.*?\]\(([^)]+)\): \S", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(folder / link).resolve() for link in links]
    others = {REPO / "README.md", REPO / "AGENTS.md", folder / "README.md"}  # tools find the second one by its name
    assert sorted(listed) == sorted({*PAGES} - others)


_PROVIDERS_MODEL = re.compile(
    r"\b(gpt-\d[\w.-]*|chatgpt-\w[\w.-]*|o[134]-(mini|pro|preview)|claude-(opus|sonnet|haiku|\d)[\w.-]*|gemini-\d[\w.-]*"
    r"|text-embedding-[\w.-]+|mistral-(large|medium|small)[\w.-]*|grok-\d[\w.-]*|deepseek-(chat|reasoner))",
    re.IGNORECASE,
)


def test_only_the_page_of_models_names_models_that_a_provider_switches_off() -> None:
    """Tests may name them: no provider receives the name, and some frameworks accept only names that they know."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    named = {}
    for path in listed.stdout.splitlines():
        file = REPO / path
        if path != "docs/models.md" and not path.startswith("tests/") and file.suffix not in (".png", ".safetensors"):
            named[path] = {match[0] for match in _PROVIDERS_MODEL.finditer(file.read_text("utf-8", errors="replace"))}
    assert {path: names for path, names in named.items() if names} == {}


@pages
def test_every_class_that_a_page_names_with_its_module_exists(page: Path) -> None:
    for name in re.findall(r"`(agentlightning\w*(?:\.\w+)*\.[A-Z]\w*[a-z]\w*)`", read_page(page)):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/plugins/stores.md"])
def test_a_page_about_writing_a_store_names_every_part_of_a_backend(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    begin = r"^(?:1\. Implement the methods of `Backend`|\| method or attribute of )"
    (part,) = re.findall(rf"{begin}.*?\n(?:2\.|`)", text, re.MULTILINE | re.DOTALL)
    parts = {name for name in (*vars(Backend), *Backend.__annotations__) if not name.startswith("_")}
    assert parts - set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", part))) == set()


def _unknown(line: str) -> Iterator[str]:
    """Yields the commands and options of ``agl`` in a line that do not exist."""
    for shown in re.split(r"(?<![\w.-])agl (?=[a-z])", line)[1:]:
        words = shlex.split(re.split(r"[`#;]|&&| \| ", shown)[0])
        command: click.Command = cli
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            *others, name = words.pop(0).split("|")  # as in cancel|retry
            known = {each: command.get_command(click.Context(command), each) for each in (*others, name)}
            yield from (f"{command.name} {each}" for each, found in known.items() if found is None)
            command = known[name] or click.Command(name)
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if word == "--" or not (word.startswith("-") or command.allow_interspersed_args):
                break  # the rest belongs to another command
            if re.match("--?[a-z]", word):
                yield from (f"{command.name} {o}" for o in word.partition("=")[0].split("|") if o not in options)


@pages
def test_every_command_and_option_of_agl_that_a_page_shows_exists(page: Path) -> None:
    PluginManager().hook.add_commands(cli=cli)
    lines = read_page(page).replace("\\\n", " ").splitlines()
    assert [unknown for line in lines for unknown in _unknown(line)] == []


@pages
def test_every_extra_and_target_that_a_page_shows_exists(page: Path) -> None:
    inline = re.findall(r"`([^`\n]+)`", read_page(page))
    text = "\n".join([*inline, *(block.text for block in blocks(page) if block.language != "python")])
    extras = {extra for group in re.findall(r"(?:lightning|\.)\[([\w,-]+)\]'", text) for extra in group.split(",")}
    assert extras <= set(pyproject()["project"]["optional-dependencies"])
    targets = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", text, re.MULTILINE))
    rules = re.findall(r"^([a-z-]+%?):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [each for each in targets if not any(fnmatch(each, rule.replace("%", "*")) for rule in rules)] == []


@pages
def test_no_page_installs_lightning_from_the_package_index(page: Path) -> None:
    installs = re.findall(r"pip install[^\n`]*", read_page(page))
    assert [line for line in installs if re.search(r"\s(-U|--upgrade)\b|\s['\"]?lightning\b", line)] == []


def test_every_path_that_contributing_names_exists() -> None:
    packages = {folder.parent.name: folder for folder in ROOTS.values()}
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = []
    for path in re.findall(r"`((?:core|plugins|integrations|algorithms|tests|docs)/[\w/.]*)`", text):
        root, _, rest = path.partition("/")
        if "acme" not in path and not (packages.get(root, REPO / root) / rest).exists():
            missing.append(path)
    assert missing == []


@pages
def test_a_line_of_text_has_at_most_132_characters(page: Path) -> None:
    long, is_code = [], False
    for number, line in enumerate(read_page(page).splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > 132 and not is_code and not line.startswith(("|", "<", "    ")):
            long.append(f"line {number}: {line}")
    assert long == []


def test_the_pictures_of_the_concepts_are_drawn_from_their_text() -> None:
    drawing = runpy.run_path(str(REPO / "docs" / "pictures.py"))
    for name, (text, distance) in drawing["PICTURES"].items():
        drawn = (REPO / "docs" / f"concept-{name}.svg").read_text(encoding="utf-8")
        assert drawn == drawing["draw"](text, distance), "run python docs/pictures.py"
        assert set(drawing["ARROW"].findall(text)[0][:2]) <= {name for _, _, name, _ in drawing["BOX"].findall(text)}


def test_the_picture_of_the_house_shows_every_shared_package_and_every_group_of_plugins() -> None:
    picture = (REPO / "docs" / "house.svg").read_text(encoding="utf-8")
    shared = {
        file.module.rpartition("shared.")[2].partition(".")[0] for file in source_files() if "shared." in file.module
    }
    names = {name for name in shared if name}
    names |= {f"{plugin.partition('.')[0]}/" for plugin in PLUGINS.values()}
    assert {name for name in names if name not in picture} == set()
