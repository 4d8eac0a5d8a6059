"""The control for sharpening: the temperature that is best on dev tasks, measured on the others."""

import json
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from json_server import JsonHandler, serving

from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.parts.control import TEMPERATURES, TriedTemperature, best
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.pipelines.stages.tasks import generate

DEV, HELDOUT = 8, 10


class TemperedEndpoint(ThreadingHTTPServer):
    """Solves as many tasks of each list as ``shares`` says of the temperature, the first ones."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TemperedHandler)
        self.asked: list[float] = []
        self.shares: dict[float, float] = {}
        self.known: dict[str, tuple[float, str]] = {}

    def know(self, tasks: Tasks) -> None:
        rows = tasks.read()
        for position, task in enumerate(rows):
            self.known[task.prompt] = (position / len(rows), json.loads(task.ground_truth))


class TemperedHandler(JsonHandler):
    server: TemperedEndpoint

    def post(self, asked: dict[str, Any]) -> None:
        self.server.asked.append(asked["temperature"])
        text = " ".join(str(message["content"]) for message in asked["messages"])
        position, answer = next(known for prompt, known in self.server.known.items() if prompt in text)
        solved = position < self.server.shares[asked["temperature"]]
        message = {"role": "assistant", "content": answer if solved else "no idea"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        self.say({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def endpoint() -> Iterator[TemperedEndpoint]:
    server = TemperedEndpoint()
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Harness, Result]:
    harness = Harness(tmp_path_factory.mktemp("control"))
    return harness, harness.run(generate, {"env": "lookup", "train": 1, "dev": DEV, "heldout": HELDOUT})


def measured(made: tuple[Harness, Result], endpoint: TemperedEndpoint, samples: int = 1, dev: str = "dev") -> Result:
    harness, tasks = made
    endpoint.know(tasks["dev"])
    endpoint.know(tasks["heldout"])
    address = f"http://127.0.0.1:{endpoint.server_port}/v1"
    engine = {"type": "openai", "model": "theirs", "base_url": address, "api_key": None}
    config = {"samples": samples, "max_turn_tokens": 50, "engine": engine}
    return harness.run(evaluate, config, tasks=tasks["heldout"], dev=tasks[dev])


def overall(done: Result, decoding: str) -> list[dict[str, Any]]:
    rows = done["results"].table().to_pylist()
    return [row for row in rows if (row["decoding"], row["level"]) == (decoding, -1)]


def test_the_best_temperature_on_dev_is_measured_on_the_tasks(
    made: tuple[Harness, Result], endpoint: TemperedEndpoint
) -> None:
    endpoint.shares = {0.0: 0.5, 0.3: 1.0, 0.6: 0.25, 1.0: 0.2}
    done = measured(made, endpoint, samples=2)
    tried = [(row["temperature"], row["successes"], row["tasks"], row["split"]) for row in overall(done, "dev")]
    assert tried == [(0.0, 4, DEV, "dev"), (0.3, 8, DEV, "dev"), (0.6, 2, DEV, "dev"), (1.0, 2, DEV, "dev")]
    [control] = overall(done, "control")
    assert (control["temperature"], control["success"], control["attempts"]) == (0.3, 1.0, 2 * HELDOUT)
    assert (control["split"], control["policy"]) == ("heldout", "theirs")
    assert [(row["temperature"], row["success"]) for row in overall(done, "sampled")] == [(1.0, 0.2)]
    assert [(row["temperature"], row["success"]) for row in overall(done, "greedy")] == [(0.0, 0.5)]
    assert (done.metrics["success"], done.metrics["greedy"], done.metrics["control"]) == (0.2, 0.5, 1.0)
    assert done.metrics["control_temperature"] == 0.3
    assert done.metrics["control_low"] < 1.0

    rows: Trajectories = done["trajectories"]
    told = rows.table(["tags", "split", "sampling"]).to_pylist()
    drawn = Counter((*row["tags"][:1], json.loads(row["sampling"])["temperature"], row["split"]) for row in told)
    assert drawn == {("sampled", 1.0, "heldout"): 20, ("greedy", 0.0, "heldout"): 10, ("control", 0.3, "heldout"): 20}
    kept = made[0].buffer.scan().filter(stage=rows.stage, split="dev").collect()
    assert [tags[:2] for tags in kept["tags"].to_list()] == [["control", "dev"]] * len(TEMPERATURES) * DEV, (
        "with their tags"
    )


@pytest.mark.parametrize(("temperature", "decoding"), [(0.0, "greedy"), (1.0, "sampled")])
def test_the_usual_attempts_are_used_again_if_their_temperature_is_best(
    made: tuple[Harness, Result], endpoint: TemperedEndpoint, temperature: float, decoding: str
) -> None:
    endpoint.shares = dict.fromkeys(TEMPERATURES, 0.5) | {temperature: 0.75}
    done = measured(made, endpoint)
    [control], [same] = overall(done, "control"), overall(done, decoding)
    assert control == same | {"decoding": "control"}
    assert Counter(endpoint.asked) == dict.fromkeys(TEMPERATURES, DEV) | {0.0: DEV + HELDOUT, 1.0: DEV + HELDOUT}
    assert len(done["trajectories"].ids()) == 2 * HELDOUT


@pytest.mark.parametrize(("temperature", "episodes"), [(0.3, 3 * HELDOUT), (0.0, 2 * HELDOUT)])
def test_progress_is_that_of_all_rounds(
    made: tuple[Harness, Result],
    endpoint: TemperedEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    episodes: int,
) -> None:
    told, context_of = list[tuple[int, int | None]](), made[0]._context

    def with_progress(stage: str) -> Any:
        context = context_of(stage)
        context.progress = lambda done, total=None, **metrics: told.append((done, total))
        return context

    monkeypatch.setattr(made[0], "_context", with_progress)
    monkeypatch.setattr("agentrl.rollouts.progress._REPORT_S", 0.0)
    endpoint.shares = dict.fromkeys(TEMPERATURES, 0.5) | {temperature: 1.0}
    measured(made, endpoint)
    whole = episodes + len(TEMPERATURES) * DEV
    assert [done for done, _ in told] == list(range(1, whole + 1))
    assert told[0] == (1, 2 * HELDOUT + len(TEMPERATURES) * DEV), "a control is counted once it is known"
    assert told[-1] == (whole, whole)


def test_of_equal_temperatures_the_lowest_is_chosen() -> None:
    assert (
        best(
            [
                TriedTemperature(0.0, 8, 3),
                TriedTemperature(0.3, 8, 5),
                TriedTemperature(0.6, 8, 5),
                TriedTemperature(1.0, 8, 4),
            ]
        )
        == 0.3
    )
    assert best([TriedTemperature(0.0, 4, 2), TriedTemperature(0.3, 8, 5)]) == 0.3, (
        "shares, not counts: some episodes may have no score"
    )


def test_a_temperature_is_not_chosen_on_what_it_is_measured_on(
    made: tuple[Harness, Result], endpoint: TemperedEndpoint
) -> None:
    with pytest.raises(ValueError, match=r"dev and tasks share 10 tasks, such as .*; wire other tasks to inputs\.dev"):
        measured(made, endpoint, dev="heldout")
    with pytest.raises(ValueError, match="dev holds no task to choose a temperature on"):
        measured(made, endpoint, dev="compositional")
    assert not endpoint.asked, "nothing was sampled"


def test_without_dev_tasks_no_control_is_measured(made: tuple[Harness, Result], endpoint: TemperedEndpoint) -> None:
    harness, tasks = made
    endpoint.shares = {0.0: 0.5, 1.0: 0.5}
    endpoint.know(tasks["heldout"])
    address = f"http://127.0.0.1:{endpoint.server_port}/v1"
    engine = {"type": "openai", "model": "theirs", "base_url": address, "api_key": None}
    done = harness.run(evaluate, {"max_turn_tokens": 50, "engine": engine}, tasks=tasks["heldout"])
    assert not overall(done, "control")
    assert "control" not in done.metrics
