"""Classes of the user's own, outside the repository: found, checked, fingerprinted, run and replayed."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_choices import changed, edit, own

from datastore import TrajectoryBuffer
from datastore.catalog import Catalog
from datastore.errors import StoreError
from flows import cli
from pipelines.execute import job_of, perform
from pipelines.lineage import find_artifact
from pipelines.load import Pipeline, load
from pipelines.plan import Plan, Status, make_plan
from pipelines.problems import SpecError
from pipelines.replay import ReplayError, replay

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OWN = ("my_algorithms", "my_engines", "my_rewards", "my_rules", "my_formats", "my_shop", "my_classes", "my_helper")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = before
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    importlib.invalidate_caches()


def planned(path: Path, *settings: str) -> Plan:
    store = str(path.parent / "store")
    return make_plan(load(str(path), settings=settings), Catalog(store), store)


def run(path: Path, *settings: str) -> TrajectoryBuffer:
    plan = planned(path, *settings)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    return TrajectoryBuffer(plan.store)


def reasons(plan: Plan) -> dict[str, str]:
    """The first reason of each stage that is to run again."""
    return {name: step.reasons[0] for name, step in plan.steps.items() if step.status is not Status.CACHED}


def example(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / name, folder / "example")) / "pipeline.yaml"


@pytest.mark.parametrize("name", sorted(one.name for one in EXAMPLES.glob("own_*")))
def test_the_tests_of_an_example_pass_where_a_user_would_run_them(name: str, tmp_path: Path) -> None:
    folder = example(name, tmp_path).parent
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["own_algorithm", "own_curation", "own_engine", "own_format", "own_reward"])
def test_what_the_docs_show_is_what_is_there(name: str) -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    files = [*(EXAMPLES / name).glob("my_*/[a-z]*.py"), EXAMPLES / name / "pipeline.yaml"]
    assert len(files) == 2
    for file in files:
        assert file.read_text().strip() in text, f"docs/extending.md shows another {file.relative_to(EXAMPLES)}"


def test_an_algorithm_and_an_advantage_of_ones_own(folder: Path) -> None:
    path = example("own_algorithm", folder)
    small = ("stages.warm.with.steps=4", "stages.tasks.with.train=8", "stages.soft.with.iterations=2")
    # the reward of the other example differs between rollouts of so weak a policy, so that there is a gradient
    shutil.copytree(EXAMPLES / "own_reward" / "my_rewards", path.parent / "my_rewards")
    rewards = "[{type: 'my_rewards.length:Brevity', only_successes: false}]"
    small += tuple(f"stages.{name}.with.rewards={rewards}" for name in ("soft", "median"))
    run(path, *small)
    assert reasons(planned(path, *small)) == {}
    catalog = Catalog(str(path.parent / "store"))
    for stage in ("soft", "median"):
        found = replay(catalog, find_artifact(catalog, stage), 1)
        assert found.equal, found
        assert found.recorded["grad_norm"] > 1e-3
    manifest = find_artifact(catalog, "soft")
    assert manifest.ingredients.config["algorithm"]["type"] == "my_algorithms.soft_gate:SoftGate"
    assert not replay(catalog, manifest, 1, ["algorithm.tau_positive=3"]).equal
    with pytest.raises(ReplayError, match="did you mean 'tau_positive'"):
        replay(catalog, manifest, 1, ["algorithm.tau_positiv=3"])
    source = path.parent / "my_algorithms" / "soft_gate.py"
    forget()
    edit(source, "np.median(rewards", "np.mean(rewards")
    assert reasons(planned(path, *small)) == {"median": "code my_algorithms/soft_gate.py changed"}
    forget()
    edit(source, "sigmoid() * 4", "sigmoid() * 5")
    assert reasons(planned(path, *small)).keys() == {"median", "soft"}


def test_a_reward_component_of_ones_own(folder: Path) -> None:
    path = example("own_reward", folder)
    small = ("stages.warm.with.steps=4", "stages.tasks.with.train=4", "stages.rl.with.iterations=1")
    buffer = run(path, *small)
    table = buffer.sql(
        "select stage, reward, reward_components, n_action_tokens from trajectories where stage <> 'expert'"
    )
    assert set(table["stage"]) == {"sample", "rl"}
    for row in table.to_dicts():
        [given, mine] = row["reward_components"]
        assert (mine["name"], mine["weight"]) == ("Brevity", 0.2)
        most = 80 if row["stage"] == "sample" else 64
        assert mine["value"] == pytest.approx(max(0.0, 1 - row["n_action_tokens"] / most))
        assert row["reward"] == pytest.approx(given["value"] + 0.2 * mine["value"])
    forget()
    edit(path.parent / "my_rewards" / "length.py", "return 0.0", "return -1.0")
    changes = reasons(planned(path, *small))
    assert changes == dict.fromkeys(("sample", "rl"), "code my_rewards/length.py changed")


def test_a_curation_rule_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = example("own_curation", folder)
    buffer = run(path)
    catalog = Catalog(buffer.store)
    manifest = find_artifact(catalog, "curate")
    funnel = pq.read_table(catalog.local(manifest, manifest.outputs["funnel"].path)).to_pylist()
    assert [level["rule"] for level in funnel] == [
        "filter where=n_tool_calls > 0",
        "my_rules.tools:NoRepeats argument=who",
        "keep what=correct",
    ]
    assert funnel[1]["before"] > funnel[1]["after"] > 0
    dropped = buffer.get_many(funnel[1]["dropped_examples"])
    for row in dropped:
        asked = [json.loads(call.arguments)["who"] for message in row.messages for call in message.tool_calls]
        assert len(asked) > len(set(asked))
    forget()
    rules = path.parent / "rules.yaml"  # a rules file of the command finds the class beside it
    rules.write_text("- {rule: 'my_rules.tools:NoRepeats', argument: who}\n")
    arguments = ["--store", buffer.store, "--where", "stage = 'expert' and n_tool_calls > 0", "--json"]
    assert cli.call(["buffer", "curate", str(rules), "--name", "mine", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == funnel[1]["after"]
    forget()
    edit(path.parent / "my_rules" / "tools.py", "<= self.times", "< self.times")
    assert reasons(planned(path)) == {"curate": "code my_rules/tools.py changed"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rows.select('task_id')", "rule my_classes:Mine returned columns task_id; keep"),
        ("return rows.select('prompt')", "rule my_classes:Mine returned columns prompt; keep"),
        ("return [1]", "rule my_classes:Mine returned a list"),
        ("return rows.vstack(rows)", "rule my_classes:Mine returned an id twice"),
        ("return rows.with_columns(trajectory_id=rows['task_id'])", "returned \\['lookup-train-"),
    ],
)
def test_a_rule_chooses_among_rows_and_changes_none(folder: Path, body: str, message: str) -> None:
    source = "from datastore.curation.rules import OwnRule\n\n\nclass Mine(OwnRule):\n    columns = ('prompt',)\n\n"
    source += "    def keep(self, rows, work):\n"
    (folder / "my_classes.py").write_text(f"{source}        {body}\n")
    path = folder / "p.yaml"
    rows = "{uses: trajectories.curate, inputs: {trajectories: expert}, with: {rules: [{rule: 'my_classes:Mine'}]}}"
    path.write_text("\n".join([*PIPELINE.splitlines()[:4], f"  curate: {rows}"]))
    with pytest.raises(StoreError, match=message):
        run(path)


def test_an_engine_of_ones_own(folder: Path) -> None:
    path = example("own_engine", folder)
    buffer = run(path)
    [row] = buffer.sql(
        "select count(*) as n, avg(success) as success, sum(n_tokens) as tokens from trajectories"
    ).to_dicts()
    assert (row["n"], row["tokens"]) == (64, 0)
    assert 0.4 < row["success"] < 0.95, "hasty answers are wrong"
    assert reasons(planned(path)) == {}
    steady = "stages.program.with.engine.hasty=0"
    run(path, steady)
    assert find_artifact(Catalog(buffer.store), "program").metrics["success"] == 1.0
    forget()
    edit(path.parent / "my_engines" / "program.py", "left[-1]", "left[0]")
    assert reasons(planned(path, steady)) == {"program": "code my_engines/program.py changed"}
    path.write_text(path.read_text().replace("hasty: 0.2", "hastey: 0.2"))
    with pytest.raises(SpecError, match=r"with.engine.hastey: unknown key 'hastey'; did you mean 'hasty'"):
        load(str(path))


def test_a_format_of_ones_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = example("own_format", folder)
    monkeypatch.chdir(path.parent)  # the paths of files are relative to it
    buffer = run(path)
    table = buffer.sql("select env, success, reward from trajectories order by trajectory_id")
    assert table.rows() == [("chats", True, 1.0), ("chats", False, 0.2), ("chats", None, None)]
    manifest = find_artifact(Catalog(buffer.store), "chats")
    assert manifest.metrics["ignored"] == "channel 6"
    assert manifest.ingredients.config["format"] == {
        "delimiter": ";",
        "success": 0.5,
        "type": "my_formats.csv_turns:CsvTurns",
    }
    assert reasons(planned(path)) == {}
    forget()
    edit(path.parent / "my_formats" / "csv_turns.py", "score >= self.success", "score > self.success")
    assert reasons(planned(path)) == {"chats": "code my_formats/csv_turns.py changed"}
    assert list(reasons(planned(path, "stages.chats.with.format.success=0.1")).values()) == [
        "config format.success: 0.5 -> 0.1"
    ]
    name = "my_formats.csv_turns:CsvTurns"
    out = ["buffer", "export", "out.csv", "--format", name, "--store", buffer.store]
    assert cli.call(out) == 0
    assert cli.call(["buffer", "import", "out.csv", "--format", name, "--store", str(folder / "other"), "--json"]) == 0
    said = capsys.readouterr().out
    assert "3 records of 3 rows written to out.csv" in said
    assert json.loads(said[said.index("{") :])["rows"] == 3
    with pytest.raises(StoreError, match=r"chats\.csv does not look like my_formats.csv_turns:CsvTurns.*: it is text"):
        run(path, "stages.chats.with.format.delimiter='|'")


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (
            "{type: 'my_formats.csv_turns:CsvTurn'}",
            "format.type: module 'my_formats.csv_turns': 'CsvTurn' is not",
        ),
        ("{type: 'my_formats.csv_turns:CsvTurns', delimitr: x}", "unknown key 'delimitr'; did you mean 'delimiter'?"),
        ("{type: 'my_formats.csv_turns:CsvTurns', delimiter: ''}", "format.delimiter: String should have at least 1"),
        ("alpacca", "there is no format 'alpacca'; did you mean 'alpaca'?"),
    ],
)
def test_what_is_wrong_with_a_format_is_found_before_anything_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, format: str, message: str
) -> None:
    path = example("own_format", folder)
    monkeypatch.chdir(path.parent)
    path.write_text(path.read_text().replace('{type: "my_formats.csv_turns:CsvTurns", delimiter: ";"}', format))
    with pytest.raises(SpecError) as error:
        load(str(path))
    assert message in str(error.value)


CLASSES = """
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.policy_gradient import AdvantageEstimator, Advantages, PolicyGradient
from agentrl.algorithms.preference import Preference
from agentrl.rewards.component import Reward
from my_helper import twice


class Better(GRPO):
    scale: float = 1.0

    def advantages(self, step):
        return Advantages([[twice(self.scale) * token for token in one] for one in super().advantages(step).tokens])


class Hinge(Preference):
    def pair_loss(self, chosen, rejected):
        return (1 - chosen + rejected).clamp(min=0)


class NoLoss(Preference):
    pass


class Wrong(PolicyGradient):
    def advantages(self, rollouts, groups):
        return rollouts


class Loud(Reward):
    def value(self, rollout, task):
        return 1.0


class Silent(AdvantageEstimator):
    def advantages(self, step):
        return Advantages([])


def function(step):
    return step


number = 3
"""

PIPELINE = """\
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 4, dev: 1, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}, steps: 1, batch: 4}}
  rl:
    uses: train.online
    inputs: {model: warm, tasks: tasks.train}
    with: {iterations: 1, tasks: 2, samples: 2, CHOICE}
  other: {uses: train.online, inputs: {model: warm, tasks: tasks.train}, with: {iterations: 1, tasks: 2, samples: 2}}
"""


def write(folder: Path, choice: str = "algorithm: {type: 'my_classes:Better'}") -> Path:
    (folder / "my_classes.py").write_text(CLASSES)
    (folder / "my_helper.py").write_text("def twice(x):\n    return 2 * x\n")
    path = folder / "p.yaml"
    path.write_text(PIPELINE.replace("CHOICE", choice))
    return path


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("algorithm: {type: 'my_classes:Bettr'}", "rl.with.algorithm.type: module 'my_classes': 'Bettr' is not in it"),
        ("algorithm: {type: 'my_classes:Bettr'}", "did you mean 'Better'?"),
        ("algorithm: {type: 'my_clases:Better'}", "there is no such module beside the pipeline file"),
        ("algorithm: {type: 'my_classes:number'}", "is no algorithm: a class derived from agentrl.algorithms.policy"),
        ("algorithm: {type: 'my_classes:function'}", "'function' is not declared as algorithm (a class derived from"),
        ("algorithm: {type: 'my_classes:Hinge'}", "is no algorithm: a class derived from"),
        ("algorithm: {type: 'my_classes:Wrong'}", "advantages(self, rollouts, groups) must be callable as adv"),
        ("algorithm: {type: 'my_classes:Better', scal: 2}", "rl.with.algorithm.scal: unknown key 'scal'; did you mean"),
        ("algorithm: {type: 'my_classes:Better', scale: big}", "rl.with.algorithm.scale: Input should be a valid"),
        ("algorithm: {type: 'my_classes:Better', kl: {coeff: 1}}", "unknown key 'coeff'; did you mean 'coef'?"),
        ("algorithm: {type: 'my_classes:Better', kl: {estimator: k1}}", "k1 in the loss has no gradient"),
        ("algorithm: {type: grop}", "there is no algorithm 'grop'; did you mean 'grpo'?; ours: cispo"),
        ("algorithm: {scale: 2}", "rl.with.algorithm.type: names the algorithm: cispo"),
        ("algorithm: {type: ppo, advantage: {type: 'my_classes:Silent'}}", "advantage: ppo makes its critic's targets"),
        ("algorithm: {type: grpo, advantage: {type: 'my_classes:Loud'}}", "is no advantage: a class derived from"),
        ("rewards: [{type: 'my_classes:Loud'}, {type: 'my_classes:Loud'}]", "two components are called 'Loud'"),
        ("algorithm: 'my_classes:Better', seeed: 1", "unknown key 'seeed'"),
        ("rewards: [{type: 'my_classes:Lou'}]", "rl.with.rewards.0.type: module 'my_classes': 'Lou' is not in its"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_choice_is_found_before_anything_runs(folder: Path, choice: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load(str(write(folder, choice)))
    [problem] = error.value.problems
    assert f"{folder}/p.yaml:9: stages.rl.with" in str(problem)
    assert message in str(problem)


def test_a_loss_that_is_not_written_is_named(folder: Path) -> None:
    path = write(folder)
    edit(path, "name: p\nstages:", textwrap.dedent("""\
        name: p
        stages:
          pairs: {uses: pairs.agentq, inputs: {trajectories: expert}}
          hinge: {uses: train.preference, inputs: {pairs: pairs, model: warm}, with: {objective: "my_classes:Hinge"}}
          none: {uses: train.preference, inputs: {pairs: pairs, model: warm}, with: {objective: "my_classes:NoLoss"}}
    """).rstrip())  # fmt: skip
    with pytest.raises(SpecError) as error:
        load(str(path))
    [problem] = error.value.problems
    assert "p.yaml:5: stages.none.with.objective" in str(problem)
    assert "'my_classes:NoLoss' is no loss over pairs: it lacks pair_loss(self, chosen" in str(problem)


def own_of(path: Path) -> dict[str, str]:
    forget()
    pipeline: Pipeline = load(str(path))
    return own(pipeline)


def test_an_edit_concerns_exactly_what_uses_the_class(folder: Path) -> None:
    path = write(folder)
    before = own_of(path)
    edit(folder / "my_helper.py", "2 * x", "3 * x")
    after = own_of(path)
    assert changed(before, after) == {"rl"}, "a helper of the class counts"
    edit(folder / "my_classes.py", "1 - chosen", "2 - chosen")
    assert changed(after, own_of(path)) == set(), "another class of the same file does not"
    edit(path, "'my_classes:Better'", "'my_classes:Better', scale: 2")
    assert changed(after, own_of(path)) == {"rl"}
    path.write_text(PIPELINE.replace("CHOICE", "rewards: [{type: 'my_classes:Loud'}]"))
    before = own_of(path)
    edit(folder / "my_classes.py", "return 1.0", "return 2.0")
    assert changed(before, own_of(path)) == {"rl"}


def test_an_advantage_of_the_wrong_shape_ends_the_stage_with_its_name(folder: Path) -> None:
    path = write(folder, "algorithm: {type: grpo, advantage: 'my_classes:Silent'}")
    with pytest.raises(ValueError, match="my_classes:Silent gave advantages of 0 rollouts; there are 4"):
        run(path)


def test_a_class_of_ones_own_cannot_be_replayed_without_its_module(folder: Path) -> None:
    path = write(folder)
    run(path)
    catalog = Catalog(str(folder / "store"))
    manifest = find_artifact(catalog, "rl")
    forget()
    (folder / "my_classes.py").unlink()
    with pytest.raises(ReplayError, match=r"algorithm.type: module 'my_classes'.*replay in the folder where it ran"):
        replay(catalog, manifest, 0)
