"""``FrameworkAgent``, which passes endpoints and prompts of rollouts to the object of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.litagent import function
from agentlightning.plugin.hookspecs import WrapOptions, hookimpl
from agentlightning.plugin.registry import PluginManager
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path

ROLLOUT = agl.AttemptedRollout(
    rollout_id="ro-1",
    input={},
    start_time=0.0,
    status="running",
    attempt=agl.Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)
PROXY = agl.ProxyLLM(endpoint="http://gateway/v1", model="m", api_key="key")
SCOPED = "http://gateway/rollout/ro-1/attempt/at-1/v1"


def run(agent: agl.LitAgent[Any], resources: dict[str, agl.Resource], task: Any = "task") -> Any:
    return agent.rollout(task, resources, ROLLOUT)


class Greeter:
    """An object of a framework that the test's plugin can wrap."""

    def __init__(self) -> None:
        self.greeting = "Say {hello}."


class GreeterAgent(FrameworkAgent[Greeter]):
    def texts(self) -> Mapping[str, str]:
        return {"greeter.greeting": self.agent.greeting, "greeter.farewell": "Bye."}

    def run(self, task: Any, llm: agl.LLM | None, texts: Mapping[str, str]) -> Any:
        return {"task": task, "llm": llm, "texts": dict(texts)}


@hookimpl
def wrap_agent(agent: Any, options: WrapOptions) -> agl.LitAgent[Any] | None:
    return GreeterAgent(agent, options) if isinstance(agent, Greeter) else None


@pytest.fixture
def greeter_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager([])
    manager.register(SimpleNamespace(wrap_agent=wrap_agent), "greeter")
    monkeypatch.setattr(function, "get_manager", lambda: manager)


def outcome(prompts: Any, resources: dict[str, agl.Resource], task: Any = "task") -> Any:
    seen: list[Any] = []
    agent = agl.wrap(Greeter(), reward=lambda task, output, rollout: seen.append(output) or 1.0, prompts=prompts)
    assert run(agent, resources, task) == 1.0
    return seen[0]


@pytest.mark.usefixtures("greeter_plugin")
class TestAFrameworksObject:
    """Tests of the agent that a plugin's ``wrap_agent`` returns."""

    def test_runs_with_the_endpoint_of_its_attempt(self) -> None:
        assert outcome(None, {"main": PROXY})["llm"].get_base_url() == SCOPED
        assert outcome(None, {})["llm"] is None
        assert outcome(None, {"llm": PROXY, "judge": PROXY})["llm"].get_base_url() == SCOPED

    def test_refuses_to_guess_among_several_endpoints(self) -> None:
        with pytest.raises(agl.ConfigError, match=r"2 models match: judge, writer.*'llm'"):
            outcome(None, {"writer": PROXY, "judge": PROXY})

    def test_begins_with_its_own_texts_including_braces(self) -> None:
        agent = agl.wrap(Greeter(), prompts=["greeter.greeting"])
        assert agent.initial_prompts() == {"greeter.greeting": agl.PromptTemplate("Say {{hello}}.")}
        assert outcome(["greeter.greeting"], {})["texts"] == {"greeter.greeting": "Say {hello}."}

    def test_uses_the_texts_of_its_resources(self) -> None:
        tuned: dict[str, agl.Resource] = {"greeter.greeting": agl.PromptTemplate("Greet {name}: {task}")}
        texts = outcome(["greeter.greeting"], tuned, {"name": "Ada"})["texts"]
        assert texts == {"greeter.greeting": "Greet Ada: {'name': 'Ada'}"}

    def test_fills_placeholders_from_the_task_and_task_from_the_result_of_task_to_input(self) -> None:
        task = {"question": "hi", "style": "kind"}
        seen: list[Any] = []
        agent = agl.wrap(
            Greeter(),
            reward=lambda task, output, rollout: seen.append(output["texts"]) or 1.0,
            task_to_input=lambda task: task["question"],
            prompts={"greeter.greeting": "Be {style} about {task}."},
        )
        agent.rollout(task, {}, ROLLOUT.model_copy(update={"input": task}))
        assert seen == [{"greeter.greeting": "Be kind about hi."}]

    @pytest.mark.parametrize("value", ["Greet them all.", agl.PromptTemplate("Greet them all.")])
    def test_begins_with_a_given_text_instead_of_its_own(self, value: Any) -> None:
        assert outcome({"greeter.greeting": value}, {})["texts"] == {"greeter.greeting": "Greet them all."}
        agent = agl.wrap(Greeter(), prompts={"greeter.greeting": value})
        assert agent.initial_prompts() == {"greeter.greeting": agl.PromptTemplate("Greet them all.")}

    def test_takes_a_text_from_a_resource_given_by_name(self) -> None:
        texts = outcome({"greeter.greeting": "style"}, {"style": agl.PromptTemplate("Be kind.")})["texts"]
        assert texts == {"greeter.greeting": "Be kind."}

    def test_names_its_texts_when_a_prompt_is_misspelt(self) -> None:
        expected = (
            r"no text 'greeter.greting'. Did you mean 'greeter.greeting'\? Its texts: greeter.farewell, greeter.gre"
        )
        with pytest.raises(agl.ConfigError, match=expected):
            agl.wrap(Greeter(), prompts=["greeter.greting"])

    def test_refuses_a_prompt_that_is_another_resource(self) -> None:
        with pytest.raises(
            agl.ConfigError, match=r"'greeter.greeting' comes from the resource 'main', which is a ProxyLLM"
        ):
            outcome({"greeter.greeting": "main"}, {"main": PROXY})

    def test_returns_none_without_a_reward_function(self) -> None:
        assert run(agl.wrap(Greeter()), {}) is None

    def test_gets_the_result_of_task_to_input_and_the_reward_function_gets_the_task(self) -> None:
        seen: list[Any] = []
        agent = agl.wrap(
            Greeter(),
            reward=lambda task, output, rollout: seen.append((task, output["task"])) or 1.0,
            task_to_input=lambda task: task["question"],
        )
        run(agent, {}, {"question": "hi", "answer": "ho"})
        assert seen == [({"question": "hi", "answer": "ho"}, "hi")]


def test_texts_with_the_same_path_are_one_text_only_if_they_are_equal() -> None:
    same, different = ("a.text", "A."), ("b.text", "B.")
    assert by_path([same, different, same, ("b.text", "C."), different]) == {"a.text": "A.", "b.text": None}


def test_a_path_has_no_text_if_one_of_its_texts_is_missing_or_made_by_code() -> None:
    found = [("a.text", "A."), ("a.text", None), ("b.text", None), ("b.text", "B."), ("c.text", None), ("c.text", None)]
    assert by_path(found) == {"a.text": None, "b.text": None}
