"""Users whom a model plays: behind an endpoint in a process of its own, and by the embedded engine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from scripted_engine import play

from agentrl.engines.base import EngineError
from agentrl.environments import ENVIRONMENT, load_environment
from agentrl.environments.service.customer import ChangeRequest
from agentrl.environments.service.environment import Service
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination

SERVER = Path(__file__).parents[1] / "customer_server.py"


@pytest.fixture(scope="module", params=[[], ["refuse"]], ids=["agrees", "refuses"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], bool]]:
    """The engine of a served customer, and whether he confirms changes."""
    process = subprocess.Popen([sys.executable, str(SERVER), *request.param], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    yield {"type": "openai", "model": "customer", "base_url": url, "api_key": None, "retries": 0}, not request.param
    process.kill()
    process.wait()


def service(engine: dict[str, Any], **customer: Any) -> Service:
    settings = {"type": "service", "customer": {"engine": engine, **customer}}
    made = load_environment(str(ENVIRONMENT.read(settings)))
    assert isinstance(made, Service)
    return made


def tasks(environment: Service) -> list[Task]:
    result = environment.tasks({"train": 40}, 0)["train"]
    assert [task.task_id for task in result] == [task.task_id for task in Service().tasks({"train": 40}, 0)["train"]]
    return [next(task for task in result if task.level == level) for level in range(1, 6)]


def test_the_expert_serves_a_customer_whom_a_model_plays(endpoint: tuple[dict[str, Any], bool]) -> None:
    engine, agrees = endpoint
    environment = service(engine)
    for task in tasks(environment):
        row = demonstrate(environment, task, 0.0, 0, "t")
        texts = [message.content for message in row.messages if message.role is Role.USER]
        email = json.loads(task.metadata)["email"]
        assert f"Sure: {email}" in texts, "these are the words of the model"
        requests = [ChangeRequest(**request) for request in json.loads(task.metadata)["requests"]]
        changes = any(goal.order for goal in environment.goals(requests))
        assert row.success == (agrees or not changes), (task.level, texts)
        if changes and not agrees:
            assert "No, not that." in texts


def test_a_request_that_fails_ends_its_episode_as_infra_error(endpoint: tuple[dict[str, Any], bool]) -> None:
    environment = service({**endpoint[0], "model": "broken"})
    task = tasks(environment)[0]
    with pytest.raises(EngineError, match=r"the last ended by infra_error: .*too long"):
        play(environment, task, "May I have your email address?")


def test_a_customer_whom_the_embedded_engine_plays(tmp_path: Path) -> None:
    [task] = Service().tasks({"train": 1}, 0)["train"]
    policy = tiny_policy([[Message(role=Role.USER, content=task.prompt)]], 0)
    policy.save(tmp_path / "customer")
    environment = service({"type": "transformers"}, model=str(tmp_path / "customer"), max_tokens=8)
    texts = ["May I have your email address?", "Which order is it?", "Do you confirm?"]
    rows, again = (play(environment, task, *texts, number=2) for _ in range(2))
    assert [row.messages for row in rows] == [row.messages for row in again], "equal seeds, equal conversations"
    for row in rows:
        assert (row.termination, row.n_steps, row.success) == (Termination.MAX_STEPS, environment.max_steps, False)
        heard = [message.content for message in row.messages if message.role is Role.USER]
        assert len(heard) == environment.max_steps + 1
        assert {*heard[1:]} != {"..."}, "a model that knows nothing yet says something"


def test_a_user_has_one_model() -> None:
    with pytest.raises(ValidationError, match="set model, the folder of the user's"):
        ENVIRONMENT.read({"type": "service", "customer": {"engine": {"type": "transformers"}}})
    engine = {"type": "openai", "model": "x"}
    with pytest.raises(ValidationError, match="leave model out"):
        ENVIRONMENT.read({"type": "service", "customer": {"engine": engine, "model": "folder"}})
    assert not service({"type": "openai", "model": "x"}).replayable
