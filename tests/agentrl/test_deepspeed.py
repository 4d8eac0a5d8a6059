"""Training through DeepSpeed equals training in one process."""

import json
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from small_models import random_rows, small_model

from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.schemas.trajectory import Message, Role, Trajectory
from agentrl.training.batch import TrainingError
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import Ranks, command, launch
from agentrl.training.loop import epochs
from agentrl.training.lora import merge_lora
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows, write_rows
from agentrl.training.step import Trainer

OPTIMIZER = OptimizerConfig(lr=5e-3, schedule="cosine", warmup=1, micro_tokens=64, clip_norm=0.5)
STEPS = 5


def job_in(folder: Path, objective: Any, zero: Any, **changes: Any) -> tuple[TrainingJob, TrainingRows]:
    folder.mkdir()
    rows = TrainingRows.of(random_rows(10, pairs=isinstance(objective, DPO)))
    tokenizer = train_tokenizer(["some text"], 300)
    Policy(small_model(seed=1), tokenizer, "small").save(folder / "start")
    write_rows(folder / "rows.arrow", rows.batches)
    settings = {"optimizer": OPTIMIZER, "steps": STEPS, "batch": 3, "seed": 0} | changes
    return TrainingJob(objective=objective, deepspeed=DeepSpeed(zero=zero, processes=2), **settings), rows


def single(folder: Path, objective: Any, rows: TrainingRows) -> tuple[list[float], Policy]:
    trainer = Trainer(Policy.load(folder / "start"), objective, OPTIMIZER, STEPS)
    losses = [trainer.step(rows.take(batch))["loss"] for batch in islice(epochs(rows, 3, 0), STEPS)]
    return losses, trainer.policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "objective"),
    [(0, GRPO()), (1, DPO()), pytest.param(2, GRPO(entropy=0.01), marks=pytest.mark.ci), (3, GRPO())],
    ids=str,
)
def test_the_curve_is_that_of_one_process(zero: int, objective: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folder = tmp_path / "job"
    job, rows = job_in(folder, objective, zero)
    seen: list[float] = []
    history = launch(job.deepspeed, job.write(folder), lambda metrics: seen.append(metrics["loss"]))
    expected, policy = single(folder, objective, rows)
    assert [row["loss"] for row in history] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert seen == [row["loss"] for row in history]
    trained = Policy.load(folder / "model")
    for name, value in policy.model.state_dict().items():
        assert trained.model.state_dict()[name].numpy() == pytest.approx(value.numpy(), abs=2e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_adapters_train_and_are_folded_in(zero: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    folder = tmp_path / "job"
    optimizer = OPTIMIZER.model_copy(update={"lora": LoRA(rank=4, alpha=8)})
    job, rows = job_in(folder, GRPO(), zero, optimizer=optimizer)
    history = launch(job.deepspeed, job.write(folder), lambda metrics: None)
    trainer = Trainer(Policy.load(folder / "start"), GRPO(), optimizer, STEPS, seed=job.seed)
    losses = [trainer.step(rows.take(batch))["loss"] for batch in islice(epochs(rows, 3, 0), STEPS)]
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=1e-4, abs=1e-6)
    merge_lora(trainer.policy)
    trained = Policy.load(folder / "model").model.state_dict()
    for name, value in trainer.policy.model.state_dict().items():
        assert trained[name].numpy() == pytest.approx(value.numpy(), abs=2e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_a_killed_job_goes_on_from_its_checkpoint(zero: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folder = tmp_path / "job"
    job, rows = job_in(folder, GRPO(), zero, checkpoint_every=2)

    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    path = job.write(folder)
    with pytest.raises(KeyboardInterrupt):
        launch(job.deepspeed, path, kill)
    resumed: list[float] = []
    history = launch(job.deepspeed, path, lambda metrics: resumed.append(metrics["step"]))
    assert resumed[0] >= 2
    assert [row["loss"] for row in history] == pytest.approx(single(folder, GRPO(), rows)[0], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_no_operator_is_built_and_locks_of_killed_builds_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would wait for a lock without end, and building takes a minute."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    job, _ = job_in(tmp_path / "job", GRPO(), 1, steps=1)
    with pytest.warns(UserWarning, match=f"removed {lock}"):
        history = launch(job.deepspeed, job.write(tmp_path / "job"), lambda _: None)
    assert len(history) == 1
    assert not list(lock.parent.iterdir()), "an operator was built"


def test_ranks_that_are_never_told_of_a_job_end() -> None:
    pytest.importorskip("deepspeed")
    ranks = Ranks(DeepSpeed(processes=2))
    [process] = ranks._processes
    assert process.poll() is None
    ranks.close()
    assert process.poll() == -signal.SIGTERM


@pytest.mark.slow
def test_a_failing_job_says_why(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folder = tmp_path / "job"
    job, _ = job_in(folder, GRPO(), 1)
    row = random_rows(1)[0]
    broken = TrainingRows.of([row.model_copy(update={"mask": [False] * len(row.mask)})])
    write_rows(folder / "rows.arrow", broken.batches)
    with pytest.raises(TrainingError, match="no action token to train on"):
        launch(job.deepspeed, job.write(folder), lambda _: None)


def test_the_config_and_the_command_carry_the_settings(tmp_path: Path) -> None:
    extra = {"wall_clock": 1, "zero_optimization": {"offload_param": {"nvme_path": "/fast"}, "sub_group_size": 5}}
    spread = DeepSpeed(zero=3, processes=4, offload_optimizer="cpu", offload_parameters="nvme", extra=extra)
    job = TrainingJob(objective=GRPO(), optimizer=OPTIMIZER, deepspeed=spread, steps=1, batch=1, seed=0)
    config = spread.settings(OPTIMIZER)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["sub_group_size"]) == (3, 5)
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/fast"}
    assert config["wall_clock"] == 1
    assert config["optimizer"]["params"]["lr"] == OPTIMIZER.lr
    assert "optimizer" not in spread.settings(None)
    started = " ".join(command(4, 1, 2, Path("told")))
    assert "agentrl.training.launch --ranks 4 --node 1 --nodes 2 --address {host} told" in started
    path = job.write(tmp_path)
    assert TrainingJob.model_validate(json.loads(path.read_text())) == job
    with pytest.raises(ValueError, match="needs zero: 3"):
        DeepSpeed(zero=2, offload_parameters="cpu")


@pytest.mark.slow
def test_the_stage_of_ranks_reads_no_tokenizer_and_they_refuse_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers and torch take seconds to import, beside the ranks that import them too."""
    pytest.importorskip("deepspeed")
    from agentrl.models import policy as policies
    from agentrl.pipelines.handles import Model
    from agentrl.pipelines.harness import Harness
    from agentrl.pipelines.stages.train import sft

    start = Policy(small_model(seed=1), train_tokenizer(["some text"], 300), "small")
    start.save(tmp_path / "model")
    model = Model(tmp_path / "model", "start", "model", "made-here")
    harness = Harness(tmp_path / "harness")
    config = {"steps": 2, "batch": 2, "deepspeed": {"zero": 2, "processes": 2}}

    def refuse(path: Any) -> None:
        raise AssertionError("the stage's process loads a tokenizer")

    monkeypatch.setattr(policies, "load_tokenizer", refuse)
    fine, foreign = (
        harness.trajectories([spoken(f"{tokenizer}-{n}", tokenizer) for n in range(4)])
        for tokenizer in (start.tokenizer_fingerprint, "another")
    )
    made = harness.run(sft, config, trajectories=[fine], model=model)
    assert made.metrics["dialect"] == "hermes"
    assert made.metrics["rows"] == 4
    with pytest.raises(TrainingError, match=r"another-0 was tokenised by another, and the model .* uses"):
        harness.run(sft, config, trajectories=[foreign], model=model)


def spoken(name: str, tokenizer: str) -> Trajectory:
    """A row with tokens of this tokenizer."""
    message = Message(role=Role.ASSISTANT, content="some text", token_start=2, token_end=6)
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="model", env="lookup", split="train", prompt="?",
        reward=1.0, success=True, termination="answered", messages=[message], n_steps=1, n_tokens=6, n_action_tokens=4,
        tokenizer=tokenizer, input_ids=[5, 6, 7, 8, 9, 10], action_mask=[False] * 2 + [True] * 4,
        logprobs=[float("nan")] * 2 + [-1.0] * 4,
    )  # fmt: skip


SPEC = """
name: spread
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 12, dev: 2, heldout: 2}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {noise: 0.5}}
  warm:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {init: tiny}, steps: 3, batch: 4, optimizer: {lr: 5.0e-3}, deepspeed: {zero: 2, processes: 2}}
  more:
    uses: train.sft
    inputs: {trajectories: expert, model: warm}
    with: {steps: 1, batch: 4, deepspeed: {zero: 2, processes: 2}}
"""


@pytest.mark.slow
def test_a_stage_trains_through_deepspeed_and_replays_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.file.load import load
    from agentrl.pipelines.plan.plan import make_plan
    from agentrl.pipelines.replay.step import replay
    from agentrl.pipelines.results.lineage import find_artifact
    from agentrl.pipelines.run.execute import job_of, perform

    (tmp_path / "spread.yaml").write_text(SPEC)
    catalog = Catalog(tmp_path / "store")
    plan = make_plan(load(str(tmp_path / "spread.yaml")), catalog, str(tmp_path / "store"))

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the stage's process loads a model that its ranks load")

    for step in plan.to_run:
        with monkeypatch.context() as patch:
            if step.node.name == "more":
                patch.setattr(Policy, "load", refuse)
            perform(job_of(step, plan, "test-run"))
    assert find_artifact(catalog, "more").metrics["dialect"] == "hermes"
    replayed = replay(catalog, find_artifact(catalog, "warm"), 2)
    assert replayed.replayed["loss"] == pytest.approx(replayed.recorded["loss"], rel=1e-4)
    assert replayed.replayed["grad_norm"] == pytest.approx(replayed.recorded["grad_norm"], rel=1e-4)
