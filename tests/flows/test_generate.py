"""``agentrl generate``: one episode of an artifact's model, at a task or as a conversation."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows import cli
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.run.execute import job_of, perform

PIPELINE = """
name: small
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 12, dev: 0, heldout: 2}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {init: tiny}, steps: 2, batch: 8, optimizer: {lr: 5.0e-3}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return store_with_a_model(tmp_path_factory.mktemp("generate"))


def store_with_a_model(folder: Path) -> str:
    """A store whose stage ``warm`` is a tiny model."""
    (folder / "small.yaml").write_text(PIPELINE)
    position = str(folder / "store")
    plan = make_plan(load(str(folder / "small.yaml")), Catalog(position), position)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    return position


def test_an_episode_at_a_task_is_scored_and_shown_with_its_tokens(store: str, capsys: Any) -> None:
    task = next(iter(tasks(store)))
    arguments = ["generate", "--model", "warm", "--task", task, "--store", store, "--max-turn-tokens", "12"]
    assert cli.call([*arguments, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["task_id"], row["env"], row["policy"]) == (task, "lookup", "warm")
    assert row["reward"] is not None
    assert len(row["input_ids"]) == len(row["logprobs"]) > 12
    assert cli.call(arguments) == 0
    shown = capsys.readouterr().out
    assert row["prompt"] in shown
    sampled = [token for token, inside in zip(row["input_ids"], row["action_mask"], strict=True) if inside]
    assert all(str(token) in shown for token in sampled)


def test_a_model_folder_answers_a_prompt(store: str, capsys: Any) -> None:
    [folder] = Path(store).glob("artifacts/warm/*/**/model")
    arguments = ["generate", "--model", str(folder), "--prompt", "city of Ann?", "--store", store, "--json"]
    assert cli.call([*arguments, "--max-turn-tokens", "5", "--temperature", "0"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["reward"] is None


def test_without_task_and_prompt_it_talks_until_the_end_of_input(
    store: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand?\n"))
    code = cli.call(["generate", "--model", "warm", "--store", store, "--max-turn-tokens", "3", "--json"])
    shown = capsys.readouterr()
    row = json.loads(shown.out)
    assert code == 0
    assert next(m["content"] for m in row["messages"] if m["role"] == "user") == "hello"
    ended = {m["role"] for m in row["messages"][-1:]}
    assert ended == {"assistant"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "warn", "--prompt", "x"], "there is no artifact or tag 'warn'; did you mean 'warm'"),
        (["--model", "expert", "--prompt", "x"], "expert has no model; its outputs: trajectories"),
        (["--model", "warm", "--task", "lookup-trian-0001"], "there is no task 'lookup-trian-0001' in this store"),
        (["--model", "warm", "--task", "a", "--prompt", "b"], "give one of them, not both"),
    ],
)
def test_what_is_wrong_is_named(store: str, arguments: list[str], message: str, capsys: Any) -> None:
    assert cli.call(["generate", *arguments, "--store", store]) == 2
    assert message in capsys.readouterr().err


def tasks(store: str) -> list[str]:
    import pyarrow.parquet as pq

    [path] = Path(store).glob("artifacts/tasks/*/**/train.parquet")
    return pq.read_table(path)["task_id"].to_pylist()
