"""Failures that are no doing of the policy, from real faults: told apart, made again, and in no rate."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from architectures import qwen
from faulty_shop import Shop, Speaker, Visit, task
from hypothesis import given
from hypothesis import strategies as st
from json_server import JsonHandler, serving
from recording import ScriptedTokens, policy_for_tests
from test_agent_environment import ProgramInTests
from test_engine_openai import SAMPLING
from test_engine_openai import Endpoint as ModelServer

from agentrl.engines.base import Sampling
from agentrl.engines.configs import OpenAIConfig
from agentrl.engines.openai import OpenAIEngine
from agentrl.environments.agent import Endpoint
from agentrl.environments.tools import tool
from agentrl.models.policy import Policy
from agentrl.rollouts.limits import Limits, Retry
from agentrl.rollouts.outcomes import shares_of_ends
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import (
    INFRASTRUCTURE,
    InfrastructureError,
    Message,
    Role,
    Termination,
    Trajectory,
)
from agentrl.statistics.excluded import excluded, said_of_excluded

ROOM = Sampling(max_turn_tokens=400, max_tokens=6000)
QUICK = Retry(attempts=3, backoff_s=0.01)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return qwen()


class ToolServer(ThreadingHTTPServer):
    """Hangs, or answers 500, at as many requests as ``plan`` says, and then answers."""

    daemon_threads = True

    def __init__(self, *plan: str) -> None:
        super().__init__(("127.0.0.1", 0), ToolHandler)
        self.plan = list(plan)


class ToolHandler(JsonHandler):
    server: ToolServer

    def post(self, asked: dict[str, Any]) -> None:
        fault = self.server.plan.pop(0) if self.server.plan else ""
        if fault == "hang":
            time.sleep(1.5)
        self.say({"price": len(asked["item"])}, 500 if fault == "broken" else 200)


class RemoteVisit(Visit):
    def __init__(self, task: Task, url: str) -> None:
        super().__init__(task)
        self.url = url

    @tool
    def price(self, item: str) -> int:
        """The price of an item."""
        asked = urllib.request.Request(self.url, json.dumps({"item": item}).encode())
        try:
            with urllib.request.urlopen(asked, timeout=10) as reply:
                return int(json.load(reply)["price"])
        except urllib.error.HTTPError as error:
            raise InfrastructureError(f"the price server answered {error.code}") from error


class RemoteShop(Shop):
    def __init__(self, server: ToolServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}/"

    def episode(self, task: Task) -> Visit:
        return RemoteVisit(task, self.url)


def play(
    policy: Policy, environment: Any, prompt: str, **limits: Any
) -> tuple[Trajectory, list[Trajectory], RolloutRunner]:
    """The row, those of failed attempts, and the runner."""
    failed: list[Trajectory] = []
    runner = RolloutRunner(
        policy, Speaker(policy.codec), environment, ROOM, limits=Limits(**limits), on_failed=failed.extend
    )
    [row] = runner.run([Attempt(task(prompt))], 0, ["r"])
    return row, failed, runner


@pytest.mark.parametrize("processes", [0, 1])
def test_a_tool_server_that_fails_ends_the_attempt_and_the_next_one_is_whole(policy: Policy, processes: int) -> None:
    server = ToolServer("", "broken")
    with serving(server):
        shop = RemoteShop(server)
        row, [failed], runner = play(policy, shop, "price fig,price plum", retry=QUICK, processes=processes)
    assert (row.termination, row.success, row.n_tool_errors, row.tags) == (Termination.ANSWERED, True, 0, [])
    assert (failed.termination, failed.reward, failed.success) == (Termination.INFRA_ERROR, None, None)
    assert "InfrastructureError: the price server answered 500" in failed.tags[-1]
    assert failed.input_ids == row.input_ids[: len(failed.input_ids)], "the same seed gives the same turns"
    assert (runner.counts, runner.tries) == ({"retried": 1}, {"attempts": 2})


def test_a_tool_that_times_out_is_read_by_the_policy_or_fails_the_attempt(policy: Policy) -> None:
    server = ToolServer("hang")
    with serving(server):
        read, failed, _ = play(policy, RemoteShop(server), "price fig", tool_s=0.3)
    assert (read.termination, read.n_tool_errors, failed) == (Termination.ANSWERED, 1, [])
    server = ToolServer("hang")
    with serving(server):
        retry = Retry(attempts=2, backoff_s=0.01, tool_timeouts=True)
        row, [failed_row], runner = play(policy, RemoteShop(server), "price fig", tool_s=0.3, retry=retry)
    assert (row.termination, row.n_tool_errors) == (Termination.ANSWERED, 0)
    assert (failed_row.termination, failed_row.tags[0]) == (Termination.INFRA_ERROR, "tool_timeouts:1")
    assert runner.counts == {"retried": 1}


def test_what_keeps_failing_is_given_up_and_counted(policy: Policy) -> None:
    server = ToolServer(*["broken"] * 9)
    with serving(server):
        environment = {"shop": RemoteShop(server), "other": Shop()}
        runner = RolloutRunner(policy, Speaker(policy.codec), environment, ROOM, limits=Limits(retry=QUICK))
        attempts = [Attempt(task("price fig", "shop")), Attempt(task("price fig", "other"))]
        lost, fine = runner.run(attempts, 0, ["lost", "fine"])
        assert len(server.plan) == 6
    assert (lost.termination, lost.success, fine.success) == (Termination.INFRA_ERROR, None, True)
    assert runner.counts == {"retried": 2, "infra_errors": 1}
    assert "answered 500" in runner.first["infra_errors"]
    assert runner.tries == {"attempts": 4}


@pytest.fixture
def endpoint() -> Any:
    server = ModelServer()
    with serving(server):
        yield server


def test_an_endpoint_that_answers_500_or_529_is_asked_again_and_one_that_refuses_is_not(endpoint: ModelServer) -> None:
    engine = OpenAIEngine(OpenAIConfig(model="teacher", base_url=endpoint.url, retries=0), "key")
    runner = RolloutRunner(None, engine, Shop(), SAMPLING, limits=Limits(in_flight=1, retry=QUICK))
    endpoint.plan = ["broken", "overloaded"]
    [row] = runner.run([Attempt(task("2 figs?"))], 0, ["r"])
    assert (row.success, runner.counts, len(endpoint.requests)) == (True, {"retried": 2}, 4)
    endpoint.requests.clear()
    endpoint.plan = ["filtered"]
    refused, fine = runner.run([Attempt(task("2 figs?", number=n)) for n in range(2)], 0, ["s", "t"])
    assert (refused.termination, fine.success) == (Termination.INFRA_ERROR, True)
    assert len(endpoint.requests) == 3, "the same request would be refused again"
    assert runner.counts == {"retried": 2, "infra_errors": 1}


AGENT = """
import json, os, signal, sys, urllib.request
url, key, model, kill = sys.argv[1:]
def ask(messages):
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
messages = [{"role": "user", "content": "weather?"}]
said = ask(messages)
if kill == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
print(said)
"""


class Killed(ProgramInTests):
    """A program in a process of its own. As many as ``kills`` says are killed after their first turn."""

    kills = 1

    def run(self, task: Task, endpoint: Endpoint) -> float:
        kill, self.kills = ("kill" if self.kills > 0 else "live"), self.kills - 1
        command = [sys.executable, "-c", AGENT, endpoint.base_url, endpoint.api_key, endpoint.model, kill]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return float("Sunny" in done.stdout)


def test_an_agent_that_is_killed_is_no_failure_of_the_policy() -> None:
    policy = policy_for_tests()
    sunny = Message(role=Role.ASSISTANT, content="Sunny.")
    environment, failed = Killed(), list[Trajectory]()
    with RolloutRunner(
        policy,
        ScriptedTokens(policy, lambda asked: sunny),
        environment,
        Sampling(max_turn_tokens=60, max_tokens=2000),
        limits=Limits(retry=QUICK),
        on_failed=failed.extend,
    ) as runner:
        [row] = runner.run([Attempt(Task(task_id="t", env="program", split="train", prompt="weather?"))], 0, ["r"])
    assert (row.success, row.termination) == (True, Termination.ANSWERED)
    assert [(error.termination, error.success) for error in failed] == [(Termination.ENV_ERROR, None)]
    assert f"died with <Signals.SIGKILL: {signal.SIGKILL.value}>" in failed[0].tags[-1]
    assert runner.counts == {"retried": 1}


@given(st.integers(1, 40), st.floats(0, 1e6))
def test_waits_double_and_are_bounded(failed: int, backoff: float) -> None:
    retry = Retry(backoff_s=backoff)
    assert retry.pause(failed) == min(300.0, backoff * 2 ** (failed - 1) if failed < 33 else backoff * 2**32)
    assert retry.pause(failed) <= retry.pause(failed + 1)


ENDS = st.lists(st.sampled_from(list(Termination)), max_size=200)


@given(ENDS)
def test_shares_are_of_what_the_policy_did(ends: list[Termination]) -> None:
    kept = [end for end in ends if end not in INFRASTRUCTURE]
    assert shares_of_ends(ends) == shares_of_ends(kept)
    assert excluded(ends) + len(kept) == len(ends)
    text = said_of_excluded(excluded(ends), len(ends))
    assert bool(text) == (bool(ends) and excluded(ends) / len(ends) > 0.05)


def test_every_failure_of_ours_is_one_of_infrastructure() -> None:
    from agentrl.engines.base import EngineError, TurnError
    from agentrl.sandbox.run import SandboxError

    for kind in (EngineError, TurnError, SandboxError):
        assert issubclass(kind, InfrastructureError)


def test_rows_of_a_reproducible_engine_do_not_depend_on_how_long_it_computes(policy: Policy) -> None:
    engine = Speaker(policy.codec, seconds=0.3)
    acts = RolloutRunner(policy, engine, Shop(), ROOM, limits=Limits(turn_s=0.1, episode_s=0.2))
    for reproducible, ended in ((True, (Termination.ANSWERED, 3)), (False, (Termination.TIME_LIMIT, 1))):
        engine.reproducible = reproducible
        [row] = acts.run([Attempt(task("price fig,price plum,done", "shop", 0))], 0, ["r"])
        assert (row.termination, row.n_steps) == ended
