from __future__ import annotations

import asyncio
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.litagent import FunctionalLitAgent, check_result
from agentlightning.litagent.function import first_resources
from agentlightning.reward import get_reward_value
from agentlightning.types import Attempt
from tests.core.test_emitter import Tensor

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


def test_a_decorated_function_stays_callable_like_the_original() -> None:
    assert module_agent("abc", llm=PROXY) == 3.0
    assert module_agent.__name__ == "module_agent"
    assert module_agent.__doc__ == "Answers."


def test_a_resource_is_chosen_by_the_name_of_the_parameter_before_its_type() -> None:
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
    def agent(task, llm, prompt_template):  # what untyped user code looks like
        return llm.model, prompt_template.template

    assert run(agl.wrap(agent), {"a": PROXY, "b": agl.PromptTemplate("hi")}) == ("m", "hi")


def test_the_error_about_an_ambiguous_resource_names_the_candidates() -> None:
    two = {"first": PROXY, "second": PROXY}
    with pytest.raises(agl.ConfigError, match=r"'llm'.*first, second"):
        run(module_agent, two)


def test_the_error_about_a_missing_resource_names_the_existing_resources() -> None:
    with pytest.raises(agl.ConfigError, match=r"'llm'.*resources: prompt.*initial_resources"):
        run(module_agent, {"prompt": agl.PromptTemplate("hi")})


def test_a_parameter_with_a_default_needs_no_resource() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM | None = None, retries: int = 3) -> Any:
        return llm, retries

    assert run(agent, {}) == (None, 3)


def test_an_injected_llm_has_the_url_of_its_attempt_and_resources_stay_as_published() -> None:
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


def test_a_function_without_parameters_is_refused_by_the_decorator() -> None:
    with pytest.raises(agl.ConfigError, match="needs a first parameter for the task"):

        @agl.rollout
        def agent() -> None: ...


def test_a_parameter_that_no_resource_can_fill_is_refused_by_the_decorator() -> None:
    with pytest.raises(agl.ConfigError, match=r"nothing can fill the parameter 'retries' of type int.*default"):

        @agl.rollout
        def agent(task: str, retries: int) -> None: ...

    with pytest.raises(agl.ConfigError, match=r"rename 'current' to 'rollout'"):

        @agl.rollout
        def other(task: str, current: agl.AttemptedRollout) -> None: ...


def test_a_generator_and_a_class_are_refused_by_the_decorator() -> None:
    with pytest.raises(agl.ConfigError, match="is a generator; return None"):

        @agl.rollout
        def agent(task: str) -> Any:
            yield 1.0

    with pytest.raises(agl.ConfigError, match="is a generator; return None"):

        @agl.rollout
        async def async_agent(task: str) -> Any:
            yield 1.0

    with pytest.raises(agl.ConfigError, match="Agent is not a function"):

        @agl.rollout
        class Agent: ...


def test_a_positional_only_parameter_is_refused_by_the_decorator() -> None:
    with pytest.raises(agl.ConfigError, match="'llm' is positional-only; it is filled by name"):

        @agl.rollout
        def agent(task: str, llm: agl.LLM, /) -> None: ...


def test_an_optional_resource_is_found_by_its_type() -> None:
    @agl.rollout
    def agent(task: str, writer: agl.LLM | None = None, style: agl.PromptTemplate | None = None) -> Any:
        return writer, style

    prompt = agl.PromptTemplate("hi")
    assert run(agent, {}) == (None, None)
    found, style = run(agent, {"any": PROXY, "other": prompt})
    assert (found.get_base_url(), style) == (SCOPED, prompt)


def test_an_annotation_that_is_not_defined_at_run_time_still_counts() -> None:
    def agent(task: Missing, writer: LLM, other: LLMetric | None = None) -> Any:  # noqa: F821 # not defined at run time
        return writer.model, other

    assert run(agl.wrap(agent), {"main": PROXY}) == ("m", None)


@pytest.mark.parametrize("names", [(), ("llm",), ("rollout",), ("resources",), ("llm", "prompt_template", "rollout")])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_gets_exactly_the_parameters_that_it_names(names: tuple[str, ...], is_async: bool) -> None:
    given_names = ", ".join(names)
    source = f"def agent({', '.join(['task', *names])}): return task, {list(names)}, [{given_names}]"
    source = "async " * is_async + source
    scope: dict[str, Any] = {}
    exec(source, scope)
    agent = agl.wrap(scope["agent"])
    resources = {"main": PROXY, "prompt": agl.PromptTemplate("hi")}
    assert agent.is_async() is is_async
    result: Any = await agent.rollout_async("task", resources, ROLLOUT)
    given = dict(zip(result[1], result[2], strict=True))
    assert result[0] == "task"
    assert set(given) == set(names)
    everything = {"llm": PROXY.with_attempted_rollout(ROLLOUT), "prompt_template": resources["prompt"]}
    everything |= {"rollout": ROLLOUT, "resources": resources}
    assert given == {name: everything[name] for name in names}


def test_llm_rollout_and_prompt_rollout_refuse_a_function_without_their_parameter() -> None:
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


def test_an_agent_class_with_an_async_method_is_awaited() -> None:
    class Async(agl.LitAgent[str]):
        async def rollout_async(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 0.5

    assert Async().is_async()


def test_an_agent_class_without_a_rollout_method_is_refused_before_it_runs() -> None:
    class Empty(agl.LitAgent[str]):
        pass

    with pytest.raises(agl.ConfigError, match="Empty defines neither rollout nor rollout_async"):
        agl.wrap(Empty())


def test_an_agent_class_with_a_method_that_cannot_be_called_is_refused_when_it_is_defined() -> None:
    with pytest.raises(agl.ConfigError, match=r"Async\.rollout is async; rename it to rollout_async"):

        class Async(agl.LitAgent[str]):
            async def rollout(self, task: str, resources: Any, rollout: agl.Rollout) -> float:
                return 1.0

    with pytest.raises(
        agl.ConfigError, match=r"Short\.rollout\(self, task\) is called with \(task, resources, rollout\)"
    ):

        class Short(agl.LitAgent[str]):
            def rollout(self, task):
                return 1.0


async def test_training_and_validation_have_separate_methods_that_fall_back_on_rollout() -> None:
    class Sync(agl.LitAgent[str]):
        def rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 1.0

        def validation_rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 2.0

    class Mixed(agl.LitAgent[str]):
        def training_rollout(self, task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            return 3.0

        async def validation_rollout_async(
            self, task: str, resources: agl.NamedResources, rollout: agl.Rollout
        ) -> float:
            return 4.0

    sync, mixed = Sync(), Mixed()
    assert not sync.is_async()
    assert sync.training_rollout("", {}, ROLLOUT) == 1.0
    assert sync.validation_rollout("", {}, ROLLOUT) == 2.0
    assert mixed.is_async()
    assert await mixed.training_rollout_async("", {}, ROLLOUT) == 3.0
    assert await mixed.validation_rollout_async("", {}, ROLLOUT) == 4.0


def test_a_misspelt_key_of_a_rollouts_config_suggests_the_near_miss() -> None:
    with pytest.raises(agl.ConfigError, match=r"RolloutConfig has no 'max_atempts'. Did you mean 'max_attempts'\?"):
        agl.RolloutConfig(max_atempts=2)


@pytest.mark.parametrize("wrong", [3, "agent", agl.LitAgent])
def test_a_value_that_is_not_an_agent_is_refused_with_a_suggestion(wrong: Any) -> None:
    with pytest.raises(agl.ConfigError, match="instance|Give a function"):
        agl.wrap(wrong)


def test_a_reward_function_turns_output_into_reward() -> None:
    async def reward(task: str, output: str, rollout: agl.Rollout) -> float:
        return float(task == output)

    agent = agl.wrap(lambda task: task.upper(), reward=reward, task_to_input=lambda task: task + "!")
    assert run(agent, {}, "A!") == 0.0
    assert run(agl.wrap(lambda task: task, reward=reward), {}, "same") == 1.0


@pytest.mark.parametrize("result", [None, 1, 0.5, [], np.float32(1.0), np.array(1.0)])
def test_a_result_is_none_or_a_number_or_a_list_of_spans(result: Any) -> None:
    assert check_result(result) == result


NUMBERS: Final = {
    "int": 1, "bool": True, "float": 0.5, "decimal": Decimal("0.5"), "fraction": Fraction(1, 2),
    "numpy": np.float32(0.5), "numpy-bool": np.bool_(True), "array": np.array(0.5), "one-element": np.array([[0.5]]),
    "tensor": Tensor(0.5),
    "text": "0.5", "numpy-text": np.str_("0.5"), "bytes": b"1",
    "two-elements": np.array([0.5, 0.5]),
    "two-in-a-tensor": Tensor(0.5, 0.5), "complex": 0.5j, "mapping": {"reward": 0.5}, "object": object(),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
async def test_emitted_returned_and_rated_rewards_are_read_alike(case: str) -> None:
    value: Any = NUMBERS[case]

    async def emitted() -> Any:
        return get_reward_value(agl.emit_reward({"r": value}, propagate=False))

    async def returned() -> Any:
        return check_result(value)

    async def rated() -> Any:
        agent = agl.wrap(lambda task: task, reward=lambda task, output, rollout: value)
        return await asyncio.to_thread(run, agent, {}, "task")

    found = await asyncio.gather(emitted(), returned(), rated(), return_exceptions=True)
    if case in ("text", "numpy-text", "bytes", "two-elements", "two-in-a-tensor", "complex", "mapping", "object"):
        assert [type(each) for each in found] == [agl.ConfigError, agl.RolloutError, agl.RolloutError]
    else:
        assert found == [1.0 if case in ("int", "bool", "numpy-bool") else 0.5] * 3


@pytest.mark.parametrize("result", ["text", {"reward": 1}, [1.0], object()])
def test_the_error_about_any_other_result_names_its_type(result: Any) -> None:
    with pytest.raises(agl.RolloutError, match=f"{type(result).__name__}.*return None, a number"):
        check_result(result)


@pytest.mark.parametrize("reward", [lambda task, output: 1.0, 1.0])
def test_wrap_refuses_a_reward_function_that_cannot_be_called(reward: Any) -> None:
    with pytest.raises(agl.ConfigError, match=r"\(task, output, rollout\)"):
        agl.wrap(lambda task: task, reward=reward)


def test_an_unknown_reward_name_is_refused_with_the_installed_names() -> None:
    with pytest.raises(agl.PluginError, match=r"no reward named 'exact_match'. Installed: graders, judge"):
        agl.wrap(lambda task: task, reward="exact_match")


@pytest.mark.parametrize("value", ["good", [1.0], {"reward": 1.0}, (1.0, 2.0), ("good", "text"), (1.0, "a", "b")])
def test_the_error_about_a_reward_that_is_not_a_number_names_the_reward_function(value: Any) -> None:
    def judge(task: Any, output: Any, rollout: agl.Rollout) -> Any:
        return value

    with pytest.raises(agl.RolloutError, match=r"the reward function .*judge returned .*; return a number"):
        run(agl.wrap(lambda task: task, reward=judge), {}, "hi")


def test_a_second_reward_function_replaces_the_first() -> None:
    first = agl.wrap(lambda task: task + "!", reward=lambda *_: 0.25, task_to_input=str.upper)
    assert run(agl.wrap(first, reward=lambda task, output, rollout: float(output == "HI!")), {}, "hi") == 1.0
    assert run(agl.wrap(first), {}, "hi") == 0.25


def test_prompts_for_a_function_are_refused_with_an_alternative() -> None:
    with pytest.raises(agl.ConfigError, match="give the function a parameter prompt_template"):
        agl.wrap(plain_agent, prompts=["writer.instructions"])
    with pytest.raises(agl.ConfigError, match="give a list of paths"):
        agl.wrap(plain_agent, prompts="writer.instructions")


def test_a_default_prompt_is_the_first_version_unless_a_prompt_is_given() -> None:
    own, given = agl.PromptTemplate("own {task}"), agl.PromptTemplate("given {task}")

    @agl.rollout
    def agent(task: str, prompt_template: agl.PromptTemplate = own) -> Any:
        return prompt_template.format(task=task)

    for wrapped in (agent, agl.wrap(agent, reward=lambda task, output, rollout: 1.0)):
        assert first_resources(wrapped, None) == {"prompt_template": own}
        assert first_resources(wrapped, {"llm": PROXY}) == {"prompt_template": own, "llm": PROXY}
        assert first_resources(wrapped, {"prompt_template": given}) == {"prompt_template": given}
        assert first_resources(wrapped, {"another": given}) == {"another": given}, "the only prompt fills the parameter"
    assert run(agent, {}) == "own task"
    assert run(agent, {"another": given}) == "given task"
