"""What coding agents sent at a compaction, after a failure and after an empty answer, as it was recorded, and what they
ask of reasoning."""

from pathlib import Path

import pytest
from recorded_client import Client, messages_of, tags, told
from recording import policy_for_tests, sampled, served

from agentrl.engines.base import EngineError
from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


SUMMARY = "<summary>They counted far.</summary>"


def test_claude_code_goes_on_after_a_compaction(policy: Policy, tmp_path: Path) -> None:
    """The file has long texts cut, so that the prompt and the summary, by which a compaction is known, are put back."""
    with served(tmp_path, policy, str, turn_tokens=1000, room=20_000) as server:
        client = Client(server, "claude_code_compact")
        asks, goes_on = (client.requests[number]["body"]["messages"] for number in (6, 7))
        asks[-1]["content"][-1]["text"] = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
        goes_on[0]["content"][-1]["text"] = "This session is being continued: They counted far."
        [kept] = [message for message in messages_of(client.requests[7]) if message.role is Role.ASSISTANT]
        for number in range(8):
            answer = {5: kept, 6: SUMMARY}.get(number)
            assert client.send(number, answer=answer).is_success
        work, summary, after = client.rows()
    assert [(row.agent, row.segment, row.reward, row.n_steps) for row in (work, summary, after)] == [
        ("main", 0, 1.0, 6),
        ("main", 1, 1.0, 6),
        ("main", 2, 1.0, 1),
    ]
    assert "kind:compaction" in summary.tags
    assert not tags(summary, "not-trained")
    assert (summary.parent_id, sampled(policy, summary)) == (work.trajectory_id, [f"{SUMMARY}<|im_end|>"])
    assert tags(after, "written_turns") == ["written_turns:1"], "the call that the compaction kept is context"
    assert client.turns == 8


def test_codex_says_which_request_is_a_compaction(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000, room=20_000) as server:
        client = Client(server, "codex_compact")
        client.requests[4]["headers"]["x-codex-turn-metadata"] = '{"request_kind": "compaction", "agent_name": "/root"}'
        client.requests[5]["body"]["input"][-1]["content"][0]["text"] = "Another model says: They counted far."
        [last] = [message for message in messages_of(client.requests[4]) if message.role is Role.ASSISTANT][3:]
        for number in range(6):
            answer = {3: last, 4: "They counted far."}.get(number)
            assert client.send(number, answer=answer).is_success
        rows = client.rows()
    work, *others = rows
    assert (work.agent, work.n_steps, work.reward) == ("main", 4, 1.0)
    assert [row.reward for row in others] == [1.0, 1.0]
    [summary] = [row for row in others if "kind:compaction" in row.tags]
    assert sampled(policy, summary) == ["They counted far.<|im_end|>"]
    assert not [row for row in rows if "not-trained" in row.tags]
    assert client.turns == 6


def test_an_overloaded_server_is_asked_again_and_one_turn_is_sampled(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000) as server:
        client = Client(server, "claude_code_retry_529")
        server.engine.fails = [EngineError("busy"), EngineError("busy")]
        for _ in range(2):
            busy = client.send(0)
            assert busy.status_code == 529 or "overloaded_error" in busy.text
        assert client.send(1).is_success
        assert client.send(2).is_success
        [row] = client.rows()
    assert (row.n_steps, client.turns) == (2, 2)
    assert "failed_turns:2" in row.tags


def test_an_answer_without_text_is_dropped_by_claude_code_and_kept_here(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000) as server:
        client = Client(server, "claude_code_empty")
        assert client.send(0, answer="").is_success
        assert client.send(1, answer="There are two files.").is_success
        first, second = client.rows()
    assert [sampled(policy, row) for row in (first, second)] == [["<|im_end|>"], ["There are two files.<|im_end|>"]]


@pytest.mark.parametrize(("asked", "told_as"), [({"summary": "auto"}, True), ({"effort": "high"}, False)])
def test_a_summary_of_reasoning_is_the_reasoning_if_it_is_asked_for(
    policy: Policy, tmp_path: Path, asked: dict[str, str], told_as: bool
) -> None:
    thought = "I should list the files."
    answer = Message(role=Role.ASSISTANT, reasoning=thought, content="Looking.")
    with served(tmp_path, policy, str) as server:
        client = Client(server, "codex_think")
        events = told(client.send(0, answer=answer, reasoning=asked).text)
        whole = client.send(0, answer=answer, reasoning=asked, stream=False).json()
        rows = client.rows()
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for given in (items, whole["output"]):
        [item] = [item for item in given if item["type"] == "reasoning"]
        assert [part["text"].strip() for part in item["summary"]] == [thought] * told_as
        assert [part["text"].strip() for part in item["content"]] == [thought]
    assert [delta.strip() for delta in deltas] == [thought] * told_as
    assert whole["reasoning"] == asked
    assert [tags(row, "ignored_reasoning") for row in rows] == [[] if told_as else ["ignored_reasoning:2"]] * 2
