"""Asynchronous online training: true labels, nothing dropped, and bounds that cannot be kept are refused."""

import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from agentrl.models.policy import Policy
from agentrl.online import coverage
from agentrl.online.coverage import SCHEMA, CoverageError, by_age, check
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.online_log import OnlineLog
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}
SMALL = {"iterations": 4, "tasks": 3, "samples": 4, "optimizer": {"lr": 1e-3}, **LIMITS}
FREE = {"type": "transformers", "schedule": "free"}

SLOW = """
import asyncio
from agentrl.environments import load_environment

class Slow:
    name, version, max_steps = "slow_lookup:Slow", "1", 5

    def __init__(self):
        self.inner = load_environment("lookup")

    def tasks(self, sizes, seed):
        return self.inner.tasks(sizes, seed)

    async def reset(self, task):
        return Visit(await self.inner.reset(task), int(task.task_id[-1], 36) % 3 * 0.4)

class Visit:
    def __init__(self, inner, seconds):
        self.inner, self.seconds = inner, seconds
        self.opening, self.tools = inner.opening, inner.tools

    async def step(self, message):
        if message.tool_calls:
            await asyncio.sleep(self.seconds)
        return await self.inner.step(message)

    async def score(self):
        return await self.inner.score()

    async def close(self):
        await self.inner.close()
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("asynchronous")
    (folder / "slow_lookup.py").write_text(SLOW)
    sys.path.insert(0, str(folder))
    yield Harness(folder)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def slow(harness: Harness, tasks: Tasks) -> Tasks:
    return harness.tasks([row.model_copy(update={"env": "slow_lookup:Slow"}) for row in tasks.read()])


def logprobs(policy: Policy, row: Trajectory) -> list[float]:
    """Log-probs of a row's tokens under a policy."""
    item = TrainingRow(row_id="r", input_ids=row.input_ids, mask=row.action_mask, weights=[0.0] * len(row.input_ids))
    return batch_logprobs(policy, TrainingRows.of([item]))[0].tolist()


def apart(row: Trajectory, actual: list[float], start: int, end: int) -> float:
    """The largest difference from the recorded log-probs between two places."""
    acted = [position for position in range(start, end) if row.action_mask[position]]
    return max(abs(actual[position] - row.logprobs[position]) for position in acted)


def versions(made: Result) -> list[int]:
    """The version of the weights that each iteration updated. One whose groups teach nothing makes no new version."""
    metrics = made["metrics"].table().to_pylist()
    return [sum(row["grad_norm"] is not None for row in metrics[:number]) for number in range(len(metrics))]


def is_covered(made: Result, bound: int) -> list[dict[str, Any]]:
    """The coverage of a run of small size, after a look at it that does not rely on the stage's own."""
    rows = made["trajectories"].read()
    tickets = made["coverage"].table().to_pylist()
    assert sorted(ticket["ticket"] for ticket in tickets) == list(range(12))
    recorded = made["steps"].table().to_pylist()
    assert sorted(row["trajectory_id"] for row in recorded) == sorted(row.trajectory_id for row in rows)
    batch_of, version = {row["trajectory_id"]: row["step"] for row in recorded}, versions(made)
    for row in rows:
        assert 0 <= version[batch_of[row.trajectory_id]] - row.policy_version <= bound
    assert made.metrics["turns_trained_of_drawn"] == 1
    assert made.metrics["tickets"] == 12
    return tickets


def test_labels_are_true_while_weights_change_under_way(harness: Harness, warm: Model, slow: Tasks) -> None:
    """Invariant 1: what a span says sampled its tokens gives their recorded log-probs, and other weights do not."""
    config = {**SMALL, "ahead": 1, "max_staleness": 2, "engine": FREE, "checkpoints": {"every": 1, "last": 9}}
    made = harness.run(online, {**config, "optimizer": {"lr": 1e-2}}, model=warm, tasks=slow)
    tickets = is_covered(made, 2)
    assert max(ticket["staleness"] for ticket in tickets) > 0
    assert made.metrics["oldest"] == max(ticket["staleness"] for ticket in tickets)
    policies = {0: Policy.load(warm.path)}
    for path in made["checkpoints"].path.glob("*.pt"):
        saved = torch.load(path, weights_only=True)
        policy = policies[saved["version"]] = Policy.load(warm.path)  # not its number: some iterations update nothing
        policy.model.load_state_dict(saved["model"])
    mixed = [row for row in made["trajectories"].read() if len(row.spans) > 1]
    assert mixed, "no weights changed in the middle of an episode"
    strangers = []
    for row in mixed:
        for span in row.spans:
            assert apart(row, logprobs(policies[span.version], row), span.start, span.end) < 1e-3
            other = row.spans[0 if span.version != row.spans[0].version else -1].version
            strangers.append(apart(row, logprobs(policies[other], row), span.start, span.end))
    assert max(strangers) > 1e-3


@pytest.mark.parametrize("engine", ["exact", "free"])
@pytest.mark.parametrize(("ahead", "bound"), [(0, 1), (1, 2), (2, 3)])
def test_nothing_is_dropped_and_nothing_is_late(
    harness: Harness, warm: Model, tasks: Tasks, engine: str, ahead: int, bound: int
) -> None:
    settings = {"ahead": ahead, "max_staleness": bound, "engine": {**FREE, "schedule": engine}}
    made = harness.run(online, {**SMALL, **settings}, model=warm, tasks=tasks)
    tickets = is_covered(made, bound)
    if engine == "exact":
        version = versions(made)
        for ticket in tickets:  # a set is sampled by the weights with which it was opened, and taken in order
            opened = max(0, ticket["batch"] - ahead - 1)
            assert ticket["batch"] == ticket["ticket"] // 3
            assert ticket["staleness"] == version[ticket["batch"]] - version[opened]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ahead": 1},
            "max_staleness: 0 with ahead: 1 cannot be kept without dropping .* set max_staleness to 2 or more",
        ),
        ({"ahead": 2, "max_staleness": 2}, "set max_staleness to 3 or more, or both to 0"),
        (
            {"max_staleness": 3, "algorithm": {"type": "grpo", "off_policy": {"max_staleness": 1}}},
            "algorithm.off_policy.max_staleness: 1 would drop rollouts that max_staleness: 3 lets through",
        ),
        ({"max_staleness": 1, "optimizer": {"precision": "bfloat16"}}, "needs algorithm.off_policy"),
        (
            {"engine": {"type": "transformers", "precision": "bfloat16"}},
            "engine.precision: bfloat16 with optimizer.precision: float32: .* leave engine.precision out",
        ),
        ({"deepspeed": {}, "engine": {"type": "vllm", "sync": "nccl"}}, "sync: nccl takes weights from the stage"),
    ],
)
def test_files_that_cannot_be_kept_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        online.config.model_validate(settings)


def ticket(number: int, **changes: Any) -> dict[str, Any]:
    same = {"batch": 0, "fills": True, "rows": 2, "unscored": 0, "turns": 3, "version": 0, "staleness": 0}
    return {"ticket": number, "task_id": f"t{number % 3}", **same, **changes}


FAULTS = {
    "tickets [1] are in no batch, and [] in more than one": [ticket(0), ticket(2)],
    "tickets [] are in no batch, and [1] in more than one": [ticket(0), ticket(1), ticket(1), ticket(2)],
    "tickets [1] have not 2 rows": [ticket(0), ticket(1, rows=1), ticket(2)],
    "tickets [2] are more than 1 versions old": [ticket(0), ticket(1), ticket(2, staleness=2)],
    "one task was drawn 2 times, another 0 times": [ticket(0), ticket(1, task_id="t0")],
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_a_run_dropped_doubled_or_delayed_is_found(message: str) -> None:
    tickets = FAULTS[message]
    rows = {ticket["ticket"]: ticket["rows"] for ticket in tickets}
    with pytest.raises(CoverageError, match=re.escape(message)):
        check(tickets, rows, 2, 3, 1)


def test_a_whole_run_is_sound_and_rows_that_no_batch_names_are_not() -> None:
    tickets = [ticket(number) for number in range(7)]
    rows = dict.fromkeys(range(7), 2)
    check(tickets, rows, 2, 3, 0)
    with pytest.raises(CoverageError, match="such as those of ticket 7"):
        check(tickets, {**rows, 7: 2}, 2, 3, 0)
    assert coverage.summary(tickets, 21) == {"tickets": 7, "oldest": 0, "turns_trained_of_drawn": 1.0}
    assert not math.isclose(coverage.summary(tickets, 42)["turns_trained_of_drawn"], 1)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="folders", marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": {"lr": 1e-3, "lora": {"rank": 4, "alpha": 8}}}, id="adapters", marks=pytest.mark.slow
        ),
        pytest.param({"deepspeed": {"zero": 3, "processes": 2}}, id="two ranks"),
    ],
)
def test_a_server_that_is_killed_costs_no_row_and_no_bound(
    harness: Harness, warm: Model, slow: Tasks, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """The server is killed in the middle of a run in which sampling and training overlap."""
    keep, kept = OnlineLog.keep, list[str]()

    def noted(self: OnlineLog, rows: list[Trajectory]) -> None:
        keep(self, rows)
        kept.extend(row.trajectory_id for row in rows)
        if len(kept) == 14:
            for server in servers():
                server.kill()

    monkeypatch.setattr(OnlineLog, "keep", noted)
    engine = {"type": "vllm", "dtype": "float32", "python": os.environ["VLLM_PYTHON"], "context": 128}
    settings = {"ahead": 1, "max_staleness": 2, "engine": engine, **way}
    made = harness.run(online, {**SMALL, **settings}, model=warm, tasks=slow)
    tickets = is_covered(made, 2)
    assert max(ticket["staleness"] for ticket in tickets) > 0
    assert len(kept) == len(set(kept)) == 48
    assert not servers()


def servers() -> list[psutil.Process]:
    """vLLM's servers among the children of this process."""
    return [child for child in psutil.Process().children() if "vllm" in " ".join(child.cmdline())]


def test_tickets_of_several_ages_are_counted_apart() -> None:
    rows = [
        {"ticket": number, "task_id": "t", "batch": 0, "fills": True, "rows": 4, "unscored": number % 2, "turns": 8,
         "version": 0, "staleness": number % 3 // 2}
        for number in range(6)
    ]  # fmt: skip
    result = by_age(pa.Table.from_pylist(rows, SCHEMA))
    assert result == [
        {"staleness": 0, "tickets": 4, "rows": 16, "unscored": 2, "turns": 32},
        {"staleness": 1, "tickets": 2, "rows": 8, "unscored": 1, "turns": 16},
    ]
