"""A calculator agent of AutoGen, as its author would write it: nothing in this file is about training."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers, + - * / and brackets."""
    if len(expression) > 100:
        return "error: the expression is too long"
    try:
        value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError):
        return "error: not an arithmetic expression"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def evaluate(node: ast.expr) -> float:
    """Evaluate a parsed expression; anything but arithmetic is refused."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
    raise ValueError(ast.dump(node))


agent = AssistantAgent(
    "mathematician",
    OpenAIChatCompletionClient(
        model=os.environ.get("OPENAI_MODEL", "unset"),
        api_key=os.environ.get("OPENAI_API_KEY", "unset"),
        model_info=ModelInfo(
            family="unknown", vision=False, function_calling=True, json_output=False, structured_output=False
        ),
    ),
    tools=[calculator],
    system_message="Solve the problem step by step with the calculator, then answer with the number only.",
    max_tool_iterations=4,
)
