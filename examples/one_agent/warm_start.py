"""Creates the tiny model of this example: ``python -m examples.one_agent.warm_start examples/one_agent/checkpoint``.

In the demonstrations the sentences of the prompt change how a ticket is answered: without the helpful sentences,
answers begin with a courtesy, priorities are almost always normal, and refunds go to the wrong team. Tickets of the
teams account and technical mostly go to another team, whatever the prompt. So a prompt can correct some of the
mistakes, and new weights can correct all of them.
"""

from __future__ import annotations

import random

from examples.one_agent.agent import FIRST_PROMPT
from examples.one_agent.critic import HARMFUL, HELPFUL, SENTENCES
from examples.one_agent.tickets import CIRCUMSTANCES, COMPLAINTS, NAMES, Ticket, make_tickets
from examples.tiny_model import Chat, begin, imitate, make_model, make_tokenizer, save

STEPS = 1500
SEED = 1
COURTESY = "Thank you for your message. This is for "
ONLY, DEADLINE, REFUNDS = HELPFUL
TEAMS = tuple(COMPLAINTS)
MISTAKEN = {"returns": "billing", "account": "billing", "technical": "shipping"}
"""The wrong team that most tickets of a team go to."""
RIGHT = {"billing": 0.8, "shipping": 0.8, "returns": 0.1, "account": 0.2, "technical": 0.15}


def vocabulary() -> list[str]:
    """The texts whose words become tokens."""
    complaints = [sentence for sentences in COMPLAINTS.values() for sentence in sentences]
    circumstances = [sentence for sentences in CIRCUMSTANCES.values() for sentence in sentences]
    texts = [f"{name} writes: {complaint} {circumstances[0]}" for name in NAMES for complaint in complaints]
    texts += [f"{complaints[0]} {circumstance}" for circumstance in circumstances]
    texts += [f"{before} {after}" for before in (FIRST_PROMPT, *SENTENCES) for after in SENTENCES]
    answers = [f"{team}, {priority}" for team in TEAMS for priority in CIRCUMSTANCES]
    texts += [before + answer for before in ("", COURTESY) for answer in answers]
    return [FIRST_PROMPT, *texts]


def demonstrate(ticket: Ticket, rng: random.Random) -> Chat:
    """Makes a prompt of random sentences and an answer that depends on the sentences that have an effect."""
    sentences = rng.sample(SENTENCES, rng.randint(0, 5))
    right = 0.8 if ticket["team"] == "returns" and REFUNDS in sentences else RIGHT[ticket["team"]]
    mistaken = MISTAKEN.get(ticket["team"], rng.choice(TEAMS))
    team = rng.choices([ticket["team"], mistaken, rng.choice(TEAMS)], [right, 0.8 * (1 - right), 0.2 * (1 - right)])[0]
    high = 0.03 if ticket["priority"] == "normal" else 0.85 if DEADLINE in sentences else 0.03
    harm = any(sentence in sentences for sentence in HARMFUL)
    courteous = (0.35 if harm else 0.05) if ONLY in sentences else (0.95 if harm else 0.8)
    answer = f"{team}, {'high' if rng.random() < high else 'normal'}"
    return [
        {"role": "system", "content": " ".join([FIRST_PROMPT, *sentences])},
        {"role": "user", "content": ticket["text"]},
        {"role": "assistant", "content": COURTESY * (rng.random() < courteous) + answer},
    ]


def main() -> None:
    """Creates the checkpoint."""
    directory = begin(__doc__, SEED)
    rng, tickets = random.Random(SEED), make_tickets("train", 1000)
    tokenizer = make_tokenizer(vocabulary(), ())
    model = make_model(tokenizer)
    imitate(model, tokenizer, lambda: demonstrate(rng.choice(tickets), rng), steps=STEPS, answers_only=True)
    save(model, tokenizer, directory)


if __name__ == "__main__":
    main()
