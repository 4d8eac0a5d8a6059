"""Every kind of training stage, on a small store; and any of their steps computed again from Parquet."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.algorithms.base import Objective
from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.ipo import IPO
from agentrl.algorithms.rloo import RLOO
from agentrl.algorithms.simpo import SimPO
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.doctor import examine
from agentrl.flows.commands.artifacts import app as artifacts
from agentrl.flows.commands.replay import app
from agentrl.online.coverage import SCHEMA, by_age
from agentrl.pipelines.diagnose import _case
from agentrl.pipelines.file.library import resolve
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.replay.recorded import steps_of
from agentrl.pipelines.replay.settings import ReplayError, changed_by, objective_of
from agentrl.pipelines.replay.step import replay
from agentrl.pipelines.results.learned import learned_by, rows_of_step
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.pipelines.stage import StageConfig
from agentrl.pipelines.stages.grpo import GRPOConfig
from agentrl.pipelines.stages.train import DPOConfig, PreferenceConfig
from agentrl.schemas.manifest import Manifest

SPEC = """
name: small
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 6, dev: 2, heldout: 2}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  sloppy: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {noise: 1.0}}
  # It learns two ways to act in each task, so that the rollouts of a group differ in reward.
  warm:
    uses: train.sft
    inputs: {trajectories: [expert, sloppy]}
    with: {model: {init: tiny, size: {layers: 3}}, steps: 50, batch: 6, optimizer: {lr: 5.0e-3, warmup: 10}}
  sample:
    uses: trajectories.sample
    inputs: {model: warm, tasks: tasks.train}
    with: {samples: 4, sampling: {max_turn_tokens: 24, max_tokens: 120}}
  adapted:
    uses: train.sft
    inputs: {trajectories: expert, model: warm}
    with: {steps: 3, batch: 4, optimizer: {lr: 1.0e-3, lora: {rank: 2, alpha: 4}}, template_weight: 0.5}
  pairs: {uses: pairs.agentq, inputs: {trajectories: sample}}
  dpo: {uses: train.dpo, inputs: {pairs: pairs, model: warm}, with: {steps: 3, batch: 2}}
  kto: {uses: train.kto, inputs: {trajectories: [sample], model: warm}, with: {steps: 2, batch: 4}}
  offline:
    uses: train.offline
    inputs: {trajectories: sample, model: warm}
    with: {steps: 2, batch: 4, observe: {tool: 0.2}, algorithm: {type: rloo, off_policy: {truncate: 2.0}}}
"""
LORA = ", lora: {rank: 2, alpha: 4}"
ONLINE = {
    "plain": "{type: grpo}",
    "low-rank": "{type: grpo}",
    "ppo": "{type: ppo, level: turn, kl: {where: reward, estimator: k1}}",
    "vapo": "{type: vapo, critic: {pretrain: 1}, per_level: true, off_policy: {vtrace: [1.0, 1.0]}}",
    "subgoal": "{type: grpo, credit: subgoal}\n      observe: {tool: 0.3}",
}
for name, algorithm in ONLINE.items():
    SPEC += f"""
  {name}:
    uses: train.online
    inputs: {{model: warm, tasks: tasks.train}}
    with:
      iterations: 2
      tasks: 6
      samples: 4
      updates: 2
      max_tokens: 120
      max_turn_tokens: 24
      optimizer: {{lr: 1.0e-3{LORA if name == "low-rank" else ""}}}
      algorithm: {algorithm}
"""
SPEC += """
  judged: {uses: evaluate.policy, inputs: {model: plain, tasks: tasks.dev}, with: {max_tokens: 120}}
  told: {uses: report.training, inputs: {evaluations: judged.results, metrics: [warm.metrics, plain.metrics]}}
"""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder: Path = tmp_path_factory.mktemp("replay")
    (folder / "small.yaml").write_text(SPEC)
    store = Catalog(folder / "store")
    plan = make_plan(load(str(folder / "small.yaml")), store, str(folder / "store"))
    for step in plan.to_run:
        perform(job_of(step, plan, "test-run"))
    return store


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        *[("warm", 7), ("adapted", 2), ("kto", 1), ("offline", 1), ("plain", 0), ("plain", 1), ("low-rank", 1)],
        *[("ppo", 0), ("ppo", 1), ("vapo", 1), ("subgoal", 1)],
    ],
)
def test_a_replayed_step_has_the_recorded_loss_and_gradient(catalog: Catalog, stage: str, step: int) -> None:
    replayed = replay(catalog, find_artifact(catalog, stage), step)
    assert replayed.equal, replayed
    assert replayed.recorded["grad_norm"] > 0
    assert replayed.recorded["grad_norm"] == pytest.approx(replayed.replayed["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(("stage", "steps"), [("warm", 50), ("adapted", 3), ("dpo", 3), ("kto", 2), ("plain", 2)])
def test_steps_know_their_rows_and_rows_their_steps(catalog: Catalog, stage: str, steps: int) -> None:
    """What a step trained on is what its replay takes, of which another test shows that it gives the same loss."""
    manifest = find_artifact(catalog, stage)
    config = resolve(manifest.ingredients.uses).config.model_validate(manifest.ingredients.config)
    seen: dict[str, set[int]] = {}
    for number, batches, _ in steps_of(catalog, manifest, config):
        result = rows_of_step(catalog, manifest, number)
        trained = result.filter(result["trained"])
        expected = [name for batch in batches for name in batch.ids()]
        names = trained["trajectory_id" if stage != "dpo" else "pair_id"].to_pylist()
        assert sorted(names) == sorted(expected)
        if stage == "plain":
            assert any(weight > 0 for weight in trained["weight"].to_pylist())
        elif stage == "dpo":
            assert trained["label"].to_pylist() == [1, -1] * 2
        for name in trained["trajectory_id"].to_pylist():
            seen.setdefault(name, set()).add(number)
    assert set.union(*seen.values()) == set(range(steps))
    name = max(seen)
    [learned] = [entry for entry in learned_by(catalog, name) if entry.stage == stage]
    assert learned.steps == sorted(seen[name])
    assert learned.models == [f"{stage}/{manifest.fingerprint[:8]}"]
    assert bool(learned.pairs) == (stage == "dpo")
    with pytest.raises(LookupError, match=f"steps are 0 to {steps - 1}"):
        rows_of_step(catalog, manifest, steps)


def test_a_row_names_all_that_learned_from_it(catalog: Catalog) -> None:
    row = max(find_rows(catalog, "expert"))
    assert {entry.stage for entry in learned_by(catalog, row)} == {"warm", "adapted"}
    assert learned_by(catalog, "nobody-01234567-000000") == []
    with pytest.raises(LookupError, match=r"sample is of stage trajectories\.sample, which trains nothing"):
        rows_of_step(catalog, find_artifact(catalog, "sample"), 0)


def find_rows(catalog: Catalog, stage: str) -> list[str]:
    manifest = find_artifact(catalog, stage)
    path = catalog.local(manifest, manifest.outputs["trajectories"].path)
    return list(pq.read_table(path)["trajectory_id"].to_pylist())


def test_the_coverage_of_an_online_stage_is_shown_and_reported(catalog: Catalog) -> None:
    table = [["versions old", "tickets", "rollouts", "without a reward", "turns"]]
    plain = find_artifact(catalog, "plain")
    tickets = pq.read_table(catalog.local(plain, plain.outputs["coverage"].path)).to_pylist()
    table.append(["0", "12", "48", "0", str(sum(ticket["turns"] for ticket in tickets))])
    store = str(catalog.storage.root)  # type: ignore[union-attr]
    shown = CliRunner().invoke(artifacts, ["show", "plain", "--store", store]).stdout
    lines = [re.split(r" {2,}", line.strip()) for line in shown.splitlines()]
    position = lines.index(table[0])
    assert lines[position - 1] == ["coverage: each ticket was trained on once"]
    assert lines[position + 1] == table[1]
    assert "coverage: each" not in CliRunner().invoke(artifacts, ["show", "warm", "--store", store]).stdout
    told = find_artifact(catalog, "told")
    pages = [
        (catalog.local(told, told.outputs["report"].path) / f"report.{kind}").read_text() for kind in ("md", "html")
    ]
    assert "plain drew 12 tasks and trained on the rollouts of each of them once" in pages[0]
    for line in table:
        assert f"| {' | '.join(line)} |" in pages[0]
    assert "".join(f"<td>{cell}</td>" for cell in table[1]) in pages[1]


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


@pytest.fixture
def based(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Manifest]:
    """Trains from a model outside the store, named as it is given; ``org/name`` is in the cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    warm = find_artifact(catalog, "warm")
    model = catalog.local(warm, warm.outputs["model"].path)
    for folder in (tmp_path / "base", tmp_path / "hub/models--org--name/snapshots/abc"):
        shutil.copytree(model, folder)
    (tmp_path / "hub/models--org--name/refs").mkdir()
    (tmp_path / "hub/models--org--name/refs/main").write_text("abc")

    def train(path: str) -> Manifest:
        tasks, expert = (line for line in SPEC.splitlines() if line.startswith(("  tasks:", "  expert:")))
        config = f"{{model: {{path: {path}}}, steps: 2, batch: 4}}"
        tuned = f"{{uses: train.sft, inputs: {{trajectories: expert}}, with: {config}}}"
        (tmp_path / "p.yaml").write_text(f"name: p\nstages:\n{tasks}\n{expert}\n  tuned: {tuned}\n")
        store = str(catalog.storage.root)  # type: ignore[union-attr]
        plan = make_plan(load(str(tmp_path / "p.yaml")), catalog, store)
        for step in plan.to_run:
            perform(job_of(step, plan, "test-run"))
        return find_artifact(catalog, f"tuned/{plan.steps['tuned'].fingerprint}")

    return train


def test_a_replay_starts_from_the_very_folder_that_was_trained(
    based: Callable[[str], Manifest], catalog: Catalog, tmp_path: Path
) -> None:
    manifest = based("base")
    assert replay(catalog, manifest, 1).equal
    weights = tmp_path / "base/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ReplayError, match=r"tuned cannot be replayed: model 'base' of with.model.path changed: its"):
        replay(catalog, manifest, 1)
    weights.write_bytes(content)
    assert replay(catalog, manifest, 1).equal
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ReplayError, match=r"there is no model at .*/base"):
        replay(catalog, manifest, 1)


def test_a_replay_loads_the_revision_of_the_hub_that_was_trained(
    based: Callable[[str], Manifest], catalog: Catalog, tmp_path: Path
) -> None:
    manifest = based("org/name")
    (tmp_path / "hub/models--org--name/refs/main").write_text("def")  # a newer revision, of which nothing is here
    assert replay(catalog, manifest, 1).equal
    shutil.rmtree(tmp_path / "hub/models--org--name/snapshots/abc")
    with pytest.raises(ReplayError, match=r"not in the Hugging Face cache at revision abc.*--revision abc"):
        replay(catalog, manifest, 1)


@pytest.mark.parametrize("stage", [*ONLINE, "offline"])
def test_what_is_replayed_are_rollouts_that_differ_in_reward(catalog: Catalog, stage: str) -> None:
    """Their advantages alone move the policy: no bonus or penalty does."""
    manifest = find_artifact(catalog, stage)
    output = manifest.outputs["rows" if stage == "offline" else "batches"]
    weights = pq.read_table(catalog.local(manifest, output.path))["weights"].to_pylist()
    assert any(weight > 0 for row in weights for weight in row)
    assert any(weight < 0 for row in weights for weight in row)


def test_another_loss_or_knob_changes_that_step(catalog: Catalog) -> None:
    manifest = find_artifact(catalog, "ppo")
    other = replay(catalog, manifest, 1, ["algorithm={type: gspo, entropy: 0.5}"])
    assert not other.equal
    assert not replay(catalog, manifest, 1, ["algorithm.entropy=0.3"]).equal


@pytest.mark.parametrize(
    ("config", "settings", "objective"),
    [
        (DPOConfig(beta=0.3), ["objective.type=simpo"], SimPO()),
        (DPOConfig(beta=0.3), ["nll=0.5"], DPO(beta=0.3, nll=0.5)),
        (PreferenceConfig(objective=IPO(beta=0.2)), ["objective.beta=0.4", "objective.type=dpo"], DPO(beta=0.4)),
        (GRPOConfig(algorithm=GRPO(clip_low=0.1)), ["algorithm.type=rloo"], RLOO()),
    ],
    ids=str,
)
def test_a_step_of_one_loss_is_replayed_with_any_other_of_its_family(
    config: StageConfig, settings: list[str], objective: Objective
) -> None:
    assert objective_of(changed_by(config, settings)) == objective


def test_the_doctor_computes_log_probs_again_with_the_model_that_sampled(catalog: Catalog) -> None:
    buffer = TrajectoryBuffer(catalog.storage.uri)
    for stage in ("sample", "ppo"):
        case = _case(catalog, buffer, find_artifact(catalog, stage), None, recompute=False)
        assert len(case.recomputed) == {"sample": 16, "ppo": 16}[stage]  # those of the second iteration have moved on
        assert "log-probs do not match the policy" not in {finding.name for finding in examine(case)}


def test_the_value_head_is_fitted_alone_first(catalog: Catalog) -> None:
    manifest = find_artifact(catalog, "vapo")
    path = catalog.local(manifest, manifest.outputs["metrics"].path)
    first, second = pq.read_table(path).to_pylist()
    assert first["value_loss"] is not None
    assert first["loss"] is None  # the policy was left alone
    assert second["loss"] is not None
    with pytest.raises(ReplayError, match="step 0 updated nothing"):
        replay(catalog, manifest, 0)


@pytest.mark.parametrize(
    ("stage", "step", "setting", "message"),
    [
        ("warm", 99, [], "steps are 0 to 49"),
        ("sample", 0, [], "trains nothing"),
        ("ppo", 0, ["algorithn.entropy=1"], "did you mean 'algorithm'"),
        ("ppo", 0, ["iterations=1"], "allowed are NAME=VALUE of algorithm, optimizer"),
        ("ppo", 0, ["algorithm.clip_low=7"], "less than 1"),
        ("ppo", 0, ["algorithm.lam=0.5"], "lam acted on the recorded advantages"),
        ("subgoal", 0, ["algorithm.kl.coef=0.1"], "grpo compares with a reference policy"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    catalog: Catalog, stage: str, step: int, setting: list[str], message: str
) -> None:
    with pytest.raises(ReplayError, match=message):
        replay(catalog, find_artifact(catalog, stage), step, setting)


def test_the_command(catalog: Catalog) -> None:
    store = str(catalog.storage.root)  # type: ignore[union-attr]
    good = CliRunner().invoke(app, ["warm", "--step", "3", "--store", store])
    assert good.exit_code == 0
    assert "equal" in good.output
    assert "not equal" not in good.output
    bad = CliRunner().invoke(app, ["warn", "--step", "3", "--store", store])
    assert bad.exit_code == 2
    assert "did you mean 'warm'" in bad.output
