"""An ordinary agent that answers word problems with a calculator."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

import agentlightning as agl

SYSTEM_PROMPT = "Solve the problem with the calculator, then answer with the number only."
CALCULATOR: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
MAX_TURNS = 4
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

CLIENT = OpenAI(api_key="unused", base_url="http://unused", max_retries=0)


def calculator_agent(task: Mapping[str, Any], llm: agl.LLM) -> float:
    """Works on one word problem. The reward is 1 if the last answer is the right number, else 0."""
    client = CLIENT.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(
            model=llm.model, messages=messages, tools=[CALCULATOR], **llm.sampling_parameters
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return float((reply.content or "").strip() == str(task["answer"]))
        messages.append(reply)
        for call in reply.tool_calls:
            assert call.type == "function"
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def calculate(arguments: str) -> str:
    """Runs the tool on the JSON arguments of a call. A mistake by the model becomes a message to the model."""
    try:
        expression = json.loads(arguments)["expression"]
        if len(expression) > 100:
            return "error: the expression is too long"
        if not re.fullmatch(r"[0-9+\-*/(). ]+", expression):
            raise ValueError(expression)
        value = evaluate(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, TypeError, KeyError, SyntaxError):
        return "error: not an arithmetic expression"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def evaluate(node: ast.expr) -> float:
    """Evaluates a parsed expression of numbers, + - * / and brackets; anything else is refused."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
    raise ValueError(f"unsupported: {ast.dump(node)}")
