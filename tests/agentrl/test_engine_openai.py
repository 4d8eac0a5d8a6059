"""The openai engine against a real server on loopback that misbehaves."""

import itertools
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from faulty_shop import Shop, task
from json_server import JsonHandler, serving

from agentrl.engines.base import EngineError, Sampling
from agentrl.engines.configs import OpenAIConfig
from agentrl.engines.openai import OpenAIEngine
from agentrl.rollouts.limits import DEFAULT_LIMITS, Limits, Retry
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.trajectory import Role, Termination, Trajectory

SAMPLING = Sampling(max_turn_tokens=50, max_tokens=1000)
ONCE = Retry(attempts=1)


class Endpoint(ThreadingHTTPServer):
    """Answers as ``plan`` says, one entry per request, and then well. It keeps requests and when they came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(JsonHandler):
    server: Endpoint

    def post(self, asked: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            self.server.requests.append(asked)
            self.server.times.append(time.monotonic())
            fault = self.server.plan.pop(0) if self.server.plan else ""
        time.sleep(0.02)
        getattr(self, f"_{fault}" if fault else "_well")(asked)
        with self.server.lock:
            self.server.at_once -= 1

    def _well(self, request: dict[str, Any]) -> None:
        last = request["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if last["role"] == "user":
            function = {"name": "price", "arguments": '{"item": "fig"}'}
            calls = [{"id": "call_7", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        self.say({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})

    def _busy(self, request: dict[str, Any]) -> None:
        self.say({"error": {"message": "slow down"}}, 429, {"Retry-After": "0.6"})

    def _broken(self, request: dict[str, Any]) -> None:
        self.say({"error": {"message": "oops"}}, 500)

    def _overloaded(self, request: dict[str, Any]) -> None:
        self.say({"error": {"message": "overloaded"}}, 529)

    def _refused(self, request: dict[str, Any]) -> None:
        self.say({"error": {"message": "no such key"}}, 401)

    def _filtered(self, request: dict[str, Any]) -> None:
        self.say({"error": {"message": "the prompt was refused", "code": "content_filter"}}, 400)

    def _garbage(self, request: dict[str, Any]) -> None:
        self.send(b"<html>we moved</html>")

    def _empty(self, request: dict[str, Any]) -> None:
        self.say({"choices": []})

    def _half(self, request: dict[str, Any]) -> None:
        self.send(b'{"choices": [{"index": 0, "mess', length=5000)

    def _gone(self, request: dict[str, Any]) -> None:
        self.close_connection = True

    def _hang(self, request: dict[str, Any]) -> None:
        time.sleep(3)
        self._well(request)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    with serving(server):
        yield server


def play(
    endpoint: Endpoint, number: int = 1, limits: Limits = DEFAULT_LIMITS, sampling: Sampling = SAMPLING, **settings: Any
) -> tuple[list[Trajectory], Any]:
    engine = OpenAIEngine(OpenAIConfig(model="teacher", base_url=endpoint.url, **settings), "key")
    runner = RolloutRunner(None, engine, Shop(), sampling, limits=limits)
    attempts = [Attempt(task("2 figs?", number=n)) for n in range(number)]
    return runner.run(attempts, 0, [f"r-{n}" for n in range(number)]), engine.spent


def test_a_row_is_text_with_its_tool_calls_and_no_ids(endpoint: Endpoint) -> None:
    [row], spent = play(endpoint)
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert [message.content for message in row.messages if message.role is Role.TOOL] == ["3"]
    assert (row.success, row.policy, row.n_steps, row.n_tool_calls) == (True, "teacher", 2, 1)
    assert (row.input_ids, row.logprobs, row.spans, row.tokenizer) == ([], [], [], "")
    first, second = endpoint.requests
    assert first["tools"][0]["function"]["name"] == "price"
    assert (first["max_completion_tokens"], first["temperature"]) == (50, 1.0)
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"] == "call_7"
    assert (spent.requests, spent.prompt_tokens, spent.completion_tokens) == (2, 200, 20)
    user, asked, priced, answered = row.message_seconds or []
    assert (user, row.tags) == (None, [f"latency_s:{(asked or 0) + (answered or 0):.2f}"])
    assert all(known is not None and known > 0 for known in (asked, priced, answered))


@pytest.mark.parametrize("fault", ["busy", "broken", "garbage", "empty", "half", "gone"])
def test_what_passes_is_asked_again(endpoint: Endpoint, fault: str) -> None:
    endpoint.plan = [fault]
    [row], spent = play(endpoint)
    assert row.success
    assert (spent.requests, spent.retries, len(endpoint.requests)) == (2, 1, 3)
    if fault == "busy":
        assert endpoint.times[1] - endpoint.times[0] >= 0.6, "as Retry-After says"


def test_what_does_not_pass_names_the_endpoint_and_the_next_step(endpoint: Endpoint) -> None:
    endpoint.plan = ["refused"]
    with pytest.raises(EngineError, match=r"teacher at http://127.*no such key"):
        play(endpoint)
    assert len(endpoint.requests) == 1
    endpoint.plan = ["broken"] * 9
    with pytest.raises(EngineError, match=r"oops.*set with.engine.retries higher"):
        play(endpoint, retries=1)


def test_a_request_that_alone_fails_ends_its_own_episode(endpoint: Endpoint) -> None:
    endpoint.plan = ["filtered", "broken", "broken"]
    rows, _ = play(endpoint, 6, limits=Limits(in_flight=1, retry=ONCE), retries=1)
    lost = [row for row in rows if row.termination is Termination.INFRA_ERROR]
    assert len(lost) == 2
    assert {(row.reward, row.success) for row in lost} == {(None, None)}
    assert (
        sorted(row.tags[-1].partition(" - ")[0].rpartition(" at ")[0] for row in lost) == ["infra_error: teacher"] * 2
    )
    assert sum("the prompt was refused" in row.tags[-1] for row in lost) == 1
    assert all(row.success for row in rows if row not in lost)


def test_an_endpoint_that_refuses_one_after_the_other_ends_the_stage(endpoint: Endpoint) -> None:
    endpoint.plan = [""] * 4 + ["filtered"] * 100
    with pytest.raises(EngineError, match=r"^8 requests failed one after the other; the last: teacher.*was refused"):
        play(endpoint, 50, limits=Limits(in_flight=1))
    assert len(endpoint.requests) == 12
    endpoint.plan = ["filtered"] * 3
    with pytest.raises(EngineError, match=r"no episode could be sampled; the last ended by infra_error.*was refused"):
        play(endpoint, 3)


def test_a_server_that_asks_for_no_key_needs_none(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(LookupError, match=r"OPENAI_API_KEY is not set; export it, name another in engine.api_key"):
        OpenAIConfig(model="teacher", base_url=endpoint.url).build(None)
    engine = OpenAIConfig(model="teacher", base_url=endpoint.url, api_key=None).build(None)
    [row] = RolloutRunner(None, engine, Shop(), SAMPLING).run([Attempt(task("2 figs?"))], 0, ["r"])
    assert row.success


def test_a_turn_that_takes_too_long_is_cut(endpoint: Endpoint) -> None:
    """The endpoint said nothing, which is no doing of the policy; an episode that is out of time is."""
    endpoint.plan = ["hang"]
    row, fine = play(endpoint, 2, limits=Limits(in_flight=1, turn_s=0.4, retry=ONCE))[0]
    assert (row.termination, row.n_steps, row.success) == (Termination.INFRA_ERROR, 0, None)
    assert row.tags[0] == "infra_error: the engine gave nothing within limits.turn_s, 0.4 s"
    assert fine.success
    endpoint.plan = ["hang"]
    [row], _ = play(endpoint, limits=Limits(episode_s=0.4))
    assert (row.termination, row.n_steps) == (Termination.TIME_LIMIT, 0)


def test_a_request_that_takes_too_long_is_sent_again(endpoint: Endpoint) -> None:
    endpoint.plan = ["hang"]
    started = time.monotonic()
    [row], spent = play(endpoint, timeout_s=0.3)
    assert time.monotonic() - started < 3
    assert row.success
    assert spent.retries == 1
    endpoint.plan = ["hang"]
    with pytest.raises(EngineError, match="timed out"):
        play(endpoint, timeout_s=0.3, retries=0, limits=Limits(retry=ONCE))


def test_requests_are_limited_at_once_and_by_the_minute(endpoint: Endpoint) -> None:
    rows, _ = play(endpoint, 12, concurrency=3)
    assert len(rows) == 12
    assert endpoint.most_at_once == 3
    endpoint.times.clear()
    play(endpoint, 4, requests_per_minute=300)
    assert len(endpoint.times) == 8
    gaps = [after - before for before, after in itertools.pairwise(endpoint.times)]
    assert min(gaps) > 0.1, "one each 0.2 s, and no minute's worth at once"
    assert endpoint.times[-1] - endpoint.times[0] > 7 * 0.2 - 0.1


def test_sampling_reaches_the_endpoint(endpoint: Endpoint) -> None:
    sampling = {"temperature": 0.3, "top_p": 0.5, "max_turn_tokens": 7}
    play(endpoint, 2, sampling=Sampling(top_k=9, **sampling))
    seeds = set()
    for request in endpoint.requests:
        assert (request["temperature"], request["top_p"], request["top_k"]) == (0.3, 0.5, 9)
        assert (request["max_completion_tokens"], request["model"]) == (7, "teacher")
        seeds.add(request["seed"])
    assert len(seeds) == 4, "each turn of each row draws with a seed of its own"
    play(endpoint, sampling=Sampling(**sampling))
    assert "top_k" not in endpoint.requests[-1], "which only some endpoints know"


def test_a_row_that_the_endpoint_counts_as_too_long_ends_there(endpoint: Endpoint) -> None:
    [row], _ = play(endpoint, sampling=Sampling(max_turn_tokens=50, max_tokens=109))
    assert (row.termination, row.n_steps) == (Termination.MAX_TOKENS, 1)
    [row], _ = play(endpoint, sampling=Sampling(max_turn_tokens=50, max_tokens=110))
    assert row.success


def test_no_request_is_sent_once_the_cap_is_spent(endpoint: Endpoint) -> None:
    prices = {"price_prompt": 1e4, "price_completion": 0.0, "max_cost": 2.0, "concurrency": 1}
    with pytest.raises(EngineError, match=r"2.00 were spent and max_cost is 2; raise max_cost to go on"):
        play(endpoint, 3, limits=Limits(in_flight=1), **prices)
    assert len(endpoint.requests) == 2
    with pytest.raises(ValueError, match="max_cost needs price_prompt"):
        OpenAIConfig(model="teacher", max_cost=1)


def test_replies_are_kept_by_content_and_cost_nothing_again(endpoint: Endpoint, tmp_path: Path) -> None:
    kept = str(tmp_path / "replies.sqlite")
    first, spent = play(endpoint, 3, cache=kept)
    assert (spent.requests, spent.cached) == (6, 0)
    again, spent = play(endpoint, 3, cache=kept)
    assert (spent.requests, spent.cached, len(endpoint.requests)) == (0, 6, 6)
    assert [row.messages for row in again] == [row.messages for row in first]


def test_stages_that_need_ids_refuse_it_by_name() -> None:
    from pydantic import ValidationError

    from agentrl.pipelines.methods.star.rationalize import RationalizeConfig
    from agentrl.pipelines.stages.online_config import OnlineConfig
    from agentrl.pipelines.stages.trajectories import SampleConfig

    given = {"engine": {"type": "openai", "model": "teacher"}}
    for config in (OnlineConfig, RationalizeConfig):
        with pytest.raises(ValidationError, match=r"engine openai gives text, and this stage needs token ids"):
            config.model_validate(given)
    assert SampleConfig.model_validate(given).engine.type == "openai"
    with pytest.raises(ValidationError, match=r"did you mean 'openai'"):
        SampleConfig.model_validate({"engine": {"type": "opnai", "model": "teacher"}})
    with pytest.raises(ValidationError, match="String should match pattern"):
        SampleConfig.model_validate({"engine": {"type": "openai", "model": "teacher", "api_key": "sk-123"}})
