"""Records that are copied and joined without a second validation equal validated records."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest

from agentlightning.types import Attempt, AttemptedRollout, PaginatedResult, Rollout, Run, Span, SpanEvent


@pytest.fixture
def rollout() -> Rollout:
    return Rollout(rollout_id="ro-1", input={"messages": ["hello"]}, start_time=1.0, metadata={"group": "g"})


def test_a_notebook_shows_a_run_with_its_scores_as_escaped_html() -> None:
    shown = Run(name="<b>", status="succeeded", scores={"val_reward": 0.75})._repr_html_()
    assert shown == ("<p>Run <b>&lt;b&gt;</b>: succeeded</p><table><tr><td>val_reward</td><td>0.75</td></tr></table>")


def test_a_changed_copy_equals_a_newly_created_record(rollout: Rollout) -> None:
    changed = rollout.model_copy(update={"status": "failed", "end_time": 2.0})
    anew = Rollout.model_validate({**rollout.model_dump(), "status": "failed", "end_time": 2.0})
    assert changed == anew
    assert changed.model_dump_json() == anew.model_dump_json()
    assert (rollout.status, rollout.end_time) == ("queuing", None)
    with pytest.raises(ValueError, match="frozen"):
        changed.status = "running"


def test_a_record_created_without_validation_equals_a_validated_one(rollout: Rollout) -> None:
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0)
    joined = AttemptedRollout.from_valid({**rollout.__dict__, "attempt": attempt})
    assert joined == AttemptedRollout(**dict(rollout), attempt=attempt)
    assert AttemptedRollout.model_validate_json(joined.model_dump_json()) == joined
    assert pickle.loads(pickle.dumps(joined)) == joined
    assert copy.copy(joined) == copy.deepcopy(joined) == joined
    assert joined.model_copy(deep=True) == joined
    assert joined.model_copy() == joined


def test_the_lists_of_a_span_are_immutable() -> None:
    span = Span.from_attributes(attributes={})
    events = [SpanEvent(name="one")]
    other = Span.model_validate({**span.model_dump(), "events": events})
    events.append(SpanEvent(name="two"))
    assert [event.name for event in other.events] == ["one"]
    for item in (span, other):
        with pytest.raises(TypeError):
            item.events.append(SpanEvent(name="three"))
        with pytest.raises(TypeError):
            item.links.clear()


def test_a_page_of_results_is_a_sequence_of_its_items() -> None:
    page = PaginatedResult(items=["a", "b", "a"], total=7)
    assert isinstance(page, Sequence)
    assert (page.index("a"), page.index("a", 1), page.count("a"), page.count("c")) == (0, 2, 2, 0)
    assert (list(reversed(page)), page[1:], "b" in page, len(page)) == (["a", "b", "a"][::-1], ["b", "a"], True, 3)
    assert PaginatedResult[str].model_validate(page.model_dump()) == page
