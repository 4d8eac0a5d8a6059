"""Outcome verifiers: answers, test reports and final states, compared with what the task asks for."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from agentrl.rewards.answers import Declared, exact_match, f1, final_answer, normalized, truths
from agentrl.rewards.component import Grade, Verifier
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class ExactAnswer(Verifier):
    """1 if the answer equals the ground truth, or one of several."""

    type: Literal["exact"] = "exact"
    declared: Declared = Field("message", description="where the answer stands")
    normalize: bool = Field(False, description="compare without case, punctuation and articles, as SQuAD does")

    def value(self, rollout: Trajectory, task: Task) -> float:
        answer = final_answer(rollout, self.declared)
        if answer is None:
            return 0.0
        prepare = normalized if self.normalize else str
        return float(any(exact_match(prepare(answer), prepare(truth)) for truth in truths(task)))


class F1(Verifier):
    """The best F1 over words between the answer and the right ones (SQuAD: Rajpurkar et al. 2016, section 6.1)."""

    type: Literal["f1"] = "f1"
    declared: Declared = Field("message", description="where the answer stands")

    def value(self, rollout: Trajectory, task: Task) -> float:
        answer = final_answer(rollout, self.declared)
        return 0.0 if answer is None else max(f1(answer, truth) for truth in truths(task))


class TestReport(Verifier):
    """Tests that an environment ran at the end: ``final_state`` holds a mapping from the name of each test to whether
    it passed. The task's ``metadata`` may name those that count, in ``fail_to_pass`` and ``pass_to_pass`` (SWE-bench:
    Jimenez et al. 2024, section 2.1); otherwise all do. A test that is not in the report failed."""

    type: Literal["tests"] = "tests"
    at: str = Field("tests", description="key of the report in final_state, points between its parts")
    share: bool = Field(False, description="the share of tests that passed, in place of 1 if all did and else 0")

    def value(self, rollout: Trajectory, task: Task) -> float | Grade:
        report = found_at(json.loads(rollout.final_state), self.at)
        if not isinstance(report, Mapping):
            return Grade(0.0, {"reported": 0.0})
        metadata = json.loads(task.metadata)
        named = [*metadata.get("fail_to_pass", []), *metadata.get("pass_to_pass", [])] or list(report)
        if not named:
            return Grade(0.0, {"reported": 1.0})
        passed = sum(report.get(name) is True for name in named) / len(named)
        return Grade(passed if self.share else float(passed == 1), {"reported": 1.0, "passed": passed})


class FinalState(Verifier):
    """The share of the expected facts that hold in ``final_state``. Facts are the values at the leaves of a mapping;
    a list is one fact."""

    type: Literal["state"] = "state"
    expected: str = Field("", description="key in the task's ground truth, points between its parts; empty is all")
    at: str = Field("", description="key in final_state that they are compared with; empty is all")
    share: bool = Field(False, description="the share of facts that hold, in place of 1 if all do and else 0")

    def value(self, rollout: Trajectory, task: Task) -> float | Grade:
        expected = found_at(json.loads(task.ground_truth), self.expected)
        if not isinstance(expected, Mapping) or not _facts(expected):
            raise ValueError(f"task {task.task_id} expects nothing at {self.expected or 'its ground truth'!r}")
        hold = share_of_facts(expected, found_at(json.loads(rollout.final_state), self.at))
        return Grade(hold if self.share else float(hold == 1), {"facts": hold})


def share_of_facts(expected: Mapping[str, Any], state: Any) -> float:
    """The share of the values at the leaves of ``expected`` that stand at the same place in ``state``; 1 if there is
    none."""
    facts = _facts(expected)
    return sum(_at(state, key) == value for key, value in facts) / len(facts) if facts else 1.0


_MISSING = object()


def found_at(value: Any, key: str) -> Any:
    """What stands at ``a.b.c`` in nested mappings; None if nothing does."""
    fact = _at(value, tuple(key.split("."))) if key else value
    return None if fact is _MISSING else fact


def _at(value: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _facts(value: Any, key: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        return [fact for name, inner in value.items() for fact in _facts(inner, (*key, name))]
    return [(key, value)] if key else []
