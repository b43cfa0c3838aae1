from __future__ import annotations

import pickle
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.litagent import FunctionalLitAgent, check_result
from agentlightning.types import Attempt

ROLLOUT = agl.AttemptedRollout(
    rollout_id="ro-1",
    input={},
    start_time=0.0,
    status="running",
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)
PROXY = agl.ProxyLLM(endpoint="http://gateway/v1", model="m", api_key="key")
SCOPED = "http://gateway/rollout/ro-1/attempt/at-1/v1"


@agl.rollout
def module_agent(task: str, llm: agl.LLM) -> float:
    """Answers."""
    return float(len(task))


def plain_agent(task: str) -> float:
    return 1.0


def run(agent: agl.LitAgent[Any], resources: dict[str, agl.Resource], task: Any = "task") -> Any:
    return agent.rollout(task, resources, ROLLOUT)


def test_a_decorated_function_stays_callable_as_it_was() -> None:
    assert module_agent("abc", llm=PROXY) == 3.0
    assert module_agent.__name__ == "module_agent"
    assert module_agent.__doc__ == "Answers."


def test_a_resource_is_chosen_by_the_parameters_name_before_its_type() -> None:
    other = agl.LLM(endpoint="http://other/v1", model="n")

    @agl.rollout
    def agent(task: str, other: agl.LLM) -> Any:
        return other.model

    assert run(agent, {"main": PROXY, "other": other}) == "n"


def test_a_resource_is_chosen_by_the_annotation_when_it_is_the_only_one_of_its_type() -> None:
    @agl.rollout
    def agent(task: str, writer: agl.LLM, style: agl.PromptTemplate) -> Any:
        return writer.model, style.template

    assert run(agent, {"main": PROXY, "prompt": agl.PromptTemplate("hi")}) == ("m", "hi")


def test_a_resource_is_chosen_by_the_conventional_name_without_any_annotation() -> None:
    def agent(task, llm, prompt_template):  # type: ignore[no-untyped-def] # what untyped user code looks like
        return llm.model, prompt_template.template

    assert run(agl.wrap(agent), {"a": PROXY, "b": agl.PromptTemplate("hi")}) == ("m", "hi")


def test_several_candidates_are_an_error_that_names_them() -> None:
    two = {"first": PROXY, "second": PROXY}
    with pytest.raises(agl.ConfigError, match=r"'llm'.*first, second"):
        run(module_agent, two)


def test_no_candidate_is_an_error_that_names_what_there_is() -> None:
    with pytest.raises(agl.ConfigError, match=r"'llm'.*resources: prompt.*initial_resources"):
        run(module_agent, {"prompt": agl.PromptTemplate("hi")})


def test_a_parameter_with_a_default_needs_no_resource() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM | None = None, retries: int = 3) -> Any:
        return llm, retries

    assert run(agent, {}) == (None, 3)


def test_an_injected_llm_points_at_its_own_attempt_and_resources_stay_as_published() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM, resources: agl.NamedResources, rollout: agl.Rollout) -> Any:
        return llm.get_base_url(), resources["main"], rollout.rollout_id

    assert run(agent, {"main": PROXY}) == (SCOPED, PROXY, "ro-1")


def test_strip_proxy_false_leaves_the_proxy_to_the_agent() -> None:
    @agl.llm_rollout(strip_proxy=False)
    def agent(task: str, llm: agl.LLM) -> Any:
        return llm

    assert run(agent, {"main": PROXY}) == PROXY


async def test_an_async_function_is_awaited() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Any:
        return llm.get_base_url()

    assert agent.is_async()
    assert await agent.rollout_async("task", {"main": PROXY}, ROLLOUT) == SCOPED


def test_a_function_without_parameters_is_refused_when_it_is_decorated() -> None:
    with pytest.raises(agl.ConfigError, match="needs a first parameter for the task"):

        @agl.rollout
        def agent() -> None: ...


def test_explicit_decorators_refuse_a_function_without_their_parameter() -> None:
    with pytest.raises(agl.ConfigError, match="@llm_rollout needs a parameter 'llm'"):
        agl.llm_rollout(plain_agent)
    with pytest.raises(agl.ConfigError, match="@prompt_rollout needs a parameter 'prompt_template'"):
        agl.prompt_rollout(plain_agent)


def test_agents_of_modules_are_pickled_by_name() -> None:
    assert b"module_agent" in pickle.dumps(module_agent)
    assert pickle.loads(pickle.dumps(module_agent)) is module_agent
    again = pickle.loads(pickle.dumps(agl.wrap(plain_agent)))
    assert isinstance(again, FunctionalLitAgent)
    assert again("x") == 1.0


def test_an_agent_class_defines_one_of_two_methods() -> None:
    class Empty(agl.LitAgent[str]):
        pass

    class Async(agl.LitAgent[str]):
        async def rollout_async(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 0.5

    assert Async().is_async()
    with pytest.raises(agl.ConfigError, match="Empty defines neither rollout nor rollout_async"):
        run(Empty(), {})


@pytest.mark.parametrize("wrong", [3, "agent", agl.LitAgent])
def test_what_is_no_agent_is_refused_with_what_would_be(wrong: Any) -> None:
    with pytest.raises(agl.ConfigError, match="instance|give a function"):
        agl.wrap(wrong)


def test_a_reward_function_turns_output_into_reward() -> None:
    async def reward(task: str, output: str, rollout: agl.Rollout) -> float:
        return float(task == output)

    agent = agl.wrap(lambda task: task.upper(), reward=reward, task_to_input=lambda task: task + "!")
    assert run(agent, {}, "A!") == 0.0
    assert run(agl.wrap(lambda task: task, reward=reward), {}, "same") == 1.0


@pytest.mark.parametrize("result", [None, 1, 0.5, []])
def test_a_result_is_nothing_a_number_or_spans(result: Any) -> None:
    assert check_result(result) == result


@pytest.mark.parametrize("result", ["text", {"reward": 1}, [1.0], object()])
def test_any_other_result_is_an_error_that_shows_it(result: Any) -> None:
    with pytest.raises(agl.RolloutError, match=f"{type(result).__name__}.*return None, a number"):
        check_result(result)
