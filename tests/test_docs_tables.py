"""Tables of the documentation that say what the code can do are compared with the code."""

from __future__ import annotations

import ast
import re

import pytest

from agentlightning.plugin.registry import get_manager
from agentlightning.testing.agent import AGENT_NAME
from tests.algorithms.glossary import find_unexplained, read_names
from tests.integrations.framework_agent import PROMPTS
from tests.source import REPO, source_files

CODE = "\n".join(file.path.read_text(encoding="utf-8") for file in source_files())


def page(name: str) -> str:
    return (REPO / "docs" / name).read_text(encoding="utf-8")


def test_every_metric_that_the_glossary_explains_is_written_by_the_code() -> None:
    words = {*re.findall(r"\w+", CODE), "rollout_probs_diff_max", ""}  # that of verl, and groups of its metrics
    names = {name.split("/")[-1] for name in read_names() if "<" not in name}
    strip = r"^(val|test|train|greedy)_|_(min|max|std|median|held)$"
    assert {name for name in names if name not in words and re.sub(strip, "", name) not in words} == set()


def test_the_glossary_does_not_explain_everything() -> None:
    given = [
        "reward",
        "val_reward",
        "writer/entropy",
        "call_s_p95",
        "errors/ValueError",
        "made_up",
        "entropyy",
        "a/loss",
    ]
    assert find_unexplained(given, ["writer"]) == {"made_up", "entropyy", "a/loss"}


def test_every_metric_of_a_server_that_a_page_names_exists() -> None:
    named = set(re.findall(r"`(agl_[a-z_]+)`", page("operations.md")))
    assert {name for name in named if name.removeprefix("agl_") not in CODE and name not in CODE} == set()


@pytest.mark.parametrize("kind", ["algorithm", "advantage", "aggregation", "credit", "policy_backend", "policy_loss"])
def test_the_page_of_algorithms_names_every_component(kind: str) -> None:
    names = set(get_manager().components(kind))
    assert (
        names - set(re.findall(r"[\w-]+", page("algorithms.md"))) - {"seq-mean-token-sum", "token-sum", "ppo"} == set()
    )


def test_the_papers_are_those_that_the_code_cites() -> None:
    """Of the parts that make an algorithm; caches, servers and statistics cite papers, too."""
    folder = REPO / "algorithms" / "agentlightning_algorithms"
    parts = ["apo/*.py", "gepa/*.py", "grpo/*.py", "offline/*.py", "shared/advantage.py", "shared/policy/loss.py"]
    cited = {
        paper
        for part in parts
        for file in folder.glob(part)
        for paper in re.findall(r"arXiv:\d{4}\.\d{5}", file.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"arXiv:\d{4}\.\d{5}", page("algorithms.md")))
    assert cited - named == set()
    assert {paper for paper in named if paper not in CODE} == set()


def test_the_estimators_that_take_credit_in_verl_are_those_of_the_code() -> None:
    (listed,) = re.findall(r"they need one of the estimators (.*?);", page("algorithms.md"), re.DOTALL)
    (known,) = re.findall(r"^CREDIT_ESTIMATORS: .*?^\}", CODE, re.MULTILINE | re.DOTALL)
    names = {name for name in re.findall(r'^    "(\w+)":', known, re.MULTILINE) if not name.endswith("_vectorized")}
    assert set(re.findall(r"`(\w+)`", listed)) == names


def test_the_table_of_integrations_is_that_of_the_conformance_tests() -> None:
    """Each class of conformance tests has a row with its prompt, and says who records the calls."""
    found = set()
    for folder in ("integrations", "frameworks", "newest"):
        for file in sorted((REPO / "tests" / folder).glob("test_*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                is_kit = isinstance(node, ast.ClassDef) and "AgentConformance" in map(ast.unparse, node.bases)
                if not is_kit or file.stem == "test_planted_bugs":
                    continue
                assert isinstance(node, ast.ClassDef)
                settings = {
                    ast.unparse(line.targets[0]): ast.unparse(line.value)
                    for line in node.body
                    if isinstance(line, ast.Assign)
                }
                names = {"PROMPTS": PROMPTS, "AGENT_NAME": AGENT_NAME}
                prompt = eval(settings.get("prompt_path", "None"), names)
                found.add((str(prompt), settings.get("records_calls", "True")))
    rows = re.findall(
        r"^\| [^|]+ \| ([^|]+) \| (client and gateway|gateway only) \|", page("integrations/features.md"), re.M
    )
    listed = {
        (name.strip("` "), str(recorder == "client and gateway"))
        for names, recorder in rows
        for name in names.replace("none", "None").split(", ")
    }
    assert listed == found
