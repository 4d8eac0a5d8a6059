"""Logs whose calls are missing: what an inverse model is shown, and which of its calls become labels."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError
from scripted_engine import Scripted

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.vpt.choose import LoggedRow
from agentrl.pipelines.methods.vpt.gaps import Votes, bare, counted, shown
from agentrl.pipelines.methods.vpt.inverse import inverse
from agentrl.pipelines.methods.vpt.label import label_calls
from agentrl.rollouts.verification import ReplayVerifier
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

# From the attic, left leads to the yard and right to the bakery, and from there right to the bath.
TASK = Task(task_id="t", env="rooms", split="train", prompt="attic to bath?", verifier="in_goal", ground_truth='"bath"',
            metadata=json.dumps({"start": "attic", "goal": "bath"}))  # fmt: skip
CONFIG = {
    "engine": {"type": "openai", "model": "m", "base_url": "http://127.0.0.1:1"},
    "sampling": {"max_turn_tokens": 9},
}


def call(door: str, name: str = "c") -> ToolCall:
    return ToolCall(id=name, name="go", arguments=json.dumps({"door": door}))


def walk(name: str = "a", *doors: str, rooms: tuple[str, ...] = ("bakery", "bath"), **more: Any) -> Trajectory:
    """A walk from the attic through these rooms; without ``doors`` its calls are missing."""
    messages = [Message(role=Role.USER, content=TASK.prompt)]
    for number, room in enumerate(rooms):
        calls = [call(doors[number], str(number))] if doors else []
        messages.append(Message(role=Role.ASSISTANT, tool_calls=calls))
        messages.append(Message(role=Role.TOOL, content=room, tool_call_id=str(number), name="go"))
    given = {"success": None, "reward": None, "split": "train", **more}
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="log", env="rooms", prompt=TASK.prompt,
        termination="answered", messages=[*messages, Message(role=Role.ASSISTANT, content="here")], **given,
    )  # fmt: skip


def test_what_is_shown_is_what_comes_before_and_the_result_that_came_after() -> None:
    conversation = bare(walk("a", "right", "right"))
    assert [gap.call and gap.call.parsed() for gap in conversation.gaps] == [{"door": "right"}] * 2
    assert not any(message.tool_calls or message.name for message in conversation.messages)

    def prompt(index: int, before: int | None, after: int) -> str:
        return shown(walk(), conversation, index, before, after)

    assert prompt(0, None, 1) == "Task: attic to bath?\nAgent: ?\nResult: bakery"
    assert prompt(0, None, 2) == "Task: attic to bath?\nAgent: ?\nResult: bakery\nResult: bath"
    assert prompt(1, None, 1) == "Task: attic to bath?\nResult: bakery\nAgent: ?\nResult: bath"
    assert prompt(0, 1, 1) == prompt(0, None, 1), "fewer results than are to be shown: the opening is"
    assert prompt(1, 1, 1) == "Result: bakery\nAgent: ?\nResult: bath"
    assert prompt(1, 0, 1) == "Agent: ?\nResult: bath"


def test_results_alone_have_a_turn_each_and_what_the_agent_said_stays() -> None:
    row = walk()
    spoken = [row.messages[0], row.messages[2], Message(role=Role.ASSISTANT, content="on."), *row.messages[4:]]
    conversation = bare(row.model_copy(update={"messages": spoken}))
    assert [gap.number for gap in conversation.gaps] == [2, 4]
    assert shown(row, conversation, 1, 1, 1) == "Result: bakery\nAgent: on. ?\nResult: bath"
    both = Message(role=Role.ASSISTANT, tool_calls=[call("left", "x"), call("right", "y"), call("tunnel", "z")])
    answers = [Message(role=Role.TOOL, content="1", tool_call_id="y"), Message(role=Role.TOOL, content="2")]
    parallel = bare(row.model_copy(update={"messages": [row.messages[0], both, *answers]}))
    assert [gap.call and gap.call.id for gap in parallel.gaps] == ["y", "x"]
    assert (len(parallel.messages), parallel.unanswered) == (5, 1)


def test_rows_of_an_inverse_model_are_the_prompt_and_the_call(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = harness.trajectories([walk("a", "right", "right"), walk("b")])
    made = harness.run(inverse, {"before": 1}, trajectories=[rows])
    assert [[message.content for message in row.messages] for row in made["trajectories"].read()] == [
        ["Task: attic to bath?\nAgent: ?\nResult: bakery", ""], ["Result: bakery\nAgent: ?\nResult: bath", ""]
    ]  # fmt: skip
    assert made["trajectories"].read()[0].messages[1].tool_calls == [call("right", "0")]
    assert {name: made.metrics[name] for name in ("rows", "calls", "without_calls")} == {
        "rows": 2, "calls": 2, "without_calls": 1
    }  # fmt: skip
    with pytest.raises(ValueError, match="none of the 1 rows has a call"):
        harness.run(inverse, trajectories=[harness.trajectories([walk("c")])])
    with pytest.raises(ValueError, match="not of the train split"):
        harness.run(inverse, trajectories=[harness.trajectories([walk("d", "left", "left", split="heldout")])])


def test_votes_are_shares_of_all_answers_however_arguments_are_written() -> None:
    texts = ['{"door": "left"}', '{"door":"right"}', '{"door": "right"}', None]
    answers = [
        [ToolCall(id="c", name="go", arguments=text)] if text else [call("left"), call("left")] for text in texts
    ]
    rows = [
        walk().model_copy(update={"messages": [Message(role=Role.ASSISTANT, tool_calls=calls)]}) for calls in answers
    ]
    assert [(vote.parsed()["door"], share) for vote, share in counted(rows)] == [("right", 0.5), ("left", 0.25)]


def log(votes: list[Votes], row: Trajectory | None = None) -> LoggedRow:
    row = row or walk("a", "right", "right")
    return LoggedRow(row, bare(row), votes)


def replayed(of: LoggedRow) -> LoggedRow:
    verifier = ReplayVerifier({"rooms": load_environment("rooms")})
    blocking(of.by_replay(verifier, TASK))
    return of


LEFT, RIGHT, TUNNEL = ((call(door), 0.5) for door in ("left", "right", "tunnel"))


def test_the_likeliest_call_that_the_environment_answers_as_the_log_does_is_the_label() -> None:
    """Left of the attic is the yard, so the first choice is refused; and from the bakery the bath is right."""
    row = replayed(log([[LEFT, RIGHT], [RIGHT]]))
    assert (row.refused, row.ranks, [row.right(number) for number in (0, 1)]) == ("", [1, 0], [True, True])
    assert row.solved
    assert (row.solved.score.success, row.solved.rewards) == (True, [0.5, 0.5, None])
    assert [message.tool_calls[0].parsed()["door"] for message in row.labelled.messages if message.tool_calls] == [
        "right", "right"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("votes", "row", "why", "ranks"),
    [
        ([[RIGHT], [LEFT]], walk(), "not_replayed", [0]),
        ([[RIGHT], []], walk(), "no_call", [0]),
        ([[RIGHT], [RIGHT]], walk(success=False, reward=0.0), "ended_otherwise", [0, 0]),
    ],
)
def test_a_row_with_a_refused_call_is_refused(votes: list[Votes], row: Trajectory, why: str, ranks: list[int]) -> None:
    made = replayed(log(votes, row))
    assert (made.refused, made.ranks) == (why, ranks)
    assert made.right(0) is None, "nothing was hidden"


def test_without_a_replay_the_likeliest_call_needs_a_share() -> None:
    sure, unsure = log([[(call("left"), 0.75), (call("right"), 0.25)], [RIGHT]]), log([[LEFT], [RIGHT]])
    sure.by_share(0.5)
    assert (sure.refused, sure.ranks, sure.right(0), sure.right(1)) == ("", [0, 0], False, True)
    unsure.by_share(0.6)
    assert (unsure.refused, unsure.ranks) == ("unsure", [])


class Closable(Scripted):
    async def close(self) -> None:
        pass


def run(folder: Path, rows: list[Trajectory], monkeypatch: pytest.MonkeyPatch, **config: Any) -> Result:
    """The stage, with an inverse model that always says right."""
    from agentrl.engines.configs import OpenAIConfig

    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setattr(OpenAIConfig, "build", lambda *_: Closable({"go": {"door": "right"}}))
    harness = Harness(folder)
    given = {"trajectories": [harness.trajectories(rows)], "tasks": [harness.tasks([TASK])]}
    return harness.run(label_calls, {**CONFIG, **config}, **given)


def test_the_stage_makes_rows_with_calls_and_counts_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [walk("a"), walk("b", rooms=("yard",)), walk("c", "right", "right"), walk("d", rooms=())]
    made = run(tmp_path, rows, monkeypatch, tries=2)
    [row] = made["trajectories"].read()
    assert (row.parent_id, row.source, row.success, row.reward, row.n_tool_calls) == ("a", "labelled", True, 1.0, 2)
    assert row.messages[2] == Message(role=Role.TOOL, content="bakery", tool_call_id="call_0", name="go")
    labels: pa.Table = made["labels"].table()
    assert [(line["trajectory_id"], line["share"], line["rank"], line["refused"]) for line in labels.to_pylist()] == [
        ("a", 1.0, 0, None), ("a", 1.0, 0, None), ("b", 1.0, None, "not_replayed")
    ]  # fmt: skip
    counts = {"rows": 4, "labelled": 1, "labels": 2, "with_calls": 1, "without_results": 1, "not_replayed": 1}
    assert {name: made.metrics[name] for name in counts} == counts
    assert made.metrics["prompts"] == 3
    assert "right" not in made.metrics


def test_hidden_calls_say_how_good_an_inverse_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [walk("a", "right", "left"), walk("b", "right", "right")]
    made = run(tmp_path, rows, monkeypatch, hide=True, verify="share")
    assert made.metrics["right"] == 0.75
    assert len(made["trajectories"].ids()) == 2


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"threshold": 0.9}, "threshold does nothing with verify: replay"),
        ({"verify": "share", "tries": 1}, "of one try the share is 1"),
        ({"sampling": {"temperature": 0}}, "at temperature 0 all tries are the same"),
    ],
)
def test_settings_that_do_nothing_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        label_calls.config.model_validate(config)
