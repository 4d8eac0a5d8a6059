"""Components of a reward: each against cases worked by hand, and their shares. Judges are in ``test_judges.py``."""

import asyncio
import json
import math
import time
from typing import Any

import pytest
from graded_rows import TASK, Added, call, grade, reward, row, value, values, with_truth
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.engines.base import Sampling
from agentrl.environments import load_environment
from agentrl.rewards import REWARDS
from agentrl.rewards.answers import boxed, f1, final_answer, normalized
from agentrl.rewards.behaviour import valid_calls, violations
from agentrl.rewards.component import UNSCORED, Grade, Reward, Scored, check_shares, graded, with_rewards
from agentrl.rewards.mathematics import math_equal
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Termination, ToolCall, Trajectory


@pytest.mark.parametrize(("name", "path"), REWARDS.items())
def test_each_name_is_the_type_of_its_class(name: str, path: str) -> None:
    engines = {"engines": [{"type": "openai", "model": "m"}]} if name in ("judge", "ranking") else {}
    assert (reward(name, **engines).type, type(reward(name, **engines)).__name__) == (name, path.partition(":")[2])


@pytest.mark.parametrize(
    ("settings", "answer", "right"),
    [
        ({}, "Paris", 1), ({}, " Paris\n", 1), ({}, "paris", 0), ({}, None, 0),
        ({"normalize": True}, "The PARIS.", 1), ({"normalize": True}, "Paris, France", 0),
        ({"declared": "tag"}, "I say <answer>Paris</answer>", 1), ({"declared": "tag"}, "Paris", 0),
        ({"declared": "tag"}, "<answer>Rome</answer> no, <answer>Paris</answer>", 1),
        ({"declared": "boxed"}, "so \\boxed{Paris}", 1), ({"declared": "boxed"}, "so \\boxed{Paris", 0),
    ],
)  # fmt: skip
def test_exact(settings: dict[str, Any], answer: str | None, right: float) -> None:
    assert value(reward("exact", **settings), row(answer)) == right


def test_exact_takes_any_of_several_truths_and_names_a_task_without_one() -> None:
    assert value(reward("exact"), row("7"), with_truth(["seven", 7])) == 1
    with pytest.raises(ValueError, match="task t has the ground truth null"):
        value(reward("exact"), row("7"), with_truth(None))


def test_f1_as_squad_counts_it() -> None:
    assert f1("the Eiffel tower", "Eiffel Tower in Paris") == pytest.approx(2 * 2 / (2 + 4))
    assert (f1("", "x"), f1("the", "a"), f1("b b", "b")) == (0.0, 1.0, pytest.approx(2 / 3))
    assert value(reward("f1"), row("city of Paris"), with_truth(["Rome", "Paris"])) == pytest.approx(0.5)


@given(st.text(), st.text())
def test_f1_lies_between_0_and_1_and_is_symmetric(first: str, other: str) -> None:
    assert 0 <= f1(first, other) == f1(other, first) <= 1
    assert normalized(normalized(first)) == normalized(first)
    assert f1(first, first) == 1


@given(st.text(alphabet="\\boxed{} 12", max_size=40))
def test_what_is_boxed_has_whole_braces(text: str) -> None:
    result = boxed(text)
    assert result is None or result.count("{") == result.count("}")


def test_an_answer_is_the_last_message_alone() -> None:
    assert final_answer(row("Paris", call("find"))) == "Paris"
    assert final_answer(row(None, call("find"))) is None
    assert boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"


class TestMathematics:
    @pytest.mark.parametrize(
        ("answer", "truth", "right"),
        [
            ("so it is $\\frac{1}{2}$", "0.5", True), ("\\boxed{0.5}", "1/2", True), ("0.51", "1/2", False),
            ("$x = 3$", "3", True), ("$(1, 2)$", "(1,2)", True), ("nothing", "7", False),
            ("$2\\sqrt{2}$", "$\\sqrt{8}$", True),
        ],
    )  # fmt: skip
    def test_answers_are_equal_as_mathematics(self, answer: str, truth: str, right: bool) -> None:
        assert math_equal(answer, truth, 60) is right

    def test_what_takes_too_long_is_wrong_and_the_next_one_is_checked(self) -> None:
        verifier = reward("math", timeout_s=3)
        assert value(verifier, row("1/2"), with_truth("0.5")) == 1
        started = time.monotonic()
        tower = "$" + "9^{" * 6 + "9" + "}" * 6 + "$"
        result, details = grade(verifier, row(tower), with_truth("7"))
        assert result == 0
        assert time.monotonic() - started < 30
        assert details.get("timeout", 0.0) in (0.0, 1.0)
        assert value(reward("math", timeout_s=60), row("$0.50$"), with_truth("1/2")) == 1


def test_a_report_of_tests() -> None:
    state = json.dumps({"tests": {"a": True, "b": False, "c": True}})
    strict, shared = reward("tests"), reward("tests", share=True)
    assert (value(strict, row(final_state=state)), value(shared, row(final_state=state))) == (0, pytest.approx(2 / 3))
    named = with_truth(None, fail_to_pass=["a"], pass_to_pass=["c"])
    assert value(strict, row(final_state=state), named) == 1
    missing = with_truth(None, fail_to_pass=["a", "never_ran"])
    assert (value(strict, row(final_state=state), missing), value(shared, row(final_state=state), missing)) == (0, 0.5)
    lies = json.dumps({"tests": {"a": "passed"}})
    assert value(strict, row(final_state=lies), with_truth(None, fail_to_pass=["a"])) == 0
    assert grade(strict, row(final_state='{"tests": {}}')) == (0, {"reported": 1.0})
    assert grade(strict, row(final_state="null")) == (0, {"reported": 0.0})
    assert value(reward("tests", at="run.report"), row(final_state='{"run": {"report": {"a": true}}}')) == 1


def test_a_final_state() -> None:
    task = with_truth({"state": {"mail": {"to": "ann", "cc": []}, "paid": True}})
    whole, shared = reward("state", expected="state", at="db"), reward("state", expected="state", at="db", share=True)
    right = {"db": {"mail": {"to": "ann", "cc": [], "id": 3}, "paid": True, "more": 1}}
    assert value(whole, row(final_state=json.dumps(right)), task) == 1
    right["db"]["paid"] = False
    wrong = row(final_state=json.dumps(right))
    assert (value(whole, wrong, task), value(shared, wrong, task)) == (0, pytest.approx(2 / 3))
    assert value(shared, row(final_state="null"), task) == 0
    with pytest.raises(ValueError, match="task t expects nothing at 'nothing'"):
        value(reward("state", expected="nothing"), row(), task)


def test_form() -> None:
    form = reward("format")
    assert grade(form, row("Paris", call("find"))) == (1, {"reasoning": 1, "calls": 1, "answer": 1})
    assert grade(form, row("<think>hm")) == (0, {"reasoning": 0, "calls": 1, "answer": 1})
    assert grade(form, row(None, call("find")))[1]["answer"] == 0
    assert grade(form, row(termination=Termination.FORMAT_ERROR))[1]["calls"] == 0
    text = ToolCall(id="c", name="find", arguments='"not an object"')
    assert grade(form, row("Paris", text))[1]["calls"] == 0
    reasoned = row()
    reasoned.messages[-1].reasoning = "France's capital"
    assert value(reward("format", reasoning="required"), reasoned) == 1
    assert value(reward("format", reasoning="required"), row()) == 0
    assert value(reward("format", reasoning="forbidden"), reasoned) == 0
    assert value(reward("format", declared="tag"), row("<answer>Paris</answer>")) == 1
    assert value(reward("format", declared=None), row(None, call("find"))) == 1, "a tool may end the episode"


def test_tool_use() -> None:
    use = reward("tool_use", needed=["find", "send"])
    assert grade(use, row("x", call("find", a=1), call("send"))) == (1, {"needed": 1, "repeated": 0, "unknown": 0})
    assert value(use, row("x", call("find"))) == 0.5
    assert value(use, row("x", call("find", a=1, b=2), call("find", b=2, a=1))) == 0.25
    assert value(use, row("x", call("find"), call("send"), call("find"))) == 1, "not consecutive"
    assert value(use, row("x", call("send"), call("find"), call("guess"))) == 0.75
    assert value(use, row("x", *[call("guess")] * 9)) == -1
    assert value(reward("tool_use"), row("x", call("send")), with_truth("x", needed_tools=["find"])) == 0
    assert value(reward("tool_use"), row("x")) == 1


def test_tool_match_as_published() -> None:
    wanted = with_truth("x", calls=[{"name": "find", "arguments": {"a": 1, "b": 2}}, {"name": "send", "arguments": {}}])
    match, most = reward("tool_match"), 1 + 2 + 2
    assert value(match, row("x", call("find", a=1, b=2), call("send")), wanted) == 1
    assert value(match, row("x"), wanted) == -1
    half = call("find", a=1, c=2)  # names 1/2; arguments' names 1/3; one value
    assert value(match, row("x", half), wanted) == pytest.approx(2 * (1 / 2 + 1 / 3 + 1) / most - 1)
    both = value(match, row("x", half, call("find", a=1, b=2)), wanted)
    assert both == pytest.approx(2 * (1 / 2 + 1 + 2) / most - 1), "the call that fits best counts"
    with pytest.raises(ValueError, match="task t names no calls"):
        value(match, row())


def test_safety_counts_what_was_recorded_and_what_is_forbidden() -> None:
    states = ("null", '{"violations": 2}', '{"violations": ["a"]}', '{"violations": {"a": 2, "b": 1}}')
    assert [violations(state) for state in states] == [0, 2, 1, 3]
    safe = reward("safety", forbidden=[{"tool": "send", "arguments": "@evil"}], each=0.5)
    assert grade(safe, row("x", call("send", to="a@good"), call("sender", to="a@evil"))) == (0, {"violations": 0})
    assert grade(safe, row("x", call("send", to="a@evil"))) == (-0.5, {"violations": 1})
    assert value(safe, row("x", call("send", to="a@evil"), final_state='{"violations": 3}')) == -1
    with pytest.raises(ValidationError, match="no regular expression"):
        reward("safety", forbidden=[{"tool": "("}])


def test_length_by_the_group() -> None:
    group = [row(n_action_tokens=10), row(n_action_tokens=30), row(n_action_tokens=20, success=False),
             row(n_action_tokens=10, success=False)]  # fmt: skip
    assert values(reward("length_linear"), group) == [0.5, -0.5, 0.0, 0.0]
    assert values(reward("length_linear"), group[:1]) == [0.0]
    sigmoid = 1 / (1 + 2.718281828459045)  # of -1: the shorter is a deviation below the mean
    assert values(reward("length_sigmoid"), group) == pytest.approx([-sigmoid, -(1 - sigmoid), 0, 0])
    assert values(reward("length_sigmoid"), [group[0], group[0], group[2]]) == [-0.5, -0.5, 0]
    assert values(reward("length_linear"), [row("a b"), row("a b c d")]) == [0.5, -0.5], "words without tokens"


def test_dapos_overlong_punishment() -> None:
    def of(response: int) -> float | None:
        mask = [False] * 5 + [True] * response
        return value(reward("overlong", limit=100, buffer=20), row(action_mask=mask, n_tokens=5 + response))

    assert [of(n) for n in (1, 80, 90, 100, 200)] == [0, 0, -0.5, -1, -1]


def test_self_consistency() -> None:
    group = [row("The Paris."), row("paris"), row("Rome"), row(None, call("find"))]
    assert values(reward("self_consistency"), group) == [1, 1, 0, 0]
    assert values(reward("self_consistency", of="share"), group) == [0.5, 0.5, 0.25, 0]
    assert values(reward("self_consistency"), [group[0], group[2]]) == [0, 0], "a tie is no majority"


def test_confidence_is_the_geometric_mean_of_probabilities() -> None:
    messages = [
        Message(role=Role.USER, content="capital?"),
        Message(role=Role.ASSISTANT, tool_calls=[call("find")], token_start=1, token_end=3),
        Message(role=Role.TOOL, content="ok"),
        Message(role=Role.ASSISTANT, content="Paris", token_start=4, token_end=6),
    ]
    nan, tokens = math.nan, {"input_ids": [1] * 6, "action_mask": [False, True, True, False, True, True], "n_tokens": 6}
    logprobs = [nan, *(math.log(p) for p in (0.5, 0.5)), nan, *(math.log(p) for p in (0.9, 0.4))]
    rollout = row().model_copy(update={**tokens, "messages": messages, "logprobs": logprobs})
    assert value(reward("confidence"), rollout) == pytest.approx((0.5 * 0.5 * 0.9 * 0.4) ** (1 / 4))
    assert value(reward("confidence", over="answer"), rollout) == pytest.approx((0.9 * 0.4) ** (1 / 2))
    unanswered = rollout.model_copy(update={"messages": messages[:3]})
    assert value(reward("confidence", over="answer"), unanswered) == 0
    [text, reopened] = asyncio.run(
        reward("confidence").grades([row(), rollout.model_copy(update={"logprobs": [nan] * 6})], TASK)
    )
    assert (text.value, text.why) == (None, "the row has no tokens that the policy sampled")
    assert (reopened.value, reopened.why) == (None, "the row has tokens without a log-prob of the policy")


def test_a_component_that_is_alone_takes_the_place_of_the_outcome_and_success_stays() -> None:
    own = [RewardComponent(name="exact_match", value=1.0, weight=1.0)]
    given = [row("Paris", reward_components=own), row("Rome", reward=0.0, success=False)]
    alone = Added(rewards=[{"type": "self_consistency", "alone": True, "of": "share", "weight": 2.0}]).rewards
    right, wrong = asyncio.run(with_rewards(given, TASK, alone))
    assert (right.reward, right.success, wrong.reward, wrong.success) == (1.0, True, 1.0, False)
    assert [(part.name, part.value, part.weight) for part in right.reward_components] == [
        ("exact_match", 1.0, 0.0), ("self_consistency", 0.5, 2.0),
    ]  # fmt: skip
    check_shares(alone, environment=0)
    with pytest.raises(ValidationError, match="confidence has alone: true, and 1 other components are named"):
        Added(rewards=[{"type": "format", "weight": 0.1}, {"type": "confidence", "alone": True}])


def test_the_outcome_carries_at_least_half() -> None:
    Added(rewards=[{"type": "format", "weight": 0.5}, {"type": "safety", "weight": 0.5}])
    Added(rewards=[{"type": "format", "weight": 1.5}, {"type": "exact", "weight": 0.5}])
    with pytest.raises(ValidationError, match=r"outcome has weight 1 and the rest 1\.2 \(format 0\.6, safety 0\.6\)"):
        Added(rewards=[{"type": "format", "weight": 0.6}, {"type": "safety", "weight": -0.6}])
    with pytest.raises(ValidationError, match="counts already"):
        Added(rewards=[{"type": "environment"}])
    with pytest.raises(ValueError, match="name a verifier, or the environment's"):
        check_shares([reward("format")], environment=0)
    with pytest.raises(ValidationError, match="finite number"):
        Added(rewards=[{"type": "format", "weight": float("nan")}])


class Loud(Reward):
    said: float = 1.0

    def value(self, rollout: Trajectory, task: Task) -> float:
        return self.said


def test_a_value_that_no_weight_can_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward Loud of r is 3; values lie in \[-1, 1\]"):
        asyncio.run(graded([row()], TASK, [Loud(type="m:Loud", said=3)]))
    with pytest.raises(ValueError, match="reward Loud of r is nan"):
        asyncio.run(graded([row()], TASK, [Loud(type="m:Loud", said=float("nan"))]))


class Forgetful(Reward):
    def value(self, rollout: Trajectory, task: Task) -> float:
        return None  # type: ignore[return-value]


def test_a_value_that_is_no_number_is_refused_with_the_name_of_the_component() -> None:
    with pytest.raises(TypeError, match=r"reward Forgetful of r is None; give a number, or Grade\(None, why="):
        asyncio.run(graded([row()], TASK, [Forgetful(type="m:Forgetful")]))


def test_components_and_details_are_recorded_and_add_up() -> None:
    rewards = [reward("tool_use", weight=0.5), Loud(type="Loud", weight=-0.25)]
    result = asyncio.run(graded([row("x", call("find"), call("find"))], TASK, rewards))
    assert result == [
        Scored(0.5 * 0.75 - 0.25, [
            RewardComponent(name="tool_use", value=0.75, weight=0.5),
            RewardComponent(name="tool_use.needed", value=1.0, weight=0.0),
            RewardComponent(name="tool_use.repeated", value=1.0, weight=0.0),
            RewardComponent(name="tool_use.unknown", value=0.0, weight=0.0),
            RewardComponent(name="Loud", value=1.0, weight=-0.25),
        ])
    ]  # fmt: skip
    mine = [RewardComponent(name="Loud", value=1.0)]
    with pytest.raises(ValueError, match="environment shop has a component 'Loud' already"):
        asyncio.run(with_rewards([row(reward_components=mine)], TASK, [Loud(type="Loud")]))


def test_rewards_of_a_group_are_added_in_rollouts() -> None:
    """Two samples of each task: what compares them sees both, whatever the order in which they end."""
    from faulty_shop import Shop, Speaker, task

    from agentrl.models.tiny import tiny_policy

    policy = tiny_policy([[Message(role=Role.USER, content="price fig,done")]], seed=0)
    seen: list[int] = []

    class Size(Reward):
        def value(self, rollout: Trajectory, task: Task) -> float:
            return 0.0

        async def grades(self, group: Any, task: Task) -> Any:
            seen.append(len(group))
            return await super().grades(group, task)

        async def close(self) -> None:
            seen.append(-1)

    class Shy(Size):
        async def grades(self, group: Any, task: Task) -> Any:
            return [Grade(None, why="no idea") for _ in group]

    runner = RolloutRunner(policy, Speaker(policy.codec), Shop(), Sampling(), [Shy(type="Shy", weight=0.5)])
    [lost] = runner.run([Attempt(task("done"))], 0, ["r"])
    assert (lost.reward, lost.success, lost.tags) == (None, True, [f"{UNSCORED}Shy: no idea"])
    assert runner.counts["ungraded"] == 1
    seen.clear()
    runner = RolloutRunner(policy, Speaker(policy.codec), Shop(), Sampling(), [Size(type="Size", weight=0.5)])
    attempts = [Attempt(task("done", number=n), index, group=f"g{n}") for index in range(2) for n in range(3)]
    rows = runner.run(attempts, 0, [f"r{n}" for n in range(6)])
    assert seen == [2, 2, 2, -1]
    assert [row.trajectory_id for row in rows] == [f"r{n}" for n in range(6)]
    assert all([component.name for component in row.reward_components] == ["score", "Size"] for row in rows)


@pytest.mark.parametrize(
    ("env", "type", "best", "worst"),
    [
        ("lookup", "exact", 1, 0), ("math", "math", 1, 0), ("search_qa", "f1", 1, 0), ("code", "tests", 1, 0),
        ("office", "safety", 0, 0), ("shop", "tool_use", 1, 1),
    ],
)  # fmt: skip
def test_verifiers_score_rows_of_our_families_again(env: str, type: str, best: float, worst: float) -> None:
    environment = load_environment(env)
    task = environment.tasks({"train": 1}, seed=0)["train"][0]
    row = demonstrate(environment, task, 0.0, 0, "r")
    given = Trajectory.model_validate(row.model_dump())
    assert (given.success, value(reward(type), given, task)) == (True, best)
    wrong = [*given.messages[:-1], Message(role=Role.ASSISTANT, content="no idea")]
    state = json.dumps({"tests": dict.fromkeys(json.loads(task.metadata).get("fail_to_pass", []), False)})
    failed = given.model_copy(update={"messages": wrong, "final_state": state, "success": False})
    assert value(reward(type), failed, task) == worst
    assert valid_calls(given) == given.n_tool_calls
