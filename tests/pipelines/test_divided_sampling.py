"""Rollouts are the same whoever makes their shards, after kills too; what cannot be divided is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import lookup_tasks, qwen
from faulty_shop import task
from real_slurm import RealSlurm, until
from test_sample_engines import PIPELINE

from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards import queued
from agentrl.datastore.shards.shard import ShardError
from agentrl.engines.configs import OpenAIConfig
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts import sampled_shards
from agentrl.pipelines.parts.shared_limits import with_shared_limit
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages import trajectories
from agentrl.pipelines.stages.trajectories import sample
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.trajectory import Termination, Trajectory

CONFIG = {"samples": 2, "shard_tasks": 2, "sampling": {"max_turn_tokens": 12, "max_tokens": 120}}
WHOLE = ("input_ids", "action_mask", "logprobs", "messages", "reward", "success", "termination", "policy", "group_id")


class Sampled:
    """Runs the stage by an engine, each time as a run of its own or as the same one, which a kill ended."""

    def __init__(self, folder: Path) -> None:
        self.harness = Harness(folder)
        self.model = self.harness.model(qwen().save)
        self.context: Context | None = None

    def __call__(
        self, engine: dict[str, Any], tasks: Any = None, again: bool = False, **config: Any
    ) -> dict[tuple[str, int], Trajectory]:
        if not again or self.context is None:
            self.context = self.harness._context(sample.name)
        self.context.engine = ShardEngine.model_validate(engine)
        given = self.harness.tasks(tasks or lookup_tasks(5))
        made = sample(self.context, sample.config.model_validate({**CONFIG, **config}), tasks=given, model=self.model)
        assert not (self.context.scratch / "shards").exists()
        return {(row.task_id, row.sample_index): row for row in made["trajectories"].read()}  # type: ignore[attr-defined]


@pytest.fixture
def sampled(tmp_path: Path) -> Sampled:
    return Sampled(tmp_path)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """What workers do is done here. Returns how many shards were made since it was asked last."""
    monkeypatch.setattr(trajectories, "divides", lambda *_: True)
    made: list[int] = []
    make = sampled_shards.sample_shard
    monkeypatch.setattr(sampled_shards, "sample_shard", lambda *given: (made.append(1), make(*given)))

    def since() -> list[int]:
        number = list(made)
        made.clear()
        return number

    return since


def tokens(rows: dict[Any, Trajectory]) -> dict[Any, list[int]]:
    """What was drawn. Log-probs have other last bits if fewer rows are sampled beside each other."""
    return {key: row.input_ids for key, row in rows.items()}


def same(rows: dict[Any, Trajectory], others: dict[Any, Trajectory]) -> bool:
    def seen(row: Trajectory) -> str:
        whole = row.model_dump(include=set(WHOLE))
        return repr({**whole, "group_id": whole["group_id"][-6:]})  # ids begin with the run, and prompts have NaN

    return {key: seen(row) for key, row in rows.items()} == {key: seen(row) for key, row in others.items()}


def test_shards_of_workers_have_the_rows_of_one_process(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch, divided: Callable[[], list[int]]
) -> None:
    by_workers = sampled({"type": "here"})
    assert len(by_workers) == 10
    assert len(divided()) == 3
    workers, context = by_workers, sampled.context
    assert context is not None
    measured = dict(context.metrics)
    monkeypatch.undo()
    assert same(sampled({"type": "here"}), workers)
    assert sampled.context is not None
    assert sampled.context.metrics == measured


def test_attempts_that_are_made_again_are_counted_and_kept(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch, divided: Callable[[], list[int]], tmp_path: Path
) -> None:
    tasks = [task("reset", "faulty_shop:Broken", 0), *lookup_tasks(3)]
    retry = {"limits": {"retry": {"attempts": 2, "backoff_s": 0}}}
    with pytest.warns(UserWarning, match="retried 2: attempts failed by no doing of the policy"):
        by_workers = sampled({"type": "here"}, tasks, **retry)
    assert sampled.context is not None
    failed, measured = sampled.context.row_ids(failed=True), dict(sampled.context.metrics)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="retried 2: attempts failed by no doing of the policy"):
        assert same(sampled({"type": "here"}, tasks, **retry), by_workers)
    assert len(failed) == len(sampled.context.row_ids(failed=True)) == 2
    assert sampled.context.metrics == measured


def test_what_was_made_before_a_kill_is_not_made_again(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch, divided: Callable[[], list[int]]
) -> None:
    expected = sampled({"type": "here"})
    divided()
    make = sampled_shards.sample_shard

    def stopped(path: Path, *given: Any) -> None:
        if path.name.startswith("2-"):
            raise KeyboardInterrupt
        make(path, *given)

    monkeypatch.setattr(sampled_shards, "sample_shard", stopped)
    with pytest.raises(KeyboardInterrupt):
        sampled({"type": "here"})
    assert sampled.context is not None
    assert len(divided()) == 2
    assert not sampled.context.row_ids()
    monkeypatch.setattr(sampled_shards, "sample_shard", make)
    assert same(sampled({"type": "here"}, again=True), expected)
    assert len(divided()) == 1


def test_what_failed_by_no_doing_of_the_policy_before_a_kill_is_made_again(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch, divided: Callable[[], list[int]], tmp_path: Path
) -> None:
    tasks = [task("served", "flaky_server:Flaky", number) for number in range(4)]
    monkeypatch.setenv("FLAKY_SERVER", str(tmp_path / "up"))
    (tmp_path / "up").touch()
    expected = sampled({"type": "here"}, tasks)
    assert Termination.INFRA_ERROR not in {row.termination for row in expected.values()}
    make = sampled_shards.sample_shard

    def stopped(path: Path, attempts: Any, *given: Any) -> None:
        if path.name.startswith("1-"):
            raise KeyboardInterrupt
        (tmp_path / "up").write_text("but for task 1")
        make(path, attempts, *given)
        (tmp_path / "up").write_text("")

    monkeypatch.setattr(sampled_shards, "sample_shard", stopped)
    retry = {"limits": {"retry": {"attempts": 1}}}
    with pytest.raises(KeyboardInterrupt):
        sampled({"type": "here"}, tasks, **retry)
    monkeypatch.setattr(sampled_shards, "sample_shard", make)
    divided()
    rows = sampled({"type": "here"}, tasks, again=True, **retry)
    assert tokens(rows) == tokens(expected)
    assert Termination.INFRA_ERROR not in {row.termination for row in rows.values()}
    assert len(divided()) == 2, "of the first shard, what failed alone"
    assert sampled.context is not None
    assert "infra_errors" not in sampled.context.metrics


def test_attempts_that_the_buffer_lacks_are_drawn_as_in_the_whole_shard(sampled: Sampled) -> None:
    expected = sampled({"type": "here"})
    context = sampled.context = sampled.harness._context(sample.name)
    rows = [expected[key] for key in sorted(expected)][:4]
    names = [context.trajectory_id(number) for number in range(4)]
    there = [
        row.model_copy(update={"trajectory_id": name, "episode_id": name, "group_id": names[number // 2 * 2]})
        for number, (row, name) in enumerate(zip(rows, names, strict=True))
    ]
    context.append([there[0], there[2]], 0)
    assert tokens(sampled({"type": "here"}, again=True)) == tokens(expected)


def test_prompts_that_leave_no_room_are_said(sampled: Sampled, divided: Callable[[], list[int]]) -> None:
    with pytest.raises(ValueError, match=r"max_tokens 30 leaves no room for a turn: the shortest prompt"):
        sampled({"type": "here"}, sampling={"max_turn_tokens": 12, "max_tokens": 30})


def test_a_shard_of_long_prompts_alone_is_made_as_one_process_makes_it(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch, divided: Callable[[], list[int]]
) -> None:
    tasks = lookup_tasks(4)
    tasks[2:] = [task.model_copy(update={"prompt": task.prompt * 20}) for task in tasks[2:]]
    config = {"sampling": {"max_turn_tokens": 12, "max_tokens": 150}}
    with pytest.warns(UserWarning, match="with max_tokens 150 its rollouts end before they say anything"):
        by_workers = sampled({"type": "here"}, tasks, **config)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="with max_tokens 150 its rollouts end before they say anything"):
        assert same(sampled({"type": "here"}, tasks, **config), by_workers)


@pytest.mark.slow
@pytest.mark.ci
def test_processes_that_are_killed_make_the_same_rows(sampled: Sampled, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    dying = {"type": "dying_reward:Dying", "folder": str(tmp_path / "killed"), "weight": 0.25, "rows": []}
    expected = sampled({"type": "here"}, rewards=[dying])
    context = sampled.harness._context(sample.name)
    victims = [context.trajectory_id(number) for number in (1, 9)]
    sampled.context = context
    rows = sampled({"type": "processes", "workers": 2}, again=True, rewards=[{**dying, "rows": victims}])
    assert same(rows, expected)
    assert len(list((tmp_path / "killed").iterdir())) == 2


@pytest.mark.slurm
def test_jobs_of_a_real_slurm_make_the_same_rows(
    sampled: Sampled, tmp_path: Path, slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "LOOK_S", 0.5)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "agentrl"), str(Path(__file__).parent)])
    )
    expected = sampled({"type": "here"})
    assert same(sampled({"type": "slurm"}), expected)
    until(lambda: not slurm.jobs())


@pytest.mark.slow
def test_a_shard_that_fails_each_time_is_named(sampled: Sampled) -> None:
    (sampled.model.path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ShardError, match=r"shard .rollouts of shard \d. on .*, process \d+: .*header"):
        sampled({"type": "processes", "workers": 2})


def test_servers_take_all_rollouts_by_themselves(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    text = PIPELINE + "    execution: {{engine: {{type: processes}}}}\n"
    file.write_text(text.format(model=", model: warm", engine="{type: transformers}"))
    load(str(file))
    file.write_text(text.format(model=", model: warm", engine="{type: vllm}"))
    with pytest.raises(SpecError, match=r"with.engine vllm takes all rollouts by itself.*leave execution.engine out"):
        load(str(file))


def test_the_limits_of_an_endpoint_are_shared_by_those_that_sample() -> None:
    endpoint = OpenAIConfig(type="openai", model="m", concurrency=9, requests_per_minute=100)
    shared = with_shared_limit("engine", endpoint, ShardEngine(type="ray", workers=4))
    assert isinstance(shared, OpenAIConfig)
    assert (shared.concurrency, shared.requests_per_minute) == (2, 25)
    with pytest.raises(StoreError, match=r"engine m: its limit of 9 .* not known with ray; set execution.engine.work"):
        with_shared_limit("engine", endpoint, ShardEngine(type="ray"))
