"""Endpoints as policies: what they solve, what that took, and why they failed; pass@k with intervals and paired
tests."""

from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_server import JsonHandler, serving
from pydantic import ValidationError
from test_not_trained import row

from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.measures import FAILURES, failure
from agentrl.pipelines.results.arms import Arm
from agentrl.pipelines.results.measured import Measured
from agentrl.pipelines.results.passes import pass_differences
from agentrl.pipelines.stages.evaluate import EvaluateConfig, evaluate
from agentrl.pipelines.stages.tasks import generate
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall
from agentrl.statistics.intervals import wilson
from agentrl.statistics.paired import mcnemar, sign_flips
from agentrl.statistics.passes import pass_intervals


class Endpoint(ThreadingHTTPServer):
    """Answers every conversation with ``answer``; it counts 100 tokens of each prompt and 10 of each answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0


class Handler(JsonHandler):
    server: Endpoint

    def post(self, asked: dict[str, Any]) -> None:
        self.server.requests += 1
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if asked["messages"][-1]["role"] == "user":
            function = {"name": asked["tools"][0]["function"]["name"], "arguments": '{"nonsense": 1}'}
            calls = [{"id": "call_1", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        self.say({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    with serving(server):
        yield server


def test_an_endpoint_is_a_policy_with_tokens_cost_and_latency(endpoint: Endpoint, tmp_path_factory: Any) -> None:
    harness = Harness(tmp_path_factory.mktemp("endpoint"))
    tasks = harness.run(generate, {"env": "lookup", "train": 1, "dev": 1, "heldout": 3})["heldout"]
    engine = {
        "type": "openai",
        "model": "their-model",
        "base_url": f"http://127.0.0.1:{endpoint.server_port}/v1",
        "api_key": None,
        "price_prompt": 2.0,
        "price_completion": 10.0,
    }
    done = harness.run(evaluate, {"samples": 2, "max_turn_tokens": 50, "engine": engine}, tasks=tasks)
    assert endpoint.requests == 2 * (3 * 2 + 3), "a call and an answer for each rollout"
    overall = {result["decoding"]: result for result in done["results"].table().to_pylist() if result["level"] == -1}
    for each in overall.values():
        assert (each["policy"], each["success"]) == ("their-model", 0.0)
        assert (each["prompt_tokens"], each["completion_tokens"]) == (200, 20)
        assert each["cost_usd"] == pytest.approx((200 * 2 + 20 * 10) / 1e6)
        assert 0 <= each["latency_s"] < 5
        assert each["tokens"] == 220
        assert sum(each[name] for name in FAILURES) == pytest.approx(1 - each["success"])
        assert each["invalid_call"] == 1.0
    assert done.metrics["cost_usd"] == pytest.approx(0.0006)
    columns = ["prompt_tokens", "completion_tokens", "cost_usd", "tags", "policy"]
    [first, *_] = done["trajectories"].table(columns).to_pylist()
    assert (first["prompt_tokens"], first["completion_tokens"], first["policy"]) == (200, 20, "their-model")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "max_turn_tokens is not set, and an endpoint names no default"),
        (
            {"max_turn_tokens": 9, "compress": {"limit": 64}},
            "compress needs token ids, which engine openai does not give",
        ),
        (
            {"max_turn_tokens": 9, "search": {"oracle": True}},
            "search needs token ids, which engine openai does not give",
        ),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluateConfig(engine={"type": "openai", "model": "m"}, **more)


TOOLS = '[{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}]'


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({"success": True}, "{}", ""),
        ({"termination": Termination.MAX_STEPS}, "{}", "out_of_turns"),
        ({"termination": Termination.MAX_TOKENS}, "{}", "out_of_tokens"),
        ({"termination": Termination.MAX_CONTEXT}, "{}", "out_of_tokens"),
        ({"termination": Termination.TIME_LIMIT}, "{}", "out_of_time"),
        ({"termination": Termination.FORMAT_ERROR}, "{}", "invalid_call"),
        ({}, '{"nonsense": 1}', "invalid_call"),
        ({"n_tool_calls": 1, "n_tool_errors": 1}, '{"at": "x"}', "tool_error"),
        ({"n_tool_calls": 1, "n_tool_errors": 0}, '{"at": "x"}', "wrong_answer"),
        ({"messages": []}, "{}", "wrong_answer"),
    ],
)
def test_why_a_rollout_failed(changes: dict[str, Any], arguments: str, expected: str) -> None:
    call = Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id="1", name="look", arguments=arguments)])
    made = row("r", []).model_copy(update={"messages": [call], "tools": TOOLS, "success": False, "n_tool_calls": 1})
    made = made.model_copy(update={"termination": Termination.ANSWERED, **changes})
    assert failure(made) == expected


def test_rates_of_passes_have_intervals() -> None:
    result = pass_intervals([(4, 2), (4, 4), (4, 0)])
    for name in ("pass@1", "pass@2", "pass@4", "pass^2"):
        assert 0 <= result[f"low of {name}"] <= result[name] <= result[f"high of {name}"] <= 1
    assert result["low of pass@4"] < 2 / 3 < result["high of pass@4"]
    assert (result["low of pass@4"], result["high of pass@4"]) == pytest.approx(wilson(2, 3), abs=0.05)
    none = pass_intervals([(4, 0)] * 5)
    assert (none["low of pass@4"], none["high of pass@4"]) == wilson(0, 5), "no interval of width 0"


@given(st.integers(0, 6), st.integers(0, 6))
def test_sign_flips_of_whole_tasks_are_mcnemars_test(gained: int, lost: int) -> None:
    assert sign_flips([1.0] * gained + [-1.0] * lost + [0.0]) == pytest.approx(mcnemar(gained, lost))


def test_sign_flips_by_hand_and_of_many_tasks() -> None:
    changes = [0.5, 0.25, -0.125, 0.75]
    sums = [abs(sum(s * c for s, c in zip(signs, changes, strict=True))) for signs in product((1, -1), repeat=4)]
    assert sign_flips(changes) == sum(total >= sum(changes) - 1e-9 for total in sums) / 16
    assert sign_flips([0.5] * 30) < 0.001
    assert sign_flips([0.5, -0.5] * 15) > 0.9


def test_arms_are_compared_in_pass_at_k() -> None:
    def arm(successes: list[int]) -> Arm:
        counts = {("e", f"t{n}", "?"): (4, each) for n, each in enumerate(successes)}
        outcomes = {task: solved / 4 for task, (_, solved) in counts.items()}
        return Arm((Measured(None, "p", outcomes, {}, 0, counts),), ())  # type: ignore[arg-type]

    two, four = pass_differences(arm([1] * 8), arm([0] * 8))
    assert (two.k, two.mean, four.k, four.mean) == (2, pytest.approx(0.5), 4, 1.0)
    assert four.p == pytest.approx(mcnemar(8, 0))
    assert str(four) == "pass@4: +100.0 points (95 % interval +100.0 to +100.0), paired randomization test p = 0.0078"
    same, _ = pass_differences(arm([2, 1, 0]), arm([2, 1, 0]))
    assert (same.mean, same.p) == (0.0, 1.0)
    assert two.columns() == {
        "pass@2": two.mean,
        "low of pass@2": two.low,
        "high of pass@2": two.high,
        "p of pass@2": two.p,
    }


@pytest.mark.parametrize(
    ("inputs", "engine", "message"),
    [
        ("", "transformers", "stages.eval.inputs: engine transformers samples from a model; wire inputs.model, or set"),
        (
            "model: warm, ",
            "{type: openai, model: m}",
            "engine openai samples from its own model; leave inputs.model out",
        ),
        ("", "{type: openai, model: m}", ""),
        ("model: warm, ", "transformers", ""),
    ],
)
def test_a_model_or_an_endpoint_is_asked_for_when_the_file_is_read(
    inputs: str, engine: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text(
        "name: p\nstages:\n  tasks: {uses: tasks.generate, with: {env: lookup, train: 4, heldout: 4}}\n"
        "  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}\n"
        "  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}}}\n"
        f"  eval: {{uses: evaluate.policy, inputs: {{{inputs}tasks: tasks.heldout}}, "
        f"with: {{engine: {engine}, max_turn_tokens: 9}}}}\n"
    )
    if not message:
        assert load(str(tmp_path / "p.yaml")).nodes["eval"].stage.name == "evaluate.policy"
        return
    with pytest.raises(SpecError, match=message):
        load(str(tmp_path / "p.yaml"))
