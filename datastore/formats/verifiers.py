"""Results of verifiers, JSON Lines.

``verifiers`` (legacy results): ``prompt``, ``completion``, ``reward``, ``metrics``, ``trajectory`` with each turn's
``tokens``. Turns whose prompt continues the turn before are one row; where the context was rewritten, a new segment
of the same episode begins. ``verifiers-v1`` (episodes with traces): a trace is a tree of ``nodes``, each a message
with its ``token_ids``, ``mask``, ``is_content`` and one log-prob per true of the mask; every path to a leaf is a
row.

Both carry token ids, mask and log-probs exactly (v1 also all message spans; legacy those of assistant messages).
What has no place goes under ``info.agentrl``. Not carried: stage, run and fingerprint, which are the importer's;
``timing``, ``errors`` and ``calls`` of others' files.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datastore.formats.common import (
    carried,
    finite,
    from_chat,
    json_text,
    make_row,
    read_lines,
    split_prompt,
    to_chat,
    write_lines,
)
from schemas.json_text import loads
from schemas.trajectory import Message, RewardComponent, Role, Termination, Trajectory

_STOPS = {"max_turns_reached": "max_steps", "prompt_too_long": "max_tokens", "has_error": "env_error"}


def _termination(line: dict[str, Any]) -> Termination:
    stop = str(line.get("stop_condition") or "")
    if stop in set(Termination):
        return Termination(stop)
    fallback = "max_tokens" if line.get("is_truncated") else "answered"
    return Termination(_STOPS.get(stop, fallback))


# legacy results


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, (_legacy(number, row) for number, row in enumerate(rows)))


def _legacy(number: int, row: Trajectory) -> dict[str, Any]:
    prompt, completion = split_prompt(row.messages)
    return {
        "example_id": number,
        "prompt": to_chat(prompt),
        "completion": to_chat(completion),
        "reward": row.reward,
        "answer": "",
        "info": {"agentrl": carried(row) | {"tools": row.tools}},
        "metrics": {part.name: part.value for part in row.reward_components},
        "is_completed": row.termination is Termination.ANSWERED,
        "is_truncated": row.termination is Termination.MAX_TOKENS,
        "stop_condition": row.termination.value,
        "tool_defs": json.loads(row.tools),
        "trajectory": _turns(row),
    }


def _turns(row: Trajectory) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(row.messages):
        if message.role is not Role.ASSISTANT:
            continue
        turn: dict[str, Any] = {
            "prompt": to_chat(row.messages[:index]),
            "completion": to_chat([message]),
            "reward": message.reward,
            "extras": {},
        }
        start, end = message.token_start, message.token_end
        if row.input_ids and start is not None and end is not None:
            turn["tokens"] = {
                "prompt_ids": row.input_ids[:start],
                "prompt_mask": [0] * start,
                "completion_ids": row.input_ids[start:end],
                "completion_mask": [int(one) for one in row.action_mask[start:end]],
                "completion_logprobs": finite(row.logprobs[start:end]),
            }
        turns.append(turn)
    with_tokens = [turn for turn in turns if "tokens" in turn]
    if with_tokens:
        last = with_tokens[-1]["tokens"]
        end = len(last["prompt_ids"]) + len(last["completion_ids"])
        with_tokens[-1]["extras"] = {"trailing_ids": row.input_ids[end:]}
    return turns


def read(path: Path) -> Iterator[Trajectory]:
    number = 0
    for line in read_lines(path):
        messages = from_chat(_chat(line.get("prompt"), "user") + _chat(line.get("completion"), "assistant"))
        info = line.get("info") or {}
        info = loads(info) if isinstance(info, str) else info
        extra = dict(info.get("agentrl") or {})
        tools = extra.pop("tools", None) or json_text(line.get("tool_defs") or [])
        example = line.get("example_id", number)
        parts = [
            RewardComponent(name=name, value=float(value))
            for name, value in (line.get("metrics") or {}).items()
            if isinstance(value, int | float)
        ]
        reward = float(line.get("reward") or 0.0)
        segments = _segments(line.get("trajectory") or [], messages)
        base = extra.get("trajectory_id") or f"example-{example}-{number}"
        for segment, (part, tokens) in enumerate(segments):
            many = len(segments) > 1
            own = extra | ({"trajectory_id": f"{base}-{segment}", "segment": segment} if many else {})
            yield make_row(
                number,
                part,
                extra=own,
                trajectory_id=base,
                episode_id=base,
                task_id=f"example-{example}",
                group_id=f"example-{example}",
                env="verifiers",
                tools=tools,
                reward=reward,
                success=reward >= 1.0,
                termination=_termination(line),
                reward_components=parts,
                **tokens,
            )
            number += 1


def _chat(value: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value or [])


def _segments(turns: list[dict[str, Any]], messages: list[Message]) -> list[tuple[list[Message], dict[str, Any]]]:
    """Contiguous stretches of turns, with their messages and token columns."""
    if not any(turn.get("tokens") for turn in turns):
        return [(messages, {})]
    segments: list[tuple[list[Message], dict[str, Any]]] = []
    columns: dict[str, list[Any]] = {}
    part: list[Message] = []
    for turn in turns:
        tokens = turn.get("tokens") or {"prompt_ids": [], "completion_ids": []}
        prompt, completion = tokens["prompt_ids"], tokens["completion_ids"]
        known = columns.get("input_ids", [])
        before = from_chat(_chat(turn.get("prompt"), "user"))
        if not columns or prompt[: len(known)] != known:
            columns = {"input_ids": [], "action_mask": [], "logprobs": []}
            part = list(before)
            segments.append((part, columns))
        else:
            part += before[len(part) :]
        gap = len(prompt) - len(columns["input_ids"])
        columns["input_ids"] += prompt[len(columns["input_ids"]) :] + completion
        columns["action_mask"] += [False] * gap + [
            bool(one) for one in tokens.get("completion_mask") or [1] * len(completion)
        ]
        columns["logprobs"] += [None] * gap + list(tokens.get("completion_logprobs") or [None] * len(completion))
        span = {"token_start": len(prompt), "token_end": len(prompt) + len(completion), "reward": turn.get("reward")}
        said = from_chat(_chat(turn.get("completion"), "assistant"))
        part += [message.model_copy(update=span) if i == 0 else message for i, message in enumerate(said)]
        trailing = (turn.get("extras") or {}).get("trailing_ids") or []
        columns["input_ids"] += trailing
        columns["action_mask"] += [False] * len(trailing)
        columns["logprobs"] += [None] * len(trailing)
    if len(segments) == 1:  # tool messages after the last turn stand in the completion alone
        part += messages[len(part) :]
    return segments


# v1 episodes


def write_v1(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_episode, rows))


def _episode(row: Trajectory) -> dict[str, Any]:
    trace = {
        "version": 1,
        "id": row.trajectory_id,
        "task": {"type": "prompt", "key": row.task_id, "data": {"prompt": row.prompt}},
        "agent": row.agent,
        "tools": json.loads(row.tools),
        "nodes": _nodes(row),
        "calls": [],
        "rewards": {part.name: {"score": part.value, "weight": part.weight} for part in row.reward_components},
        "metrics": {},
        "info": {"agentrl": carried(row) | {"tools": row.tools}},
        "is_completed": row.termination is Termination.ANSWERED,
        "ok": row.termination is not Termination.ENV_ERROR,
        "stop_condition": row.termination.value,
    }
    return {
        "id": row.episode_id,
        "env": {"id": row.env, "name": row.env},
        "task": trace["task"],
        "group": {"id": row.group_id},
        "run": {"type": "eval", "id": row.run_id},
        "ok": trace["ok"],
        "errors": [],
        "traces": [trace],
    }


def _nodes(row: Trajectory) -> list[dict[str, Any]]:
    """Each message owns the tokens from the end of the one before to its own end; what follows the last is its too."""
    nodes: list[dict[str, Any]] = []
    done = 0
    for index, (message, chat) in enumerate(zip(row.messages, to_chat(row.messages), strict=True)):
        node: dict[str, Any] = {"parent": index - 1 if index else None, "message": chat}
        node["sampled"] = message.role is Role.ASSISTANT
        node["reward"] = message.reward
        start, end = message.token_start, message.token_end
        last = index == len(row.messages) - 1
        stop = len(row.input_ids) if last else (end if end is not None else done)
        mask, logprobs = row.action_mask[done:stop], row.logprobs[done:stop]
        node |= {
            "token_ids": row.input_ids[done:stop],
            "mask": mask,
            "is_content": [
                start is not None and end is not None and start <= position < end for position in range(done, stop)
            ],
            "logprobs": finite([value for value, action in zip(logprobs, mask, strict=True) if action]),
            # an empty span leaves no token to mark
            "span": [start, end] if start is not None and start == end else None,
        }
        done = stop
        nodes.append(node)
    return nodes


def read_v1(path: Path) -> Iterator[Trajectory]:
    number = 0
    for episode in read_lines(path):
        for trace in episode.get("traces") or []:
            paths = _paths(trace.get("nodes") or [])
            for branch, nodes in enumerate(paths):
                yield _from_trace(number, episode, trace, nodes, branch if len(paths) > 1 else None)
                number += 1


def _paths(nodes: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The nodes from the root to each leaf."""
    parents = {node.get("parent") for node in nodes}
    paths: list[list[dict[str, Any]]] = []
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        chain: list[dict[str, Any]] = []
        at: int | None = leaf
        while at is not None:
            chain.append(nodes[at])
            at = nodes[at].get("parent")
        paths.append(chain[::-1])
    return paths


def _from_trace(
    number: int, episode: dict[str, Any], trace: dict[str, Any], nodes: list[dict[str, Any]], branch: int | None
) -> Trajectory:
    messages: list[Message] = []
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for node in nodes:
        [message] = from_chat([node["message"]])
        tokens = node.get("token_ids") or []
        own = [bool(one) for one in node.get("mask") or [False] * len(tokens)]
        content = [len(ids) + i for i, inside in enumerate(node.get("is_content") or []) if inside]
        span = node.get("span") or ([content[0], content[-1] + 1] if content else [None, None])
        values = iter(node.get("logprobs") or [])
        logprobs += [_known(next(values, None)) if action else math.nan for action in own]
        ids += tokens
        mask += own
        update = {"token_start": span[0], "token_end": span[1], "reward": node.get("reward")}
        messages.append(message.model_copy(update=update))
    rewards = trace.get("rewards") or {}
    total = sum(float(one["score"]) * float(one.get("weight", 1.0)) for one in rewards.values())
    extra = dict((trace.get("info") or {}).get("agentrl") or {})
    tools = extra.pop("tools", None) or json_text(trace.get("tools") or [])
    name = extra.get("trajectory_id") or trace.get("id") or f"trace-{number}"
    if branch is not None:
        extra |= {"trajectory_id": f"{name}-{branch}", "segment": branch}
    task = trace.get("task") or episode.get("task") or {}
    return make_row(
        number,
        messages,
        extra=extra,
        trajectory_id=name,
        episode_id=str(episode.get("id") or name),
        task_id=str(task.get("key") or task.get("hash") or f"task-{number}"),
        group_id=(episode.get("group") or {}).get("id"),
        env=(episode.get("env") or {}).get("id") or "verifiers",
        tools=tools,
        reward=total,
        success=total >= 1.0,
        termination=_termination(trace),
        reward_components=[
            RewardComponent(name=key, value=float(one["score"]), weight=float(one.get("weight", 1.0)))
            for key, one in rewards.items()
        ],
        input_ids=ids,
        action_mask=mask,
        logprobs=logprobs,
    )


def _known(value: float | None) -> float:
    return math.nan if value is None else value
