"""APO improves the prompt of an agent that books rooms, with a tool and a structured answer.

With any OpenAI-compatible endpoint (OPENAI_API_KEY, OPENAI_BASE_URL, and OPENAI_MODEL, a model's name there):

    python -m examples.room_selector.room_selector

Without an endpoint, in seconds, with a scripted agent model, critic and editor (scripted.py):

    python -m examples.room_selector.room_selector --offline
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import sys
from typing import Any, TypedDict

import openai
from openai import AsyncOpenAI
from pydantic import BaseModel

import agentlightning as agl

FIRST_PROMPT = "Choose a room for this meeting: {request}"
DAYS = ("Monday", "Tuesday", "Wednesday")
HOURS = range(9, 17)
EQUIPMENT = ("projector", "whiteboard", "phone")
MAX_CALLS = 4
MESSAGE: Any = {
    "role": True,
    "content": True,
    "tool_calls": {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}},
}
"""The fields of an answer that are sent back: endpoints do not accept other fields that the client adds."""


class Room(TypedDict):
    """A room, and when it is booked: pairs of day and hour."""

    name: str
    seats: int
    equipment: list[str]
    booked: list[tuple[str, int]]


class Task(TypedDict):
    """A request and the right room: the smallest room that is free, large enough and equipped."""

    request: str
    room: str


class FindRooms(BaseModel):
    """List all rooms, with their seats, their equipment, and whether they are free on a day at an hour."""

    day: str
    hour: int


class Choice(BaseModel):
    """The agent's answer."""

    room: str
    reason: str


def make_rooms() -> list[Room]:
    """Nine rooms of different sizes, in random order, each with some equipment and half of its hours booked."""
    rng = random.Random("rooms")
    hours = [(day, hour) for day in DAYS for hour in HOURS]
    return [
        Room(
            name=f"R{number}",
            seats=seats,
            equipment=rng.sample(EQUIPMENT, rng.choice([1, 2, 3])),
            booked=rng.sample(hours, len(hours) // 2),
        )
        for number, seats in enumerate(rng.sample(range(2, 20, 2), 9), start=1)
    ]


ROOMS = make_rooms()


def make_tasks(count: int, seed: int) -> list[Task]:
    """Draws requests that one room fits best."""
    rng, tasks = random.Random(seed), list[Task]()
    while len(tasks) < count:
        day, hour, people, tool = rng.choice(DAYS), rng.choice(HOURS), rng.randint(2, 14), rng.choice(EQUIPMENT)
        fitting = [
            room
            for room in ROOMS
            if room["seats"] >= people and tool in room["equipment"] and (day, hour) not in room["booked"]
        ]
        if fitting:
            best = min(fitting, key=lambda room: room["seats"])
            tasks.append(Task(request=f"{people} people on {day} at {hour}:00 with a {tool}.", room=best["name"]))
    return tasks


def find_rooms(day: str, hour: int) -> str:
    """Runs the tool."""
    return json.dumps(
        [
            {
                "name": room["name"],
                "seats": room["seats"],
                "equipment": room["equipment"],
                "free": (day, hour) not in room["booked"],
            }
            for room in ROOMS
        ]
    )


@functools.cache
def client() -> AsyncOpenAI:
    """Returns the client of this process: making one takes longer than a call of a small model."""
    return AsyncOpenAI()


@agl.rollout
async def select_room(task: Task, prompt: agl.PromptTemplate) -> float:
    """The agent: calls the tool and answers with a Choice. The reward is 1 for the right room."""
    messages: list[Any] = [{"role": "user", "content": prompt.format(request=task["request"])}]
    for _ in range(MAX_CALLS):
        reply = await client().chat.completions.parse(
            model=os.environ["OPENAI_MODEL"],
            messages=messages,
            tools=[openai.pydantic_function_tool(FindRooms, name="find_rooms")],
            response_format=Choice,
        )
        message = reply.choices[0].message
        if message.parsed is not None:
            return float(message.parsed.room == task["room"])
        messages.append(message.model_dump(include=MESSAGE))
        for call in message.tool_calls or ():
            wanted = FindRooms.model_validate_json(call.function.arguments)
            result = find_rooms(wanted.day, wanted.hour)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def main(arguments: list[str]) -> int:
    """Runs the search and prints the best prompt."""
    if arguments not in ([], ["--offline"]):
        print(__doc__)
        return 2
    with contextlib.ExitStack() as stack:
        if arguments:
            from examples.room_selector.scripted import answer

            from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI

            endpoint = stack.enter_context(ScriptedOpenAI(answer)).endpoint
            os.environ |= {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": "any", "OPENAI_MODEL": "scripted"}
        apo = agl.APO(beam_width=2, branch_factor=2, beam_rounds=4, target_score=1.0)
        trainer = agl.Trainer(algorithm=apo, strategy="shm", initial_resources={"prompt": FIRST_PROMPT})
        trainer.fit(select_room, make_tasks(40, seed=1), make_tasks(24, seed=2))
    scores = [candidate.score for candidate in apo.history if candidate.score is not None]
    print(f"validation reward: {scores[0]:.2f} with the first prompt, {max(scores):.2f} with the best:\n")
    print(apo.get_best_prompt().template)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
