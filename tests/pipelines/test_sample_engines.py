"""Stages that sample: with each schedule, in several environments, from an endpoint; what of it a fingerprint holds."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import lookup_tasks, qwen
from faulty_shop import task
from json_server import serving
from test_engine_openai import Endpoint

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.engines.base import EngineError
from agentrl.pipelines.file.load import load
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.stages.trajectories import sample
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Termination

LIMITS = {"max_turn_tokens": 12, "max_tokens": 120}
SHOP, BROKEN = "faulty_shop:Shop", "faulty_shop:Broken"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("TEACHER_KEY", "key")
    server = Endpoint()
    with serving(server):
        yield server


def asking(endpoint: Endpoint, **settings: Any) -> dict[str, Any]:
    """A stage's config: an engine of the endpoint with these settings, one sample, one episode at a time."""
    engine = {"type": "openai", "model": "teacher", "base_url": endpoint.url, "api_key": "${TEACHER_KEY}", **settings}
    return {"samples": 1, "sampling": {"max_turn_tokens": 50}, "limits": {"in_flight": 1}, "engine": engine}


@pytest.mark.parametrize("schedule", ["exact", "free"])
def test_each_schedule_makes_every_row_once_in_groups(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, policy, told = Harness(tmp_path), qwen(), list[tuple[int, int]]()
    of_stage = harness._context
    listening = {"progress": lambda done, total, **_: told.append((done, total))}
    monkeypatch.setattr(harness, "_context", lambda name: replace(of_stage(name), **listening))
    config = {
        "samples": 3,
        "shard_tasks": 2,
        "sampling": LIMITS,
        "engine": {"type": "transformers", "schedule": schedule},
    }
    made = harness.run(sample, config, model=harness.model(policy.save), tasks=harness.tasks(lookup_tasks(5)))
    rows = made["trajectories"].read()
    assert len({row.trajectory_id for row in rows}) == 15
    assert {(row.task_id, row.sample_index) for row in rows} == {
        (t.task_id, n) for t in lookup_tasks(5) for n in range(3)
    }
    assert len({row.group_id for row in rows}) == 5
    assert all(row.spans[0].version == 0 for row in rows)
    assert told[-1] == (15, 15)
    assert {total for _, total in told} == {15}, "shards are told of together"
    assert made.metrics["rows"] == 15
    assert made.metrics["dialect"] == "hermes"
    assert made.metrics["dialect_source"] == "codec: the chat template writes what it reads"
    if schedule == "exact":
        again = harness.run(sample, config, model=harness.model(policy.save), tasks=harness.tasks(lookup_tasks(5)))
        assert [row.input_ids for row in again["trajectories"].read()] == [row.input_ids for row in rows]


def test_one_stage_acts_in_several_environments_and_counts_what_fails(tmp_path: Path) -> None:
    harness, policy = Harness(tmp_path), qwen()
    tasks: list[Task] = [task("price?", SHOP, 0), task("reset", BROKEN, 1), task("score", BROKEN, 2), *lookup_tasks(2)]
    config = {"samples": 2, "sampling": LIMITS, "limits": {"tool_s": 5.0}}
    made = harness.run(sample, config, model=harness.model(policy.save), tasks=harness.tasks(tasks))
    rows = made["trajectories"].read()
    assert {row.env for row in rows} == {SHOP, BROKEN, "lookup"}
    assert (
        made.metrics["env_errors"]
        == made.metrics["unscored"]
        == 2 + sum(row.termination is Termination.ENV_ERROR and row.prompt == "score" for row in rows)
    )
    assert all(row.reward is not None for row in rows if row.env in (SHOP, "lookup"))


def test_an_endpoint_needs_no_model_and_a_model_no_endpoint(tmp_path: Path, endpoint: Endpoint) -> None:
    config = asking(endpoint) | {"samples": 2}
    harness = Harness(tmp_path)
    tasks = harness.tasks([task("2 figs?", SHOP, number) for number in range(3)])
    made = harness.run(sample, config, tasks=tasks)
    rows = made["trajectories"].read()
    assert {(row.policy, row.success, row.n_tokens) for row in rows} == {("teacher", True, 0)}
    assert made.metrics["dialect_source"] == "endpoint: it is sent messages"
    with pytest.raises(ValueError, match=r"engine openai samples from its own model; leave inputs.model out"):
        harness.run(sample, config, tasks=tasks, model=harness.model(qwen().save))
    with pytest.raises(ValueError, match=r"engine transformers samples from a model; wire inputs.model"):
        harness.run(sample, {"sampling": LIMITS}, tasks=tasks)
    del config["sampling"]["max_turn_tokens"]
    with pytest.raises(ValueError, match="an endpoint names no default: set it"):
        harness.run(sample, config, tasks=tasks)


def test_rows_of_requests_that_failed_are_made_again_on_a_resume(tmp_path: Path, endpoint: Endpoint) -> None:
    """In the first run a request is refused (400) in a shard that is appended; a key that is refused (401) ends it."""
    config = asking(endpoint, retries=0) | {"shard_tasks": 2}
    harness = Harness(tmp_path)
    tasks = harness.tasks([task(f"{number} figs?", SHOP, number) for number in range(4)])
    context = harness._context(sample.name)
    checked = sample.config.model_validate(config)
    endpoint.plan = ["", "", "filtered", "refused"]  # two turns of the first task, then the second and the third
    with pytest.raises(EngineError, match="401"):
        sample(context, checked, tasks=tasks)
    assert len(context.row_ids()) == 1, "the row of the refused request is not there"
    before = len(endpoint.requests)
    made = sample(context, checked, tasks=tasks)
    rows = made["trajectories"].read()  # type: ignore[attr-defined]
    assert [row.termination for row in rows] == [Termination.ANSWERED] * 4
    assert len(endpoint.requests) - before == 3 * 2, "the row that was there is not made again"


def test_rows_of_requests_that_failed_are_kept_if_the_run_goes_on(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.plan = ["filtered"]
    config = asking(endpoint, retries=0) | {"shard_tasks": 1}
    harness = Harness(tmp_path)
    made = harness.run(sample, config, tasks=harness.tasks([task(f"{n} figs?", SHOP, n) for n in range(2)]))
    ends = [row.termination for row in made["trajectories"].read()]
    assert ends == [Termination.INFRA_ERROR, Termination.ANSWERED]
    assert made.metrics["unscored"] == 1


PIPELINE = """
name: p
stages:
  tasks: {{uses: tasks.generate, with: {{env: lookup, train: 4, dev: 0, heldout: 0}}}}
  expert: {{uses: trajectories.synthesize, inputs: {{tasks: tasks.train}}}}
  warm: {{uses: train.sft, inputs: {{trajectories: expert}}, with: {{model: {{init: tiny}}}}}}
  teacher:
    uses: trajectories.sample
    inputs: {{tasks: tasks.train{model}}}
    with: {{sampling: {{max_turn_tokens: 9}}, engine: {engine}}}
"""


def planned(folder: Path, engine: str) -> Any:
    file = folder / "p.yaml"
    model = "" if "openai" in engine else ", model: warm"  # an endpoint samples from its own
    file.write_text(PIPELINE.format(engine=engine, model=model))
    plan = make_plan(load(str(file)), Catalog(str(folder / "store")), str(folder / "store"))
    return plan.steps["teacher"].ingredients


def test_the_choice_of_an_engine_is_in_the_fingerprint_and_its_place_is_not(tmp_path: Path) -> None:
    plan = planned(tmp_path, "{type: openai, model: a, base_url: 'http://x/v1', concurrency: 3, cache: here}")
    same = planned(tmp_path, "{type: openai, model: a, base_url: 'http://y/v1', requests_per_minute: 5}")
    other = planned(tmp_path, "{type: openai, model: b, base_url: 'http://x/v1'}")
    embedded = planned(tmp_path, "{type: transformers}")
    assert plan == same
    assert plan != other
    assert "agentrl/engines/openai.py" in plan.code
    assert "agentrl/engines/transformers.py" not in plan.code
    assert "agentrl/engines/transformers.py" in embedded.code
    assert "agentrl/engines/openai.py" not in embedded.code
    assert embedded != planned(tmp_path, "{type: transformers, schedule: free}")


def test_vllm_is_one_engine_wherever_it_runs(tmp_path: Path) -> None:
    servers = planned(tmp_path, "{type: vllm, python: /opt/vllm/bin/python, servers: 2}")
    assert servers == planned(tmp_path, "{type: vllm, in_process: true}")
    assert servers != planned(tmp_path, "{type: vllm, in_process: true, dtype: float32}")
    assert {"agentrl/engines/servers.py", "agentrl/engines/in_process.py"} <= set(servers.code)
    with pytest.raises(ValueError, match="in_process starts no server, so servers would do nothing"):
        planned(tmp_path, "{type: vllm, in_process: true, servers: 2}")
