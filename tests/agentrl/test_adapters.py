"""Environments of other packages, against the packages themselves."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from scripted_engine import play

from agentrl.engines.base import EngineError
from agentrl.environments import load_environment
from agentrl.environments.adapters.foreign import ForeignError
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Termination, Trajectory


def observed(row: Trajectory) -> list[str]:
    return [message.content for message in row.messages if message.role is Role.TOOL]


class TestMcp:
    SERVER = textwrap.dedent('''
        """A notebook of one server process."""
        import os, sys
        from mcp.server import MCPServer

        server, notes = MCPServer("notes"), {}

        @server.tool()
        def write(name: str, text: str) -> str:
            """Write a note."""
            notes[name] = text
            return f"{name} has {len(text)} characters"

        @server.tool()
        def read(name: str) -> str:
            """Read a note."""
            if name not in notes:
                raise ValueError(f"there is no note {name}")
            return notes[name]

        @server.tool()
        def crash() -> str:
            """End the server."""
            os._exit(1)

        @server.tool()
        def state() -> str:
            """All notes, as JSON."""
            import json
            return json.dumps({"notes": notes, "greeting": os.environ.get("GREETING", "")})

        if len(sys.argv) > 1:
            server.run("streamable-http", port=int(sys.argv[1]))
        else:
            server.run()
    ''')

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        path = tmp_path / "server.py"
        path.write_text(self.SERVER)
        return {"command": sys.executable, "args": [str(path)], "start_s": 120}

    @staticmethod
    def environment(settings: dict[str, Any]) -> Any:
        return load_environment(f"mcp{json.dumps(settings)}")

    @staticmethod
    def task(truth: Any) -> Task:
        return Task(task_id="t", env="mcp", split="train", prompt="note it", ground_truth=json.dumps(truth))

    def test_an_episode_calls_the_tools_of_a_real_server(self, settings: dict[str, Any]) -> None:
        turns = [{"write": {"name": "a", "text": "hello"}}, {"read": {"name": "a"}}, {"read": {"name": "b"}},
                 {"write": {"name": 3}}, {"erase": {}}, "hello"]  # fmt: skip
        environment = self.environment({**settings, "tools": ["write", "read"]})
        [row] = play(environment, self.task("hello"), *turns)
        assert (row.success, row.reward, row.termination) == (True, 1.0, Termination.ANSWERED)
        first, second, missing, wrong, unknown = observed(row)
        assert (first, second) == ("a has 5 characters", "hello")
        assert "Error executing tool read" in missing
        assert "text" in wrong
        assert unknown == "no tool erase; there are read, write"
        assert (row.n_tool_calls, row.n_tool_errors) == (5, 3)
        [write, read] = [tool["function"] for tool in json.loads(row.tools)]
        assert (write["name"], write["description"], read["name"]) == ("write", "Write a note.", "read")
        assert write["parameters"]["required"] == ["name", "text"]
        children = psutil.Process().children(recursive=True)
        assert not [child for child in children if settings["args"][0] in child.cmdline()]

    @pytest.mark.slow
    @pytest.mark.ci
    def test_the_state_of_the_server_is_verified(self, settings: dict[str, Any]) -> None:
        environment = self.environment({**settings, "state_tool": "state", "env": {"GREETING": "hi"}})
        task = self.task({"notes": {"a": "hello"}, "greeting": "hi"})
        [row] = play(environment, task, {"write": {"name": "a", "text": "hello"}}, "done")
        assert (row.success, row.reward) == (True, 1.0)
        assert json.loads(row.final_state)["server"]["notes"] == {"a": "hello"}
        assert "state" not in [tool["function"]["name"] for tool in json.loads(row.tools)]
        [row] = play(environment, task, "done, all of it")
        assert (row.success, row.reward) == (False, 0.5), "a bare Done fails"
        [row] = play(environment, self.task(None), "done")
        assert (row.success, row.reward) == (None, None)

    def test_episodes_at_once_have_servers_of_their_own(self, settings: dict[str, Any]) -> None:
        turns = [{"read": {"name": "a"}}, {"write": {"name": "a", "text": "x"}}, "x"]
        rows = play(self.environment({**settings, "tools": ["write", "read"]}), self.task("x"), *turns, number=2)
        assert [row.n_tool_errors for row in rows] == [1, 1], "no note of another episode was there"

    def test_a_server_that_ends_ends_its_episode_alone(self, settings: dict[str, Any]) -> None:
        with pytest.raises(EngineError, match=r"(?s)no episode could be sampled.*the MCP server does not answer"):
            play(self.environment(settings), self.task("x"), {"crash": {}}, "x")

    @pytest.mark.slow
    @pytest.mark.ci
    def test_a_server_over_http(self, settings: dict[str, Any]) -> None:
        """One server for all episodes, so they share its state, and it goes on when they end."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = subprocess.Popen([sys.executable, *settings["args"], str(port)], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            environment = self.environment({"url": f"http://127.0.0.1:{port}/mcp", "start_s": 120})
            [row] = play(
                environment, self.task("hello"), {"write": {"name": "a", "text": "hello"}}, {"erase": {}}, "hello"
            )
            assert (row.success, row.n_tool_errors) == (True, 1)
            assert observed(row)[0] == "a has 5 characters"
            rows = play(
                environment, self.task("hello"), {"read": {"name": "a"}}, {"read": {"name": "b"}}, "hello", number=2
            )
            assert [observed(row)[0] for row in rows] == ["hello"] * 2
            assert [row.n_tool_errors for row in rows] == [1, 1]
            assert server.poll() is None
        finally:
            server.kill()
            server.wait()
        [row] = play(self.environment({"url": f"http://127.0.0.1:{port}/mcp", "start_s": 5}), self.task("x"), "x")
        assert row.termination is Termination.ENV_ERROR

    @pytest.mark.slow
    @pytest.mark.ci
    def test_what_is_wrong_is_said(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="set exactly one of command"):
            self.environment({})
        with pytest.raises(ValueError, match="brings tools and no tasks"):
            self.environment(settings).tasks({"train": 1}, 0)
        [row] = play(self.environment({**settings, "tools": ["erase"]}), self.task("x"), "x")
        assert row.termination is Termination.ENV_ERROR
        assert "the MCP server has no tool 'erase'; it has write, read, crash, state" in row.tags[0]
        [row] = play(self.environment({**settings, "args": ["-c", "raise SystemExit(3)"]}), self.task("x"), "x")
        assert row.termination is Termination.ENV_ERROR


class TestGymnasium:
    LAKE: dict[str, Any] = {  # noqa: RUF012
        "id": "FrozenLake-v1",
        "options": {"is_slippery": False, "map_name": "4x4", "render_mode": "ansi"},
        "actions": ["left", "down", "right", "up"],
    }

    def test_a_walk_over_the_frozen_lake(self) -> None:
        environment = load_environment(f"gymnasium{json.dumps(self.LAKE)}")
        splits = environment.tasks({"train": 3, "heldout": 2}, seed=1)
        ids = {split: {task.task_id for task in tasks} for split, tasks in splits.items()}
        assert not ids["train"] & ids["heldout"]
        assert not ids["train"] & {task.task_id for task in environment.tasks({"train": 3}, seed=2)["train"]}
        way = ["down", "down", "right", "right", "down", "right"]
        task = splits["train"][0]
        [row] = play(environment, task, *({"act": {"action": move}} for move in way))
        assert (row.success, row.reward, row.n_steps) == (True, 1.0, 6)
        assert json.loads(row.final_state) == {"return": 1.0, "steps": 6, "ended": "terminated"}
        assert observed(row)[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG", "the map is drawn as text, its colour a mark"
        assert (
            json.loads(row.tools)[0]["function"]["parameters"]["properties"]["action"]["enum"] == self.LAKE["actions"]
        )
        [row] = play(environment, task, {"act": {"action": "north"}}, {"jump": {}}, "I give up")
        assert (row.success, row.n_tool_errors) == (False, 2)
        assert observed(row)[0] == "no action 'north'; there are left, down, right, up"

    def test_equal_seeds_begin_alike(self) -> None:
        environment = load_environment('gymnasium{"id": "Taxi-v4"}')
        first, other = environment.tasks({"train": 2}, seed=0)["train"]
        begun = [play(environment, task, "stop")[0].messages[0].content for task in (first, first, other)]
        assert begun[0] == begun[1] != begun[2]

    def test_actions_of_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_gym_words.py").write_text(
            textwrap.dedent("""
            import gymnasium
            from gymnasium.spaces import Text


            class Words(gymnasium.Env):
                action_space = observation_space = Text(20)

                def reset(self, seed=None, options=None):
                    super().reset(seed=seed)
                    self.word = self.np_random.choice(["fig", "plum"])
                    return f"say {self.word}", {}

                def step(self, action):
                    right = action == self.word
                    return "yes" if right else "no", float(right) - 0.25, right, False, {}


            gymnasium.register("Words-v0", Words)
        """)
        )
        monkeypatch.syspath_prepend(tmp_path)
        environment = load_environment('gymnasium{"id": "my_gym_words:Words-v0", "solved_from": 0.5, "max_steps": 4}')
        task = environment.tasks({"train": 1}, seed=0)["train"][0]
        word = play(environment, task, "?")[0].messages[0].content.rpartition(" ")[2]
        [row] = play(environment, task, {"act": {"action": "pear"}}, {"act": {"action": word}})
        assert (observed(row), row.reward, row.success) == (["no", "yes"], 0.5, True)
        assert [message.reward for message in row.messages if message.role is Role.ASSISTANT] == [-0.25, 0.75]
        [row] = play(environment, task, {"act": {"action": "pear!"}}, "?")
        assert observed(row)[0].startswith("'pear!' is no action of Text")

    def test_actions_without_a_text_form_are_refused(self) -> None:
        with pytest.raises(ValueError, match="has 4 actions, and 2 names are given"):
            load_environment(f"gymnasium{json.dumps({**self.LAKE, 'actions': ['a', 'b']})}").tasks({"train": 1}, 0)
        with pytest.raises(ValueError, match=r"has actions of Box\(.*; use one with Discrete or Text actions"):
            load_environment('gymnasium{"id": "Pendulum-v1"}').tasks({"train": 1}, 0)


@pytest.mark.adapters
class TestVerifiers:
    WORDS = textwrap.dedent('''
        """Questions about words, with a tool and a rubric."""
        import verifiers as vf
        from datasets import Dataset


        def length(word: str) -> str:
            """The number of letters of a word."""
            if word == "burst":
                raise RuntimeError("no such word")
            return str(len(word))


        async def right(completion, answer) -> float:
            return float(completion[-1].content == answer)


        async def brief(completion) -> float:
            return float(len(completion) <= 3)


        def load_environment(words: list[str]) -> vf.Environment:
            asked = ([{"role": "user", "content": f"letters of {one}?"}] for one in words)
            rows = [{"prompt": prompt, "answer": str(len(one))} for prompt, one in zip(asked, words)]
            rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.25])
            return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[length], rubric=rubric, max_turns=4)
    ''')  # fmt: skip

    @pytest.fixture
    def environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        python = os.environ["VERIFIERS_PYTHON"]
        (tmp_path / "letter_words.py").write_text(self.WORDS)
        home = tmp_path / "site"
        home.mkdir()
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} HOME={home} exec {python} "$@"\n')
        wrapper.chmod(0o755)
        settings = {"id": "letter-words", "args": {"words": ["fig", "plum", "fig", "burst"]}, "python": str(wrapper)}
        return load_environment(f"verifiers{json.dumps(settings)}")

    def test_a_rollout_of_the_package_itself(self, environment: Any) -> None:
        splits = environment.tasks({"train": 2, "heldout": 1}, seed=0)
        tasks = {task.prompt: task for tasks in splits.values() for task in tasks}
        assert sorted(tasks) == ["letters of burst?", "letters of fig?", "letters of plum?"], "each question once"
        with pytest.raises(ValueError, match="4 tasks are asked for, and the environment has 3"):
            environment.tasks({"train": 4}, seed=0)
        fig = tasks["letters of fig?"]
        [row] = play(environment, fig, {"length": {"word": "fig"}}, "3")
        assert (row.success, row.reward, observed(row)) == (True, 1.25, ["3"])
        components = {component.name: (component.value, component.weight) for component in row.reward_components}
        assert (components["right"], components["brief"]) == ((1.0, 1.0), (1.0, 0.25))
        assert components["total_tool_calls"] == (1.0, 0.0)
        [tool] = json.loads(row.tools)
        assert tool["function"]["name"] == "length"
        assert row.messages[0].content == "letters of fig?"
        assert json.loads(row.final_state) == {"stopped_by": "no_tools_called"}
        [row] = play(environment, fig, {"length": {"word": "fig"}}, {"width": {"word": "fig"}}, "4")
        assert (row.success, row.reward, row.n_tool_errors) == (False, 0.0, 1)
        [row] = play(environment, tasks["letters of burst?"], {"length": {"word": "burst"}}, "5")
        assert (observed(row), row.success) == (["no such word"], True)
        [row] = play(environment, fig, *[{"length": {"word": "fig"}}] * 9)
        assert row.n_steps == 4, "the package's own limit of turns"
        rows = play(environment, fig, {"length": {"word": "fig"}}, "3", number=3)
        assert [row.reward for row in rows] == [1.25] * 3

    def test_an_environment_that_cannot_be_loaded_is_named(self, environment: Any) -> None:
        environment.program.settings["id"] = "no-such-words"
        with pytest.raises(ForeignError, match="no_such_words"):
            environment.tasks({"train": 1}, 0)
        missing = load_environment('verifiers{"id": "x", "python": "/nowhere/python"}')
        with pytest.raises(ForeignError, match="/nowhere/python cannot be started: No such file"):
            missing.tasks({"train": 1}, 0)


@pytest.mark.adapters
class TestOpenEnv:
    SERVER = textwrap.dedent('''
        """Guess a number that the seed draws, from 0 to 7."""
        import random
        import sys

        import uvicorn
        from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


        class Guess(Action):
            number: int


        class Hint(Observation):
            hint: str = ""


        class Guessing(Environment):
            SUPPORTS_CONCURRENT_SESSIONS = True

            def reset(self, seed=None, episode_id=None, **_):
                self.secret = random.Random(seed).randrange(8)
                self._state = State(episode_id=episode_id, step_count=0)
                return Hint(hint="guess")

            def step(self, action, timeout_s=None, **_):
                self._state.step_count += 1
                right = action.number == self.secret
                hint = "right" if right else "more" if action.number < self.secret else "less"
                return Hint(hint=hint, reward=1.0 if right else -0.1, done=right)

            @property
            def state(self):
                return self._state


        app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
    ''')

    @pytest.fixture
    def environment(self, tmp_path: Path) -> Iterator[Any]:
        python = os.environ["OPENENV_PYTHON"]
        (tmp_path / "server.py").write_text(self.SERVER)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        server = subprocess.Popen([python, str(tmp_path / "server.py"), str(port)])
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert server.poll() is None
                time.sleep(0.2)
            settings = {"url": f"http://127.0.0.1:{port}", "text": "hint", "python": python, "prompt": "Guess 0 to 7."}
            yield load_environment(f"openenv{json.dumps(settings)}")
        finally:
            server.kill()
            server.wait()

    def test_sessions_of_a_real_server(self, environment: Any) -> None:
        task = environment.tasks({"train": 1}, seed=3)["train"][0]
        secret = Random(json.loads(task.metadata)["seed"]).randrange(8)
        wrong = (secret + 1) % 8
        turns = [{"act": {"number": wrong}}, {"act": {"number": "many"}}, {"jump": {}}, {"act": {"number": secret}}]
        [row] = play(environment, task, *turns)
        first, refused, unknown, last = observed(row)
        assert (first, last) == ("less" if wrong > secret else "more", "right")
        assert "VALIDATION_ERROR" in refused
        assert unknown == "the only tool is act, with the fields of an action"
        assert (row.success, row.n_tool_errors, row.n_steps) == (False, 2, 4)
        assert row.reward == pytest.approx(0.9)
        assert row.messages[0].content == "Guess 0 to 7.\n\nguess"
        parameters = json.loads(row.tools)[0]["function"]["parameters"]
        assert (list(parameters["properties"]), parameters["required"]) == (["number"], ["number"])
        rows = play(environment, task, {"act": {"number": secret}}, number=3)
        assert [(row.success, row.reward) for row in rows] == [(True, 1.0)] * 3
        [row] = play(environment, task, "I give up")
        assert (row.success, row.reward) == (False, 0.0)
