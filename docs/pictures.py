"""Draws the pictures of concepts.md from the text below: python docs/pictures.py.

A line `column row name | text` is a box, a line `name -> name | text` an arrow.
"""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path

WIDTH, HEIGHT, ROW = 190, 92, 152
"""Size of a box, and the distance of the rows, in pixels."""
BOX = re.compile(r"^(\d) (\d) (.+?) \| (.+)$", re.MULTILINE)
ARROW = re.compile(r"^(.+?) -> (.+?)(?: \| (.+))?$", re.MULTILINE)

LOOP = """
0 0 algorithm | proposes prompts or weights, learns from what comes back
1 0 store | rollouts, spans, versions of resources
2 0 runner | claims a rollout, watches time and budget
0 1 model server | a provider, vLLM, or the policy server
1 1 gateway | passes model calls on and records them
2 1 agent | your code, unchanged
algorithm -> store | tasks, resources
store -> algorithm | rewards, spans
store -> runner | rollouts
runner -> store | status, reward
runner -> agent | task
agent -> gateway | calls
gateway -> model server | calls
gateway -> store | spans, tokens
algorithm -> model server | weights
"""
ROLLOUT = """
0 0 queuing | waits for a runner
1 0 preparing | a runner has claimed it: the first attempt begins
2 0 running | the first span has arrived
3 0 succeeded | the agent returned; reward and spans stay
0 1 cancelled | stopped by a person or by the algorithm
1 1 requeuing | the attempt failed or lost its worker; another one is left
3 1 failed | error, time limit or lost worker, and no attempt is left
queuing -> preparing
preparing -> running
running -> succeeded
running -> failed
running -> requeuing
requeuing -> preparing
queuing -> cancelled
"""
TOKEN = """
0 0 sampler | draws token ids, with their log-probabilities
1 0 gateway | keeps ids, log-probabilities and the version of the weights
2 0 span | one for each call, in the store
3 0 adapter | joins the calls of a conversation into one row
3 1 row | token ids; a mask that is 1 for tokens that the model drew
2 1 advantage | reward of the rollout against the others of its task
1 1 loss | ratio of new and old probability, clipped, times advantage
0 1 weights | one optimizer step makes the next version
sampler -> gateway
gateway -> span
span -> adapter
adapter -> row
row -> advantage
advantage -> loss
loss -> weights
weights -> sampler
"""
PICTURES = {"loop": (LOOP, 330), "rollout": (ROLLOUT, 236), "token": (TOKEN, 236)}
"""The texts by name, with the distance of the columns in pixels."""


def draw(text: str, column: int) -> str:
    """Returns a picture as SVG, legible on white and on black."""
    boxes = {name: (int(x) * column, int(y) * ROW, about) for x, y, name, about in BOX.findall(text)}
    arrows = ARROW.findall(text)
    parts = []
    for begin, end, label in arrows:
        (x, y, _), (to_x, to_y, _) = boxes[begin], boxes[end]
        right, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        aside = 14 * any((end, begin) == other[:2] for other in arrows)  # two arrows side by side
        x1, y1 = x + WIDTH / 2 + right * WIDTH / 2, y + HEIGHT / 2 + down * HEIGHT / 2 * (right == 0) - aside * right
        x2, y2 = (
            to_x + WIDTH / 2 - right * WIDTH / 2,
            to_y + HEIGHT / 2 - down * HEIGHT / 2 * (right == 0) - aside * right,
        )
        if right and down:
            x1, y1 = x + WIDTH / 2, y + HEIGHT
        parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" marker-end="url(#head)"/>')
        middle, anchor, shift = ((x1 + x2) / 2, "middle", -6 if right >= 0 or not aside else 16)
        if right == 0:
            middle, anchor, shift = x1 + 8, "start", 4
        parts.append(
            f'<text x="{middle}" y="{(y1 + y2) / 2 + shift}" text-anchor="{anchor}">{html.escape(label)}</text>'
        )
    for name, (x, y, about) in boxes.items():
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>')
        lines = [f'<tspan class="name">{name}</tspan>', *map(html.escape, textwrap.wrap(about, 27))]
        for number, line in enumerate(lines):
            parts.append(
                f'<text class="in" x="{x + WIDTH / 2}" y="{y + 22 + 19 * number}" text-anchor="middle">{line}</text>'
            )
    width = max(x for x, _, _ in boxes.values()) + WIDTH + 2
    height = max(y for _, y, _ in boxes.values()) + HEIGHT + 2
    style = (
        "text{font:13px system-ui,sans-serif;fill:#7d8590}path{stroke:#7d8590;stroke-width:1.5;fill:none}"
        "rect{fill:#e8edff;stroke:#5c7cfa}.in{fill:#25315c}.name{font-weight:600;font-size:15px}#tip{fill:#7d8590;stroke:none}"
    )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path id="tip" d="M0 0L8 4L0 8z"/></marker>'
    )
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width} {height}"><style>{style}</style>{head}'
    return "\n".join([frame, *parts, "</svg>", ""])


if __name__ == "__main__":
    for each, (source, distance) in PICTURES.items():
        Path(__file__).with_name(f"concept-{each}.svg").write_text(draw(source, distance), encoding="utf-8")
