"""What can be found before anything runs is found then."""

import json
import os
import shutil
from pathlib import Path

import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.storage import credentials
from agentrl.datastore.upkeep import migrate
from agentrl.flows import cli
from agentrl.pipelines.file import readiness
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.plan import make_plan

PIPELINE = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 4, dev: 1, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {MODEL}, steps: 1, batch: 4, optimizer: {lora: {rank: 4}}, deepspeed: {zero: 1}}
"""


def write(folder: Path, model: str = "init: tiny") -> str:
    path = folder / "p.yaml"
    path.write_text(PIPELINE.replace("MODEL", model))
    return str(path)


def test_a_missing_optional_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "is_installed", lambda package: False)
    with pytest.raises(SpecError) as error:
        load(write(tmp_path))
    text = str(error.value)
    assert "stages.warm.with.optimizer.lora: needs the package peft, which is not installed: pip install" in text
    assert "stages.warm.with.deepspeed: needs the package deepspeed, which is not installed: pip install" in text


def test_a_package_that_no_extra_installs_is_named_with_the_commands_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "is_installed", lambda package: package != "textarena")
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace("env: lookup", "env: {type: textarena, id: GuessTheNumber-v0}"))
    with pytest.raises(SpecError, match=r"needs the package textarena.*: pip install --no-deps textarena==0.7.4, then"):
        load(path)


def test_a_tokenizer_without_a_template_is_refused_when_the_file_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    path = write(tmp_path, f"path: {folder}")
    with pytest.raises(SpecError, match=r"stages\.warm\.with\.model\.path: its tokenizer has no chat_template"):
        load(path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "warm" in load(path).nodes


SELECTION = """
name: p
stages:
  chosen:
    uses: trajectories.select
    with: {version: 1, where: "%s", rules: [%s]}
"""


@pytest.mark.parametrize(
    ("where", "rule", "key", "message"),
    [
        ("succes", "", "where", "unable to find column \"succes\"; did you mean 'success'?"),
        ("success and", "", "where", "sql parser error"),
        ("success order by reward limit 3", "", "where", "sql parser error"),
        ("reward = 'x'", "", "where", "cannot compare string with numeric type"),
        ("trajectory_id in (select trajectory_id from step)", "", "where", "did you mean 'steps'?"),
        ("success", "{rule: filter, where: rewrd > 0}", "rules.0.where", "did you mean 'reward'?"),
        ("success", "{rule: filter, where: n_steps}", "rules.0.where", "must be of type `Boolean`"),
        ("success", "{rule: filter, where: 'lenth(prompt) > 3'}", "rules.0.where", "unsupported function 'lenth'"),
        ("success", "{rule: keep}, {rule: group, where: pas_rate > 0}", "rules.1.where", "did you mean 'pass_rate'?"),
        ("success", "{rule: balance, by: levl}", "rules.0.by", "did you mean 'level'?"),
        ("success", "{rule: cap, n: 3, per: messages}", "rules.0.per", "no scalar column 'messages'"),
    ],
)
def test_a_condition_that_cannot_be_judged_is_refused_when_the_file_is_read(
    tmp_path: Path, where: str, rule: str, key: str, message: str
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SELECTION % (where, rule))
    with pytest.raises(SpecError) as error:
        load(str(path))
    [problem] = error.value.problems
    assert f":6: stages.chosen.with.{key}: " in str(problem)
    assert message in str(problem)


def test_conditions_that_can_be_judged_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    where = "trajectory_id in (select trajectory_id from tool_calls where name = 'find') and env like 'l%'"
    rules = "{rule: group, where: n > 2 and pass_rate between 0.2 and 0.8}, {rule: balance, by: pipeline}"
    path.write_text(SELECTION % (where, rules))
    assert "chosen" in load(str(path)).nodes


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"AWS_ACCESS_KEY_ID": "a"}, "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not; export both"),
        ({"AWS_SECRET_ACCESS_KEY": "a"}, "AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID is not; export both"),
        ({"AWS_PROFILE": "team"}, 'profiles are not read, `eval "$(aws configure export-credentials'),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, None),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "r"}, None),
    ],
)
def test_what_credentials_lack_is_said(
    there: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", *credentials._ROLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    result = credentials.missing_credentials()
    assert result is None if message is None else message in (result or "")


def test_validate_checks_the_store_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path).replace("p.yaml", "q.yaml")
    Path(path).write_text("name: p\nstages: {a: {uses: tasks.generat}}\n")
    store = tmp_path / "store"
    store.write_text("")
    assert cli.call(["validate", path, "--store", str(store)]) == 2
    errors = capsys.readouterr().err
    assert "2 problems, nothing was run" in errors
    assert "did you mean 'tasks.generate'" in errors
    assert f"--store: store '{store}' cannot be used: {store} is a file" in errors
    good = tmp_path / "good.yaml"
    good.write_text("name: p\nstages: {a: {uses: tasks.generate, with: {env: lookup, train: 4, dev: 1, heldout: 1}}}\n")
    assert cli.call(["validate", str(good), "--store", str(store)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert cli.call(["validate", str(good), "--store", str(tmp_path / "new")]) == 0
    assert not (tmp_path / "new").exists()


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("")
    for path in (store, store / "below"):
        with pytest.raises(SpecError, match="is a file; give a folder"):
            make_plan(load(write(tmp_path)), Catalog(tmp_path), str(path))


def test_a_buffer_of_an_older_schema_is_refused_before_anything_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(Path(__file__).parents[1] / "datastore/old_store_version_2", store)
    with pytest.raises(SpecError, match=r"has schema_version 2, .*; run `agentrl buffer migrate` first"):
        make_plan(load(write(tmp_path)), Catalog(str(store)), str(store))
    migrate(TrajectoryBuffer(store))
    assert make_plan(load(write(tmp_path)), Catalog(str(store)), str(store)).to_run


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o500)
    with pytest.raises(SpecError, match="is not writable for this user"):
        make_plan(load(write(tmp_path)), Catalog(str(store)), str(store))


def test_a_store_that_cannot_be_written_is_told_from_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in (readiness.store_problem(str(tmp_path / "store"), write=True) or "")
    assert readiness.store_problem(str(tmp_path / "store"), write=False) is None
