"""Builds the documentation site: python docs/build.py [FOLDER], by default build/docs.

The pages are written for GitHub, and docs/README.md lists them: its sections are the site's sidebar and llms.txt.
A copy is made in which every page has its place on the site and every link leads there; reference.py adds the pages
that are generated from the code. Sphinx reads the copy; a Markdown twin of each page stands beside the HTML.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import reference
from notebooks import read_page
from sphinx.cmd.build import build_main

REPO = Path(__file__).resolve().parent.parent
PAGES = (".md", ".ipynb")
"""Suffixes of the files that become pages."""
GENERATED = "Reference"
"""The section to which the generated pages belong."""
_CODE = r"^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)[ ]*$|`[^`\n]*`"
_LINK = re.compile(
    rf"{_CODE}|(?P<begin>\]\(|(?:src|href)=\")(?P<target>[^)\s\"#:]+)(?=[)#\"])", re.MULTILINE | re.DOTALL
)
_ENTRY = re.compile(
    r"^(?P<indent> *)- \[(?P<title>.+?)\]\((?P<target>[^)]+)\)(?:: (?P<text>.+(?:\n +[^- ].*)*))?|^## (?P<section>.+)",
    re.MULTILINE,
)


@dataclass
class Entry:
    """A page in the list of pages, with the pages below it."""

    title: str
    page: str
    """Its place on the site."""
    text: str
    below: list[Entry] = field(default_factory=list)


def place(path: Path) -> Path:
    """Returns where a file of the repository stands on the site."""
    path = path.relative_to(REPO)
    if path == Path("README.md"):
        return Path("index.md")
    if path.name == "README.md":
        return path.parent.with_suffix(".md")
    path = path.with_name(path.name.lower()).with_suffix(".md") if path.suffix in PAGES else path
    return path.relative_to("docs") if path.parts[0] == "docs" else path


def move(page: Path, files: set[Path]) -> str:
    """Returns the text of a page with links that lead to places of the site, and adds the files that it links."""

    def lead(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        target = (page.parent / match["target"]).resolve()
        target = target / "README.md" if target.is_dir() else target
        files.add(target)
        return match["begin"] + os.path.relpath(place(target), place(page).parent)

    return _LINK.sub(lead, read_page(page))


def read_map(text: str) -> dict[str, list[Entry]]:
    """Returns the entries of each section of the list of pages."""
    sections: dict[str, list[Entry]] = {}
    for match in _ENTRY.finditer(text):
        if match["section"]:
            above = sections.setdefault(match["section"], [])
        else:
            entry = Entry(match["title"], match["target"], " ".join((match["text"] or "").split()))
            (above[-1].below if match["indent"] else above).append(entry)
    return sections


def toctree(entries: list[Entry], caption: str = "") -> str:
    lines = [f"{entry.title.replace('`', '')} </{entry.page.removesuffix('.md')}>" for entry in entries]
    return "\n".join(
        ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *lines, "```", ""]
    )


def build(out: Path) -> None:
    """Builds the site into a folder, and ends the program if Sphinx warns."""
    files: set[Path] = set()
    listed = move(REPO / "docs" / "README.md", files)
    pages = {place(REPO / "docs" / "README.md").as_posix(): listed}
    waiting = {REPO / "README.md", *files}
    while waiting:
        page = waiting.pop()
        name = place(page).as_posix()
        if page.suffix in PAGES and name not in pages:
            linked: set[Path] = set()
            pages[name] = move(page, linked)
            files |= linked
            waiting |= linked
    sections = read_map(listed)
    for page, title, text, content in reference.pages():
        above = sections[GENERATED]
        (above[-1].below if page.startswith(above[-1].page.removesuffix(".md") + "/") else above).append(
            Entry(title, page, text)
        )
        pages[page] = f"# {title}\n\n{text}\n\n{content}"
    entries = [entry for section in sections.values() for first in section for entry in (first, *first.below)]
    trees = {entry.page: toctree(entry.below) for entry in entries if entry.below}
    start = toctree([Entry("All pages", "docs.md", "")])
    trees["index.md"] = start + "".join(toctree(section, name) for name, section in sections.items())

    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        for name, text in pages.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text + trees.get(name, ""), encoding="utf-8")
        for file in files:
            if file.suffix not in PAGES:
                (source / place(file)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, source / place(file))
        options = ["--quiet", "--fail-on-warning", "--keep-going", "--jobs", "auto", "--conf-dir", str(REPO / "docs")]
        if code := build_main([*options, "--doctree-dir", f"{folder}/doctrees", str(source), str(out)]):
            sys.exit(code)
    shutil.rmtree(out / ".doctrees", ignore_errors=True)
    for name, text in pages.items():
        (out / name).write_text(text, encoding="utf-8")
    summary = pages["index.md"].split("\n\n")[1]
    lines = ["# Lightning", "", f"> {' '.join(summary.split())}"]
    for name, section in sections.items():
        lines += ["", f"## {name}", ""]
        lines += [f"- [{e.title}]({e.page}): {e.text}" for first in section for e in (first, *first.below)]
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    full = [pages["index.md"], *(pages[entry.page] for entry in entries)]
    (out / "llms-full.txt").write_text("\n\n".join(full), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else REPO / "build" / "docs"))
