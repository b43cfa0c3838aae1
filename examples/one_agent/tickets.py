"""Tickets of a shop's support, their splits, and the grade of an answer.

For example: "Ann writes: The parcel is late. I travel on Friday." belongs to the team shipping and has a high priority,
because it names a deadline. A complaint and a circumstance that occur together in the validation or test split never
occur together in training.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Split = Literal["train", "val", "test"]

COMPLAINTS = {
    "billing": (
        "The invoice is wrong.",
        "You charged me two times.",
        "My discount is missing.",
        "The tax is too high.",
        "My bank refused the payment.",
    ),
    "shipping": (
        "The parcel is late.",
        "The driver did not ring.",
        "The courier lost my order.",
        "It went to another address.",
        "The tracking shows nothing.",
    ),
    "returns": (
        "I want my money back.",
        "The shoes do not fit.",
        "It has the wrong colour.",
        "I ordered it by mistake.",
        "The lamp arrived broken.",
    ),
    "account": (
        "I forgot my password.",
        "Please change my email.",
        "I cannot log in.",
        "Delete all my data.",
        "My profile has an old name.",
    ),
    "technical": (
        "The app does not start.",
        "Your website shows an error.",
        "The button does nothing.",
        "Search finds no products.",
        "The page stays empty.",
    ),
}
CIRCUMSTANCES = {
    "high": (
        "I travel on Friday.",
        "The party is tomorrow.",
        "My trial ends tonight.",
        "We need it by noon.",
        "The offer ends today.",
        "Her birthday is on Monday.",
    ),
    "normal": (
        "I like your shop.",
        "My cat is grey.",
        "This is my second order.",
        "A friend told me about you.",
        "Thanks for your work.",
        "It is a gift.",
    ),
}
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")


class Ticket(TypedDict):
    """One task of the agent."""

    text: str
    team: str
    priority: str


def split_of(complaint: str, circumstance: str) -> Split:
    """Assigns a pair of sentences to a split: about 5 of 10 pairs to train, 2 to val and 3 to test."""
    part = zlib.crc32(f"{complaint} {circumstance}".encode()) % 10
    return "test" if part < 3 else "val" if part < 5 else "train"


def make_tickets(split: Split, count: int) -> list[Ticket]:
    """Returns different tickets of a split, the same ones on every machine."""
    found = [
        Ticket(text=f"{name} writes: {complaint} {circumstance}", team=team, priority=priority)
        for team, complaints in COMPLAINTS.items()
        for priority, circumstances in CIRCUMSTANCES.items()
        for complaint, circumstance, name in itertools.product(complaints, circumstances, NAMES)
        if split_of(complaint, circumstance) == split
    ]
    return random.Random(split).sample(found, count)


def train() -> list[Ticket]:
    """The training split."""
    return make_tickets("train", 1000)


def val() -> list[Ticket]:
    """The validation split."""
    return make_tickets("val", 40)


def test() -> list[Ticket]:
    """The test split."""
    return make_tickets("test", 200)


def grade(task: Mapping[str, Any], answer: str) -> float:
    """Returns 1 for the right team and priority, as in `returns, high`; 0.5 if other words come first; else 0."""
    right = f"{task['team']}, {task['priority']}"
    return 1.0 if answer.strip() == right else 0.5 if answer.strip().endswith(f" {right}") else 0.0
