"""DSPy: a ``Module``. The instructions and demos of its predictors are prompts."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import dspy
from dspy.utils.callback import ACTIVE_CALL_ID, BaseCallback
from opentelemetry import trace as otel

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.shared.agent import FrameworkAgent
from agentlightning_integrations.shared.span_tree import TOOL_RESULT, SpanTree, to_text

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # without it, litellm downloads a list of prices


def wrap_agent(agent: Any, options: WrapOptions) -> DSPyAgent | None:
    return DSPyAgent(agent, options) if isinstance(agent, dspy.Module) else None


class DSPyAgent(FrameworkAgent[dspy.Module]):
    """Runs a copy of a module on its inputs; the output is its ``Prediction``.

    All predictors of the copy call the rollout's endpoint through litellm, without DSPy's cache: with a cached
    answer there is no call to train on.
    """

    def texts(self) -> Mapping[str, str | None]:
        """Paths such as ``react.instructions``; ``react.demos`` is a JSON list. A ``Predict`` has ``instructions``."""
        texts = {}
        for name, predictor in self.agent.named_predictors():
            texts[_path(name, "instructions")] = predictor.signature.instructions
            if predictor.demos:
                texts[_path(name, "demos")] = json.dumps([dict(demo) for demo in predictor.demos], default=str)
        return texts

    def run(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> Any:
        """Runs the module on a mapping of its inputs, or on a value for its only input."""
        module = self.agent.deepcopy()
        for name, predictor in module.named_predictors():
            text, demos = (texts.get(_path(name, label)) for label in ("instructions", "demos"))
            if text is not None:
                predictor.signature = predictor.signature.with_instructions(text)
            if demos is not None:
                predictor.demos = _read_demos(_path(name, "demos"), demos)
        if llm is None:
            return module(**_read_inputs(module, task))
        settings = {"api_base": llm.get_base_url(), "api_key": llm.api_key or "unused", **llm.sampling_parameters}
        model = dspy.LM(f"openai/{llm.model}", cache=False, num_retries=0, engine="litellm", **settings)
        module.set_lm(model)
        with dspy.context(lm=model):
            return module(**_read_inputs(module, task))


def _path(name: str, label: str) -> str:
    return ".".join([*name.split(".")[name.startswith("self") :], label])


def _read_demos(path: str, text: str) -> list[dspy.Example]:
    try:
        return [dspy.Example(**demo) for demo in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"prompt {path!r} is not a JSON list of objects: {error}. It begins {text[:80]!r}") from None


def _read_inputs(module: dspy.Module, task: Any) -> dict[str, Any]:
    """Returns the inputs of a module in a task, whose other fields are for the reward function."""
    signature = getattr(module, "signature", None)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if takes_any:
        names = list(signature.input_fields) if signature is not None else names
    if not isinstance(task, Mapping):
        if len(names) != 1:
            raise ConfigError(f"the task {task!r:.80} is one value, and {type(module).__name__} takes {names}")
        return {names[0]: task}
    return {name: value for name, value in task.items() if name in names or (takes_any and signature is None)}


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Records tools, and modules that are not DSPy's own as agents; the gateway records the model calls."""
    recorder = _CallRecorder(otel.get_tracer("agentlightning.dspy", tracer_provider=tracer_provider))
    dspy.settings.callbacks.append(recorder)

    def undo() -> None:
        with contextlib.suppress(ValueError):  # the program has set other callbacks since
            dspy.settings.callbacks.remove(recorder)

    return undo


class _CallRecorder(BaseCallback):  # type: ignore[misc] # mypy does not read DSPy
    def __init__(self, tracer: otel.Tracer) -> None:
        self._spans = SpanTree(tracer)

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        parent = ACTIVE_CALL_ID.get()
        if parent is None or not type(instance).__module__.startswith("dspy."):
            self._spans.begin_agent(call_id, getattr(instance, "name", None) or type(instance).__name__, parent, inputs)
        else:
            self._spans.omit(call_id, parent)

    def on_tool_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self._spans.begin_tool(call_id, instance.name, ACTIVE_CALL_ID.get(), inputs.get("kwargs", inputs))

    def on_tool_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        self._spans.end(call_id, {TOOL_RESULT: to_text(outputs)}, exception)

    def on_module_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        self._spans.end(call_id, error=exception)
