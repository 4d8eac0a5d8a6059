"""Every kind of training stage, on a small store; and any of their steps computed again from Parquet."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from replayed_stages import ONLINE, SPEC, store_of
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
from agentrl.pipelines.diagnose import _case
from agentrl.pipelines.file.library import resolve
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.replay.recorded import steps_of
from agentrl.pipelines.replay.settings import ReplayError, changed_by, objective_of
from agentrl.pipelines.replay.step import Retraining, replay
from agentrl.pipelines.results.learned import learned_by, rows_of_step
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.pipelines.stage import StageConfig
from agentrl.pipelines.stages.grpo import GRPOConfig
from agentrl.pipelines.stages.train import DPOConfig, PreferenceConfig
from agentrl.schemas.manifest import Manifest


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return store_of(tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        *[("warm", 7), ("adapted", 2), ("kto", 1), ("offline", 1), ("plain", 0), ("plain", 1), ("low-rank", 1)],
        *[("ppo", 0), ("ppo", 1), ("vapo", 1), ("subgoal", 1), ("mixed", 1)],
    ],
)
def test_a_replayed_step_has_the_recorded_loss_and_gradient(catalog: Catalog, stage: str, step: int) -> None:
    replayed = replay(catalog, find_artifact(catalog, stage), step)
    assert replayed.equal, replayed
    assert replayed.recorded["grad_norm"] > 0
    assert replayed.recorded["grad_norm"] == pytest.approx(replayed.replayed["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "steps"), [("warm", 50), ("adapted", 3), ("dpo", 3), ("kto", 2), ("plain", 2), ("mixed", 2)]
)
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


@pytest.mark.parametrize("stage", ONLINE)
def test_rows_that_are_made_again_are_the_recorded_ones_to_the_last_bit(catalog: Catalog, stage: str) -> None:
    again = replay(catalog, find_artifact(catalog, stage), 1, ["algorithm.degenerate=keep"])
    names = [name for name in again.replayed if name != "cosine"]
    assert [again.replayed[name] for name in names] == [again.recorded[name] for name in names]
    assert {"loss", "grad_norm", "reward", "trained_rows", "trained_groups", "trained_tokens"} <= set(names)
    assert again.replayed["cosine"] == pytest.approx(1.0, abs=1e-9)
    assert again.turned == ()


def _made(catalog: Catalog, *settings: str) -> tuple[dict[str, float], dict[str, np.ndarray], int]:
    """Rewards of the rollouts of step 1 of ``plain`` by id, the weight of each row that is trained on by ``settings``,
    and the number of rows."""
    manifest = find_artifact(catalog, "plain")
    config = resolve(manifest.ingredients.uses).config.model_validate(manifest.ingredients.config)
    training = Retraining(catalog, manifest, config, changed_by(config, settings))
    recorded = {number: batches for number, batches, _ in steps_of(catalog, manifest, config)}
    batches = training.made(1, recorded[1], 1.0).batches
    table = pa.concat_tables([rows.table() for rows in batches]).to_pylist()
    assert training.again is not None
    rows = training.again.rollouts.of(1)
    weights = {row["row_id"]: row["weights"][row["mask"].index(True)] for row in table}
    return {row.trajectory_id: row.scored_reward() for row in rows}, weights, len(rows)


@pytest.mark.parametrize(
    ("settings", "gained"),
    [
        (["algorithm.type=dr_grpo", "algorithm.degenerate=keep"], 0.0),
        (["algorithm.type=dr_grpo", 'rewards=[{type: "replayed_stages:First", weight: 0.5}]'], 0.5),
    ],
)
def test_advantages_by_other_settings_are_those_by_hand(catalog: Catalog, settings: list[str], gained: float) -> None:
    """Dr. GRPO: the reward less the mean of its group, divided by a constant over all rows, kept or not."""
    rewards, weights, count = _made(catalog, *settings)
    names = list(rewards)
    expected = {}
    for start in range(0, len(names), 4):
        group = [rewards[name] + gained * (number == 0) for number, name in enumerate(names[start : start + 4])]
        for name, reward in zip(names[start : start + 4], group, strict=True):
            expected[name] = reward - sum(group) / 4
    live = {name: value for name, value in expected.items() if abs(value) > 1e-9}
    assert weights == pytest.approx({name: value * len(live) / count for name, value in live.items()})


def test_filters_leave_out_groups_and_what_the_loss_is_divided_by(catalog: Catalog) -> None:
    rewards, kept, count = _made(catalog, "algorithm.degenerate=keep")
    _, dropped, _ = _made(catalog, "algorithm.degenerate=drop")
    assert kept.keys() == dropped.keys()
    assert 0 < len(kept) < count
    assert dropped == pytest.approx({name: weight * count / len(kept) for name, weight in kept.items()})
    _, certain, _ = _made(catalog, "algorithm.keep_uncertain=0.17")  # the group of the highest variance, of 6
    names = list(rewards)
    spread = {start: np.var([rewards[name] for name in names[start : start + 4]]) for start in range(0, len(names), 4)}
    start = max(spread, key=lambda start: spread[start])
    assert set(certain) == set(names[start : start + 4])


def test_a_reward_that_is_turned_round_turns_the_gradient_round(catalog: Catalog) -> None:
    again = replay(catalog, find_artifact(catalog, "plain"), 1, ["rewards.exact_match=-1"])
    assert again.replayed["cosine"] == pytest.approx(-1.0, abs=1e-6)
    assert again.replayed["reward"] == -again.recorded["reward"]
    assert again.replayed["trained_rows"] == again.recorded["trained_rows"] == len(again.turned)
    assert set(again.turns) == {"+ to -", "- to +"}
    assert all(row.replayed == pytest.approx(-row.recorded) for row in again.turned)
    assert again.to_json()["turned"][0].keys() == {"trajectory_id", "recorded", "replayed"}


def test_models_that_advantages_need_are_there_again(catalog: Catalog) -> None:
    other = replay(catalog, find_artifact(catalog, "ppo"), 1, ["algorithm.lam=0.5"])  # the critic is fitted again
    assert other.recorded["trained_tokens"] == other.replayed["trained_tokens"]
    assert other.replayed["cosine"] < 0.9999
    pulled = replay(catalog, find_artifact(catalog, "low-rank"), 1, ["algorithm.kl.coef=0.1"])
    assert pulled.replayed["reference_kl"] > 0


def test_a_step_is_not_compared_with_rollouts_that_do_not_give_it(catalog: Catalog) -> None:
    manifest = find_artifact(catalog, "plain")
    config = resolve(manifest.ingredients.uses).config.model_validate(manifest.ingredients.config)
    training = Retraining(catalog, manifest, config, changed_by(config, ["algorithm.degenerate=drop"]))
    recorded = {number: batches for number, batches, _ in steps_of(catalog, manifest, config)}
    with pytest.raises(ReplayError, match="step 1: its rollouts no longer give the rows that it trained on"):
        training.made(1, recorded[0], 1.0)
    assert training.again is not None
    training.again.rollouts.ids[1] = ["nobody-01234567-000000"]
    with pytest.raises(ReplayError, match=r"rollouts of step 1 of plain are not in the buffer any more.*without them"):
        training.made(1, recorded[1], 1.0)


def test_another_loss_or_knob_changes_that_step(catalog: Catalog) -> None:
    other = replay(catalog, find_artifact(catalog, "ppo"), 0, ["algorithm={type: gspo, entropy: 0.5}"])
    assert not other.equal
    assert not replay(catalog, find_artifact(catalog, "plain"), 0, ["algorithm.entropy=0.3"]).equal


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
    assert objective_of(changed_by(config, settings).config) == objective


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
        ("offline", 0, ["algorithm.type=distill"], "distill needs a teacher, whose log-probs are not recorded"),
        ("offline", 0, ["algorithm.type=ppo"], "needs new rollouts"),
        ("offline", 0, ["rewards.exact_match=1"], "allowed are NAME=VALUE of algorithm, optimizer, scorer, observe"),
        ("offline", 0, ["scorer=judge"], "rows cannot be made from the stored rollouts: .*judge"),
        ("plain", 0, ["degenerate=drop"], "rewards, observe; did you mean 'algorithm.degenerate'"),
        ("plain", 0, ["algorithm.degenerate=dorp"], "algorithm.degenerate: Input should be 'drop' or 'keep'"),
        ("plain", 0, ["algorithm.resample=1"], "it decided which tasks were sampled; run the stage again"),
        ("ppo", 0, ["algorithm.critic.lr=1"], "the critic was fitted by it before this step"),
        ("plain", 0, ["algorithm.type=ppo"], "ppo needs a critic, and grpo fitted none; run the stage again"),
        ("plain", 0, ["algorithm.type=remax"], "remax needs a greedy rollout of each task, and grpo sampled none"),
        ("plain", 0, ["algorithm.type=distill"], "distill needs a teacher"),
        ("plain", 0, ["rewards.exact_match=much"], "a weight is a finite number, such as rewards.exact_match=0.5"),
        ("plain", 0, ["rewards.exact_mach=1"], "they have environment, exact_match; did you mean 'exact_match'"),
        ("plain", 0, ["rewards.exact_match=0"], "updated nothing with rewards.exact_match=0"),
        ("plain", 0, ["rewards=[{type: format, weight: 2}]"], "the outcome carries at least half"),
        (
            "plain",
            0,
            ['rewards=[{type: "replayed_stages:Cart"}]'],
            "the cart is closed.*put what is missing into final_s",
        ),
        (
            "plain",
            0,
            ["rewards=[{type: judge, engines: [{type: openai, base_url: 'http://x', model: m}]}]"],
            "asks a model",
        ),
    ],
)
def test_what_cannot_be_replayed_is_said(
    catalog: Catalog, stage: str, step: int, setting: list[str], message: str
) -> None:
    with pytest.raises(ReplayError, match=message):
        replay(catalog, find_artifact(catalog, stage), step, setting)


def test_the_rows_of_an_offline_step_are_made_again(catalog: Catalog) -> None:
    """By its own settings they are the recorded ones to the last bit; by other advantages some rows turn round."""
    manifest = find_artifact(catalog, "offline")
    same = replay(catalog, manifest, 1, ["algorithm.type=rloo", "algorithm.off_policy.truncate=2.0"])
    assert {name: same.replayed[name] for name in same.recorded} == same.recorded
    assert same.replayed["cosine"] == pytest.approx(1.0)
    assert not same.turned
    drawn = replay(catalog, manifest, 1, ["algorithm.type=grpo", "algorithm.kl.coef=0.1"])
    assert (drawn.recorded["trained_rows"], drawn.replayed["trained_rows"]) == (2, 4)  # a KL is of equal groups too


def test_a_step_is_replayed_with_the_threads_that_it_had(catalog: Catalog) -> None:
    manifest, threads = find_artifact(catalog, "warm"), torch.get_num_threads()
    assert manifest.environment["threads"] == str(threads)
    try:
        replay(catalog, manifest.model_copy(update={"environment": {"threads": str(threads + 1)}}), 0)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


def test_the_command(catalog: Catalog) -> None:
    store = str(catalog.storage.root)  # type: ignore[union-attr]
    good = CliRunner().invoke(app, ["warm", "--step", "3", "--store", store])
    assert good.exit_code == 0
    assert "equal" in good.output
    assert "not equal" not in good.output
    settings = ["--set", "rewards.exact_match=-1", "--store", store]
    turned = CliRunner().invoke(app, ["plain", "--step", "0", *settings]).output
    assert "changed for this step: rewards.exact_match=-1" in turned
    assert re.search(r"rows with another sign: \d+ from [+-] to [+-], \d+ from [+-] to [+-]", turned)
    bad = CliRunner().invoke(app, ["warn", "--step", "3", "--store", store])
    assert bad.exit_code == 2
    assert "did you mean 'warm'" in bad.output
