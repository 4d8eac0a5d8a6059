"""The embedded tiny policy: its tokens, and that it learns to copy whatever the seed."""

from functools import partial

import pytest
from architectures import lookup_tasks

from agentrl.algorithms.sft import SFT
from agentrl.chat.codec import tokenize
from agentrl.environments import load_environment
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Message, Role, Trajectory
from agentrl.training.loop import epochs
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer

ENV = load_environment("lookup")


@pytest.fixture(scope="module")
def runs() -> list[Trajectory]:
    return [demonstrate(ENV, task, 0.0, 0, f"expert-{n}") for n, task in enumerate(lookup_tasks(256))]


def test_the_constant_part_of_a_call_is_few_tokens_and_a_word_is_one_everywhere(runs: list[Trajectory]) -> None:
    policy = tiny_policy([row.messages for row in runs], seed=0)
    run = next(run for run in runs if run.n_tool_calls == 3)
    row = tokenize(run, policy.codec, "tiny")
    calls = [message for message in row.messages if message.tool_calls]
    assert [message.token_end - message.token_start for message in calls] == [10, 10, 10]
    tokens = partial(policy.tokenizer.encode, add_special_tokens=False)
    for word, text in (
        ("Ann", "boss of Ann?"),
        ("Ann", '{"who": "Ann", "rel": "boss"}'),
        ("Ann", "<tool_response>Ann</tool_response>"),
        ("rival", "city of the rival of Ann?"),
        ("rival", '", "rel": "rival"}}'),
    ):
        [token] = tokens(word)
        assert token in tokens(text), text


def test_a_policy_has_the_size_that_is_asked_for(runs: list[Trajectory]) -> None:
    size = TinySize(context=500, turn=70, vocabulary=400, layers=3, width=96)
    policy = tiny_policy([row.messages for row in runs], 0, size)
    config = policy.model.config
    result = (config.max_position_embeddings, config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
    assert result == (500, 3, 96, 3)
    assert policy.model.generation_config.max_new_tokens == 70
    assert len(policy.tokenizer) <= 400 < len(tiny_policy([row.messages for row in runs], 0).tokenizer)


def test_a_number_is_as_many_tokens_as_the_size_says() -> None:
    told = [[Message(role=Role.USER, content="P206 and P206 are papers, 1206 is a number")]] * 20
    for digits, tokens in [(1, 3), (3, 1)]:
        tokenizer = tiny_policy(told, 0, TinySize(digits=digits)).tokenizer
        assert len(tokenizer.encode("206", add_special_tokens=False)) == tokens
    assert tokenizer.decode(tokenizer.encode("1206 of 9", add_special_tokens=False)) == "1206 of 9"


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("seed", [0, 1])
def test_a_fresh_policy_learns_to_copy_names_within_eighty_steps(runs: list[Trajectory], seed: int) -> None:
    policy = tiny_policy([row.messages for row in runs], seed)
    rows = TrainingRows.of(
        [
            TrainingRow(
                row_id=run.trajectory_id,
                unit=number,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[1.0] * row.n_tokens,
            )
            for number, run in enumerate(runs)
            for row in [tokenize(run, policy.codec, "tiny")]
        ]
    )
    trainer = Trainer(policy, SFT(), OptimizerConfig(lr=5e-3, schedule="linear", warmup=20), 80)
    batches = epochs(rows, 16, seed)
    losses = [trainer.step(rows.take(next(batches)))["loss"] for _ in range(80)]
    assert sum(losses[-5:]) / 5 < 0.12  # without a copied name, a call has at least 0.3 nats a token
