import math
from collections.abc import Sequence

import pytest
import torch
from architectures import POLICIES, lookup_tasks

from agentrl.engines.base import Generation, Respond, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.rollouts.runner import Attempt, RolloutRunner
from schemas.trajectory import Message, Role, ToolCall


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


def scripted(policy: Policy, max_rows: int, sampling: Sampling, seed: int = 0) -> list[Generation]:
    """Rows of unequal length whose turns are answered with observations of unequal length, up to three times."""
    prompts = [policy.codec.opening([m], "[]") for m in _openings()]
    answered: dict[int, int] = {}

    def respond(row: int, turn: list[int]) -> list[int] | None:
        answered[row] = answered.get(row, 0) + 1
        return None if answered[row] == 3 else prompts[(row + answered[row]) % len(prompts)][: 2 + row % 5]

    stop = max(range(len(policy.tokenizer)), key=lambda token: token % 7)  # an ordinary token, often sampled
    return TransformersEngine(policy.model, max_rows).generate(prompts, respond, sampling, stop, seed)


def _openings() -> list:
    return [load_environment("lookup").episode(task).opening()[0] for task in lookup_tasks(12)]


@torch.inference_mode()
def recomputed(policy: Policy, row: Generation, temperature: float) -> list[float]:
    """Log-probabilities by one plain forward pass over the row."""
    logits = policy.model(torch.tensor([row.ids])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    return [float("nan"), *(logprobs[t - 1, row.ids[t]].item() for t in range(1, len(row.ids)))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_rows", [3, 64])
def test_recorded_logprobs_are_those_of_a_plain_forward_pass(policy: Policy, max_rows: int, temperature: float) -> None:
    """Proves the cache, left padding, positions, forced tokens and shrinking batch all at once."""
    sampling = Sampling(temperature=temperature, max_turn_tokens=12, max_tokens=80)
    for row in scripted(policy, max_rows, sampling):
        assert len(row.ids) == len(row.mask) == len(row.logprobs)
        for flag, recorded, expected in zip(row.mask, row.logprobs, recomputed(policy, row, temperature), strict=True):
            assert math.isnan(recorded) != flag
            if flag:
                assert recorded == pytest.approx(expected, abs=2e-4)


def test_same_seed_same_tokens(policy: Policy) -> None:
    sampling = Sampling(max_turn_tokens=8, max_tokens=60)
    first, second, other = (scripted(policy, 64, sampling, seed) for seed in (1, 1, 2))
    assert [row.ids for row in first] == [row.ids for row in second]
    assert [row.ids for row in first] != [row.ids for row in other]


def test_greedy_equals_generate_of_the_library(policy: Policy) -> None:
    prompts = [policy.codec.opening([m], "[]") for m in _openings()]
    engine = TransformersEngine(policy.model)
    rows = engine.generate(prompts, lambda row, turn: None, Sampling(temperature=0, max_turn_tokens=10), -1, 0)
    for prompt, row in zip(prompts, rows, strict=True):
        expected = policy.model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert row.ids == expected[0].tolist()
        assert row.truncated


def test_limits_hold(policy: Policy) -> None:
    for row in scripted(policy, 64, Sampling(max_turn_tokens=5, max_tokens=40)):
        assert len(row.ids) <= max(40, 30)
        runs = "".join("x" if flag else " " for flag in row.mask).split()
        assert max(map(len, runs)) <= 5


def test_top_k_and_top_p_draw_only_what_they_allow(policy: Policy) -> None:
    for sampling in (Sampling(top_k=1, max_turn_tokens=6), Sampling(top_p=1e-6, max_turn_tokens=6)):
        rows = scripted(policy, 64, sampling)
        assert all(value == pytest.approx(0) for row in rows for value in row.logprobs if not math.isnan(value))


def test_draws_follow_the_distribution() -> None:
    from agentrl.engines.transformers import _draw

    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(40_000, 1)
    tokens, _ = _draw(logits, Sampling(), torch.Generator().manual_seed(0))
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.01)


def test_rollouts_are_whole_and_aligned(policy: Policy) -> None:
    tasks = lookup_tasks(12)
    rollouts = RolloutRunner(
        policy, TransformersEngine(policy.model), load_environment("lookup"), Sampling(max_tokens=90)
    )
    rows = rollouts.run([Attempt(task, 1) for task in tasks], 0, [f"r-{n}" for n in range(12)])
    for task, row in zip(tasks, rows, strict=True):
        assert row.task_id == row.group_id == task.task_id
        assert row.sample_index == 1
        assert row.n_tokens == len(row.input_ids) == len(row.action_mask) == len(row.logprobs)
        assert row.n_steps == sum(message.role == "assistant" for message in row.messages)
        assert row.tokenizer == policy.tokenizer_fingerprint


def test_a_row_that_ends_where_an_observation_does_not_fit_says_each_turn_once(policy: Policy) -> None:
    task = lookup_tasks(1)[0]
    turn = policy.codec.assistant(
        Message(role=Role.ASSISTANT, content="", tool_calls=[ToolCall(id="call_0", name="find", arguments="{}")])
    )

    class NoRoomForTheAnswer:
        """Plays one turn; what answers it does not fit any more."""

        def generate(
            self, prompts: Sequence[list[int]], respond: Respond, sampling: Sampling, stop_id: int, seed: int
        ) -> list[Generation]:
            row = Generation(list(prompts[0]))
            for token in turn:
                row.act(token, -1.0)
            assert respond(0, turn)
            row.truncated = True
            return [row]

    runner = RolloutRunner(policy, NoRoomForTheAnswer(), load_environment("lookup"), Sampling())
    [row] = runner.run([Attempt(task)], 0, ["r"])
    assert [message.role for message in row.messages] == ["user", "assistant", "tool"]
    assert row.n_steps == 1


def test_a_saved_policy_speaks_as_before(policy: Policy, tmp_path: object) -> None:
    policy.save(tmp_path)  # type: ignore[arg-type]
    loaded = Policy.load(str(tmp_path))
    assert loaded.tokenizer_fingerprint == policy.tokenizer_fingerprint
    ids = torch.tensor([policy.codec.opening([_openings()[0]], "[]")])
    assert torch.equal(loaded.model(ids).logits, policy.model(ids).logits)


def test_a_missing_model_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"model '\./nowhere' cannot be loaded.*Give a folder"):
        Policy.load("./nowhere")
