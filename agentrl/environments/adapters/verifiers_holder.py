"""Holds an environment of the ``verifiers`` package (its classic environments: 0.1 to 0.3). This file runs in an
interpreter that has only that package (:mod:`agentrl.environments.adapters.foreign`). A rollout is the package's own;
only its client is ours, which waits for what the policy says."""

import asyncio
import itertools
import random
import time
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall


class Asked(Client):
    """A client that hands each prompt over and waits for the reply."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.state: Any = None

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **values: Any
    ) -> Response:
        self.state = values["state"]
        self.prompts.put_nowait((list(prompt), tools or []))
        return await self.replies.get()

    def setup_client(self, config: Any) -> None: ...
    async def to_native_tool(self, tool: Any) -> None: ...
    async def to_native_prompt(self, messages: Any) -> None: ...
    async def get_native_response(self, *values: Any, **named: Any) -> None: ...
    async def raise_from_native_response(self, response: Any) -> None: ...
    async def from_native_response(self, response: Any) -> None: ...
    async def close(self) -> None: ...


class Rollout:
    """One rollout of the package. ``known`` is the conversation that the policy has seen and said."""

    def __init__(self, env: Any, row: dict[str, Any]) -> None:
        self.env, self.client, self.known = env, Asked(), list[Any]()
        self.task = asyncio.create_task(env.rollout(row, self.client, "agentrl", {}))

    async def turn(self) -> tuple[list[Any], list[Any], bool]:
        """What is new to the policy, the tools, and whether the rollout has ended. Raises what ended it."""
        prompt = asyncio.create_task(self.client.prompts.get())
        await asyncio.wait([prompt, self.task], return_when=asyncio.FIRST_COMPLETED)
        if not prompt.done():
            prompt.cancel()
            state = self.task.result()
            if state.get("error") is not None:
                raise state["error"]
            return self._new([*state["prompt"], *state["completion"]]), [], True
        messages, tools = prompt.result()
        return self._new(messages), tools, False

    def _new(self, messages: list[Any]) -> list[Any]:
        if [message.role for message in messages[: len(self.known)]] != [known.role for known in self.known]:
            raise ValueError("the environment rewrites the conversation; an episode of one sequence cannot follow it")
        new, self.known = messages[len(self.known) :], messages
        return new

    def say(self, message: dict[str, Any]) -> None:
        calls = [ToolCall(**call) for call in message["tool_calls"]]
        reply = ResponseMessage(
            content=message["content"],
            reasoning_content=message["reasoning"],
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        self.known.append(reply)
        self.client.replies.put_nowait(Response(id="agentrl", created=int(time.time()), model="agentrl", message=reply))

    async def stop(self) -> Any:
        """End the rollout if it has not ended, and return its state."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.client.state


class VerifiersHolder:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.env: Any = vf.load_environment(settings["id"], **settings["args"])
        self.solved_from = settings["solved_from"]
        self.rollouts: dict[int, Rollout] = {}
        self.numbers = itertools.count()

    async def tasks(self, seed: int) -> list[dict[str, Any]]:
        """All rows of the environment's data, in an order that ``seed`` draws."""
        rows = self.env.get_dataset().to_list()
        random.Random(seed).shuffle(rows)
        return [{"metadata": row, "prompt": _last(row["prompt"])} for row in rows]

    async def begin(self, task: dict[str, Any], prompt: str) -> dict[str, Any]:
        rollout = Rollout(self.env, task)
        opening, tools, ended = await rollout.turn()
        if ended:
            raise ValueError("the rollout ended before the policy was asked")
        number = next(self.numbers)
        self.rollouts[number] = rollout
        offered = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in tools
        ]
        return {"episode": number, "opening": [_plain(message) for message in opening], "tools": offered}

    async def step(self, episode: int, message: dict[str, Any]) -> dict[str, Any]:
        rollout = self.rollouts[episode]
        rollout.say(message)
        known = {tool.name for tool in rollout.client.state.get("tool_defs") or []}
        unknown = [call["id"] for call in message["tool_calls"] if call["name"] not in known]
        new, _, ended = await rollout.turn()
        answers = [_plain(new_message) for new_message in new]
        for answer in answers:
            if answer["tool_call_id"] in unknown:  # of other calls the environment does not say whether they failed
                answer["error"] = True
        return {"messages": answers, "done": ended, "tool_errors": len(unknown)}

    async def score(self, episode: int) -> dict[str, Any]:
        state = await self.rollouts[episode].stop()
        await self.env.rubric.score_rollout(state)
        rubric, reward = self.env.rubric, float(state["reward"])
        names = [getattr(func, "__name__", repr(func)) for func in rubric._get_reward_funcs()]
        weights = dict(zip(names, rubric._get_reward_weights(), strict=True))
        parts = [
            {"name": name, "value": float(value), "weight": float(weights.get(name, 0.0))}
            for name, value in state["metrics"].items()
        ]
        if abs(sum(part["value"] * part["weight"] for part in parts) - reward) > 1e-6:
            parts = [{"name": "reward", "value": reward, "weight": 1.0}, *({**part, "weight": 0.0} for part in parts)]
        ended = {"stopped_by": state.get("stop_condition")}
        return {"success": reward >= self.solved_from, "components": parts, "state": ended}

    async def end(self, episode: int) -> None:
        state = await self.rollouts.pop(episode).stop()
        await self.env.rubric.cleanup(state)


def _last(prompt: Any) -> str:
    """The text that a row asks."""
    if isinstance(prompt, str):
        return prompt
    return _text(prompt[-1]["content"]) if prompt else ""


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in parts)
    return content or ""


def _plain(message: Any) -> dict[str, Any]:
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in getattr(message, "tool_calls", None) or []]
    answers = getattr(message, "tool_call_id", None)
    return {"role": message.role, "content": _text(message.content), "tool_calls": calls, "tool_call_id": answers}


HOLDER = VerifiersHolder
