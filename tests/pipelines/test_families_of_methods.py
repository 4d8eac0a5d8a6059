"""Stages that continue, correct and cut rows, with models of other families: each turn that is trained on reads back as
the message that it stands for, in the family's own dialect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import TRAIN
from tabular import TabularEngine, stumbling

from agentrl.chat.codec import ChatCodec
from agentrl.engines.configs import EmbeddedConfig
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, init_model
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.compress.segment import segment
from agentrl.pipelines.methods.dagger.correct import correct
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.methods.hindsight.relabel import relabel
from agentrl.pipelines.methods.splice.splice import splice
from agentrl.pipelines.methods.team.team import team
from agentrl.pipelines.methods.toolformer.filter_calls import filter_calls
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import sample
from agentrl.schemas.trajectory import Message, Role, Trajectory
from benchmarks.chat_families import tokenizer_of

FAMILIES = ("llama3_2", "qwen3", "glm4moe", "gemma4_v5", "nemotron_3_nano")
UNREVISED = {"llama3_2", "gemma4_v5"}
"""Their templates drop what is said before a call, or write it after the answers."""
LIMITS: dict[str, Any] = {"sampling": {"max_tokens": 2000}}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def tabular() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedConfig, "build", lambda self, policy: TabularEngine(policy.codec, stumbling(0.6)))
        yield


class Family:
    """A store with rollouts in ``rooms`` of a model of one family, whose weights are never asked."""

    def __init__(self, name: str, folder: Path) -> None:
        tokenizer = tokenizer_of(name)
        self.policy = Policy(init_model(tokenizer, 0, TinySize(context=2048)), tokenizer, name)
        self.harness = Harness(folder)
        self.model: Model = self.harness.model(self.policy.save)
        made = self.harness.run(generate, {"env": "rooms", "train": 3, "dev": 0, "heldout": 2})
        self.tasks: Tasks = made["train"]
        self.heldout: Tasks = made["heldout"]
        self.rollouts: Trajectories = self.sampled({"samples": 8, **LIMITS})["trajectories"]

    def sampled(self, config: dict[str, Any]) -> Result:
        return self.harness.run(sample, config, model=self.model, tasks=self.tasks)

    def made(self, stage: Any, config: dict[str, Any], **inputs: Any) -> Trajectories:
        """What a stage makes of the rollouts; a supervised step on it is taken, and each row is looked at."""
        result: Trajectories = self.harness.run(
            stage, config, trajectories=[self.rollouts], model=self.model, **inputs
        )["trajectories"]
        rows = result.read()
        assert rows
        for row in rows:
            check(self.policy.codec, row)
        self.harness.run(sft, TRAIN, trajectories=[result], model=self.model)
        return result


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def meaning(message: Message) -> Any:
    return message.content.strip(), [(call.name, call.parsed()) for call in message.tool_calls]


def check(codec: ChatCodec, row: Trajectory) -> None:
    """Each turn of a row reads back, and what is trained on are turns alone."""
    trained = 0
    for message in row.messages:
        start, end = message.token_start or 0, message.token_end or 0
        part = row.action_mask[start:end]
        if message.role is not Role.ASSISTANT:
            assert not any(part)
            continue
        trained += sum(part)
        assert all(part) or not any(part)
        parsed = codec.parse(row.input_ids[start:end], row.input_ids[:start], row.tools)
        assert parsed.error is None
        assert meaning(parsed.message) == meaning(message)
    assert trained == sum(row.action_mask) == row.n_action_tokens > 0


def test_rollouts_read_back(family: Family) -> None:
    rows = family.rollouts.read()
    for row in rows:
        check(family.policy.codec, row)
    assert any(row.success for row in rows)
    assert any(row.n_tool_calls for row in rows)


def test_continuations(family: Family) -> None:
    family.made(fork, {"at": "failed", "k": 1, **LIMITS})


@pytest.mark.parametrize("mode", [{"mode": "label"}, {"mode": "switch"}, {"mode": "mix", "beta": 0.5}], ids=str)
def test_corrections(family: Family, mode: dict[str, Any]) -> None:
    family.made(correct, {**mode, "k": 2, **LIMITS})


def test_relabelled_rows(family: Family) -> None:
    family.made(relabel, {}, heldout=[family.heldout])


def test_splices(family: Family) -> None:
    if family.policy.name in UNREVISED:
        made = family.harness.run(splice, {}, trajectories=[family.rollouts], model=family.model)
        assert made.metrics["not_written"]
        assert not made["trajectories"].ids()
        return
    family.made(splice, {})


def test_teams(family: Family) -> None:
    made = family.harness.run(team, {"samples": 1, **LIMITS}, model=family.model, tasks=family.tasks)["trajectories"]
    walkers = [row for row in made.read() if row.agent == "walker"]
    assert len(walkers) == 3
    for row in walkers:
        check(family.policy.codec, row)
    family.harness.run(sft, TRAIN, trajectories=[made], model=family.model)


def limit_of(family: Family) -> int:
    lengths = [row.n_tokens for row in family.rollouts.read()]
    return min(lengths) + (max(lengths) - min(lengths)) // 3


@pytest.mark.parametrize("by", ["drop", "schema", "summary"])
def test_compressed_episodes(family: Family, by: str) -> None:
    config = {"samples": 2, "sampling": {"max_tokens": 2000, "compress": {"limit": limit_of(family), "by": by}}}
    if by == "summary" and family.policy.name == "gemma4_v5":
        with pytest.raises(ValueError, match="cannot write that; set by: schema or by: drop"):
            family.sampled(config)
        return
    rows = family.sampled(config)["trajectories"].read()
    assert any(row.segment for row in rows)
    for row in rows:
        check(family.policy.codec, row)


def test_stored_rows_that_are_cut(family: Family) -> None:
    family.made(segment, {"limit": limit_of(family), "by": "drop"})


def test_rows_without_calls_that_do_not_help(family: Family) -> None:
    made = family.made(filter_calls, {"tools": ["go"], "tau": 0.05})
    assert any(row.source == "calls_cut" for row in made.read())
