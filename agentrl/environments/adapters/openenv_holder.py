"""Holds sessions of an OpenEnv server. This file runs in an interpreter that has only ``openenv-core``
(:mod:`agentrl.environments.adapters.foreign`)."""

import itertools
import json
from typing import Any

import requests
from openenv.core.generic_client import GenericEnvClient


class ServerSession:
    def __init__(self, client: Any) -> None:
        self.client, self.total, self.steps, self.ended = client, 0.0, 0, False


class OpenEnvHolder:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.url, self.solved_from = settings["url"].rstrip("/"), settings["solved_from"]
        self.text = settings["text"]
        self.sessions: dict[int, ServerSession] = {}
        self.numbers = itertools.count()
        reply = requests.get(f"{self.url}/schema", timeout=30)
        reply.raise_for_status()
        self.action = _parameters(reply.json()["action"])

    async def begin(self, task: dict[str, Any], prompt: str) -> dict[str, Any]:
        session = ServerSession(GenericEnvClient(base_url=self.url))
        await session.client.connect()
        first = await session.client.reset(seed=task["seed"])
        number = next(self.numbers)
        self.sessions[number] = session
        about = {"name": "act", "description": "Do one action and see what comes of it.", "parameters": self.action}
        content = f"{prompt}\n\n{self._shown(first.observation)}"
        opening = [{"role": "user", "content": content}]
        return {"episode": number, "opening": opening, "tools": [{"type": "function", "function": about}]}

    async def step(self, episode: int, message: dict[str, Any]) -> dict[str, Any]:
        session, answers, errors, rewards = self.sessions[episode], [], 0, []
        for call in message["tool_calls"]:
            content, reward = await self._act(session, call)
            errors += reward is None
            rewards += [] if reward is None else [reward]
            answer = {"role": "tool", "content": content, "tool_call_id": call["id"]}
            answers.append(answer | {"error": reward is None})
            if session.ended:
                break
        done = session.ended or not answers
        return {"messages": answers, "done": done, "reward": sum(rewards) if rewards else None, "tool_errors": errors}

    async def _act(self, session: ServerSession, call: dict[str, Any]) -> tuple[str, float | None]:
        """What an action shows, and its reward; None if it was refused."""
        arguments = json.loads(call["arguments"])
        if call["name"] != "act" or not isinstance(arguments, dict):
            return "the only tool is act, with the fields of an action", None
        try:
            result = await session.client.step(arguments)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return str(error), None
        reward = float(result.reward or 0.0)
        session.total, session.steps, session.ended = session.total + reward, session.steps + 1, result.done
        return self._shown(result.observation), reward

    def _shown(self, observation: dict[str, Any]) -> str:
        if self.text:
            return str(observation.get(self.text, ""))
        return json.dumps({name: value for name, value in observation.items() if name not in ("metadata",)})

    async def score(self, episode: int) -> dict[str, Any]:
        session = self.sessions[episode]
        part = {"name": "return", "value": session.total, "weight": 1.0}
        state = {"return": session.total, "steps": session.steps, "ended": session.ended}
        return {"success": session.total >= self.solved_from, "components": [part], "state": state}

    async def end(self, episode: int) -> None:
        await self.sessions.pop(episode).client.close()


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an action without what every action has."""
    fields = {name: schema for name, schema in schema.get("properties", {}).items() if name != "metadata"}
    kept: dict[str, Any] = {name: schema[name] for name in ("$defs", "required") if name in schema}
    return {"type": "object", "properties": fields, **kept}


HOLDER = OpenEnvHolder
