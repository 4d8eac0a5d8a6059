"""The examples of classes of one's own: an algorithm, a reward, a rule, an engine and a format."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from own_classes import EXAMPLES, PIPELINE, ROOT, example, forget, planned, reasons, run
from test_choices import edit

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows import cli
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.replay.settings import ReplayError
from agentrl.pipelines.replay.step import replay
from agentrl.pipelines.results.lineage import find_artifact

OWN = sorted(path.name for path in EXAMPLES.glob("own_*"))


def pass_in(folder: Path, *names: str) -> None:
    """Run the tests of these examples from ``folder``, as a user would who has copied them there."""
    places = [str(folder / name) for name in names]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *places])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *places]
    done = subprocess.run(command, cwd=places[0], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_the_tests_of_the_examples_pass_where_a_user_would_run_them(tmp_path: Path) -> None:
    for name in OWN:
        shutil.copytree(EXAMPLES / name, tmp_path / name)
        assert list((tmp_path / name).glob("test_*.py")), name
    pass_in(tmp_path, *OWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_the_tests_of_an_example_pass_alone(name: str, tmp_path: Path) -> None:
    pass_in(example(name, tmp_path).parents[1], "example")


@pytest.mark.parametrize("name", ["own_algorithm", "own_curation", "own_engine", "own_format", "own_reward"])
def test_what_the_docs_show_is_what_is_there(name: str) -> None:
    text = (ROOT / "docs/how-to/extending.md").read_text()
    files = [*(EXAMPLES / name).glob("my_*/[a-z]*.py"), EXAMPLES / name / "pipeline.yaml"]
    assert len(files) == 2
    for file in files:
        assert file.read_text().strip() in text, f"docs/how-to/extending.md shows another {file.relative_to(EXAMPLES)}"


@pytest.mark.slow
@pytest.mark.ci
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
        replayed = replay(catalog, find_artifact(catalog, stage), 1)
        assert replayed.equal, replayed
        assert replayed.recorded["grad_norm"] > 1e-3
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
        ("return rows.with_columns(trajectory_id=rows['task_id'])", "returned \\['lookup-[0-9a-f]{8}-train-"),
    ],
)
def test_a_rule_chooses_among_rows_and_changes_none(folder: Path, body: str, message: str) -> None:
    source = (
        "from agentrl.datastore.curation.rules import OwnRule\n\n\nclass Mine(OwnRule):\n    columns = ('prompt',)\n\n"
    )
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
    printed = capsys.readouterr().out
    assert "3 records of 3 rows written to out.csv" in printed
    assert json.loads(printed[printed.index("{") :])["rows"] == 3
    with pytest.raises(StoreError, match=r"chats\.csv does not look like my_formats.csv_turns:CsvTurns.*: it is CSV"):
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
