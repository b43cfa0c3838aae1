"""A scripted model for the room selector: an agent that follows its prompt to the letter, a critic and an editor.

As the agent it calls the tool, and then takes the first room that meets the rules stated in its prompt. As the
critic it names a rule that the prompt lacks; which one depends on the rollouts that it reads. As the editor it adds the
rule that the critique names.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from typing import Any

from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest

REQUEST = re.compile(r"(?P<people>\d+) people on (?P<day>\w+) at (?P<hour>\d+):00 with a (?P<tool>\w+)")

RULES: dict[str, Callable[[dict[str, Any], re.Match[str]], bool]] = {
    "The room must be free.": lambda room, wish: bool(room["free"]),
    "It must have enough seats.": lambda room, wish: room["seats"] >= int(wish["people"]),
    "It must have the equipment.": lambda room, wish: wish["tool"] in room["equipment"],
}
SMALLEST = "Of several rooms take the smallest."


def answer(request: RecordedRequest) -> Answer:
    """Answers as the agent if the request has tools, as the editor if it has a critique, else as the critic."""
    messages = request.body["messages"]
    first = messages[0]["content"]
    if "tools" in request.body:
        wish = REQUEST.search(first)
        assert wish is not None
        if messages[-1]["role"] != "tool":
            return Answer(tool_calls=[("find_rooms", {"day": wish["day"], "hour": int(wish["hour"])})])
        return Answer(choose(json.loads(messages[-1]["content"]), first, wish))
    prompt = re.search(r"<prompt[^>]*>\n(.*?)\n</prompt>", first, re.DOTALL)
    assert prompt is not None
    missing = [rule for rule in (*RULES, SMALLEST) if rule not in prompt[1]]
    if "<critique>" in first:
        named = [rule for rule in missing if rule in first]
        return Answer(f"<prompt>\n{' '.join([prompt[1], *named])}\n</prompt>")
    if not missing:
        return Answer("Nothing is wrong with the prompt.")
    return Answer(f"The prompt does not say: {missing[zlib.crc32(first.encode()) % len(missing)]}")


def choose(rooms: list[dict[str, Any]], prompt: str, wish: re.Match[str]) -> str:
    """Chooses a room by the rules of the prompt, as JSON."""
    rules = [rule for text, rule in RULES.items() if text in prompt]
    fitting = [room for room in rooms if all(rule(room, wish) for rule in rules)] or rooms
    chosen = min(fitting, key=lambda room: room["seats"]) if SMALLEST in prompt else fitting[0]
    return json.dumps({"room": chosen["name"], "reason": f"{len(fitting)} rooms meet the rules."})
