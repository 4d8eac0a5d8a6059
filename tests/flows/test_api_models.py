"""The Python interface to models: tried, served, compared, and their pipelines' state and schedule."""

from pathlib import Path

import openai
import pytest
from test_generate import store_with_a_model

import agentrl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    store_with_a_model(folder)
    return folder


@pytest.fixture
def store(folder: Path) -> agentrl.Store:
    return agentrl.Store(folder / "store")


def test_a_model_is_tried_at_a_task_or_a_prompt(store: agentrl.Store) -> None:
    task = store.stage("tasks").frame("heldout")["task_id"].item(0)
    row = store.generate("warm", task=task, max_turn_tokens=8)
    assert (row.task_id, row.env, row.policy) == (task, "lookup", "warm")
    assert store.generate("warm", prompt="city of Ann?", max_turn_tokens=8).prompt == "city of Ann?"
    with pytest.raises(ValueError, match="task and prompt: give one of them"):
        store.generate("warm")
    with pytest.raises(LookupError, match="there is no task 'none'"):
        store.generate("warm", task="none")
    with pytest.raises(LookupError, match=r"tasks has no model; its outputs: .*Name a stage that trains"):
        store.generate("tasks", prompt="hello")


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_is_served_and_what_it_does_is_kept(store: agentrl.Store) -> None:
    server = store.serve("warm", max_turn_tokens=8, idle_s=60)
    try:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        asked = [{"role": "user", "content": "city of Ann?"}]
        client.chat.completions.create(model=server.model, messages=asked)  # type: ignore[call-overload]
    finally:
        server.close()
    assert server.process.returncode == 0
    assert list((Path(store.path) / "recordings").rglob("*"))  # its episode is open, until it is scored or idle
    with pytest.raises(RuntimeError, match=r"agentrl serve did not start: .*no artifact"):
        store.serve("wurm")


def test_a_dialect_is_proved(store: agentrl.Store) -> None:
    assert store.dialect("warm")["verdict"].null_count() == 0
    with pytest.raises(LookupError, match="expert has no model"):
        store.dialect("expert")


def test_the_state_of_a_pipeline_is_a_frame(folder: Path, store: agentrl.Store) -> None:
    pipeline = agentrl.load(folder / "small.yaml", set={"stages.warm.with.steps": 3}, store=store)
    status = pipeline.status()
    assert status["state"].to_list() == ["cached", "cached", "out of date"]
    assert "steps" in status["metrics or reason"].to_list()[-1]
    assert status["since"].null_count() == 1


def test_a_schedule_needs_a_file_and_a_server(
    folder: Path, store: agentrl.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    pipeline = agentrl.load(folder / "small.yaml", store=store)
    with pytest.raises(ValueError, match="schedules need a Prefect server"):
        pipeline.schedule("0 2 * * *")
    written = agentrl.Pipeline.of(pipeline.spec, folder=folder, store=store)
    with pytest.raises(ValueError, match=r"has no file that a worker could read; save\(\) it"):
        written.schedule("0 2 * * *")


def test_results_are_compared_by_what_they_are(store: agentrl.Store, tmp_path: Path) -> None:
    rollouts = store.stage("expert")
    by_result = agentrl.compare(rollouts, "expert")
    assert by_result.to_json() == store.compare(f"expert/{rollouts.fingerprint}", "expert").to_json()
    with pytest.raises(ValueError, match="results of several stores cannot be compared"):
        agentrl.compare(rollouts, store=tmp_path / "other")
