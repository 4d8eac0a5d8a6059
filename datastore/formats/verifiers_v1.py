"""Episodes of verifiers from its version 1 on, JSON Lines: ``traces.jsonl``, an episode with its ``traces`` per
line, or a trace per line.

A trace is a tree of ``nodes``, each a message with its ``token_ids``, ``mask``, ``is_content`` and one log-prob per
true of the mask; every path to a leaf is a row, a segment of one episode. The reward is the sum of ``score * weight``
of ``rewards``; a reward that is None was not scored, and a trace without any is unscored. ``rewards`` and ``metrics``
are components (a metric has weight 0). A reward is no success: give ``--success "reward >= 1"`` or the like. ``agent``
gives name, model (policy) and ``trainable``: a trace that is not trained (a judge, a fixed opponent) is tagged
``not-trained``. ``stop_condition``, ``is_timeout``, ``errors`` of a trace that is not ``ok``, and the ``finish_reason``
of the last of ``calls`` give the end; their ``usage`` and ``timing.start`` are the row's. Tools are those of the first
node, else the trace's.

Carries token ids, mask, log-probs and all message spans exactly, also without spans. What has no place goes under
``info.agentrl``. Not carried: stage, run, fingerprint and time, which are the importer's; others' ``calls``,
``timing``, ``advantages``, ``reference_logprobs``, ``loss_weights``.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import from_chat, to_chat, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import Calls, moment, unspent
from agentrl.datastore.formats.rows import carried, component, components, finite, make_row, termination, untrained
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import bare
from agentrl.datastore.formats.verifiers import STOPS
from agentrl.schemas.trajectory import Role, Termination, Trajectory

_TASK = frozenset({"type", "key", "hash"})
_KNOWN = {
    "": frozenset({"id", "env", "task", "group", "ok", "traces"}),
    "env": frozenset({"id", "name"}),
    "group": frozenset({"id"}),
}
_KNOWN_TRACE = {
    "": frozenset(
        {"version", "id", "task", "agent", "tools", "nodes", "rewards", "metrics", "info", "is_completed", "ok"}
        | {"stop_condition", "is_timeout"}
    ),
    "info": frozenset(),
    "task": _TASK,
    "agent": frozenset({"name", "config", "trainable"}),
    "agent.config": frozenset({"model"}),
}
_KNOWN_REWARD = frozenset({"score", "weight"})
_KNOWN_NODE = frozenset(
    {"parent", "message", "sampled", "token_ids", "mask", "is_content", "logprobs", "span", "reward", "tools"}
)


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    return 2 if isinstance(head.get("traces"), list) or {"nodes", "task", "agent"} <= head.keys() else 0


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_episode, rows))


def _episode(row: Trajectory) -> dict[str, Any]:
    trace = {
        "version": 1,
        "id": row.trajectory_id,
        "task": {"type": "prompt", "key": row.task_id, "data": {"prompt": row.prompt}},
        "agent": {"name": row.agent, "config": {"model": row.policy}},
        "tools": bare(row.tools),
        "nodes": _nodes(row),
        "calls": [],
        "rewards": {part.name: {"score": part.value, "weight": part.weight} for part in row.reward_components},
        "metrics": {},
        "info": {"agentrl": carried(row) | {"tools": row.tools}},
        "is_completed": row.termination is Termination.ANSWERED,
        "ok": row.termination not in (Termination.ENV_ERROR, Termination.INFRA_ERROR),
        "stop_condition": row.termination.value,
    }
    group = {"group": {"id": row.group_id}} if row.group_id else {}
    return group | {
        "id": row.episode_id,
        "env": {"id": row.env, "name": row.env},
        "task": trace["task"],
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
            "span": None if start is None else [start, end],  # no token can mark what is empty or missing
        }
        done = stop
        nodes.append(node)
    return nodes


def read(source: Source) -> Iterator[Row]:
    def convert(episode: dict[str, Any]) -> Iterator[Row]:
        if "nodes" in episode:
            episode = {"id": episode.get("id"), "traces": [episode]}
        if not all("agentrl" in (trace.get("info") or {}) for trace in episode["traces"]):
            source.notes.inside(episode, _KNOWN)
        if not episode["traces"]:
            source.notes.remark("episodes without a trace: no row")
        for trace in episode["traces"]:
            _count_rest(trace, source)
            paths, origin = _paths(trace["nodes"]), _origin(trace)
            for branch, nodes in enumerate(paths):
                own = unspent(origin) if branch else origin
                yield _row(source, episode, trace, nodes, branch if len(paths) > 1 else None, own)

    return each(source, source.records(), convert)


def _count_rest(trace: dict[str, Any], source: Source) -> None:
    """Count what no column takes of a trace of others. What we wrote holds it again under ``info.agentrl``."""
    notes = source.notes
    info = trace.get("info") or {}
    if "agentrl" in info:
        return
    notes.inside(trace, _KNOWN_TRACE, "traces.")
    for reward in (trace.get("rewards") or {}).values():
        if isinstance(reward, dict):
            notes.rest(reward, _KNOWN_REWARD, "traces.rewards.")


def _paths(nodes: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The nodes from the root to each leaf. Raises ValueError if a parent does not come before its child."""
    parents = {node.get("parent") for node in nodes}
    paths: list[list[dict[str, Any]]] = []
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        chain: list[dict[str, Any]] = []
        at: int | None = leaf
        while at is not None:
            chain.append(nodes[at])
            above = nodes[at].get("parent")
            if above is not None and not 0 <= above < at:
                raise ValueError(f"node {at} has the parent {above}, which does not come before it")
            at = above
        paths.append(chain[::-1])
    return paths


def _origin(trace: dict[str, Any]) -> dict[str, Any]:
    """When a trace began, and what its calls used. ``calls`` and ``timing`` are counted as a whole: most is not
    read."""
    spent = Calls(Notes())
    for call in trace.get("calls") or []:
        if isinstance(call, dict):
            spent.usage(call.get("usage"), "")
    timing = trace.get("timing")
    start = moment(timing.get("start")) if isinstance(timing, dict) else None
    return spent.fields() | {"source_id": trace.get("id"), "source_time": start}


def _row(
    source: Source,
    episode: dict[str, Any],
    trace: dict[str, Any],
    nodes: list[dict[str, Any]],
    branch: int | None,
    origin: dict[str, Any],
) -> Row:
    messages, tokens = _content(nodes, source)
    extra = dict((trace.get("info") or {}).get("agentrl") or {})
    tools = extra.pop("tools", None) or tools_text(nodes[0].get("tools") or trace.get("tools"))
    name = extra.get("trajectory_id") or trace.get("id") or f"trace-{source.number}"
    if branch is not None:
        extra |= {"trajectory_id": f"{name}-{branch}", "segment": branch}
    rewards = {key: reward for key, reward in (trace.get("rewards") or {}).items() if reward is not None}
    parts = [_component(key, reward) for key, reward in rewards.items()]
    agent = trace.get("agent") if isinstance(trace.get("agent"), dict) else {}
    assert agent is not None
    task = trace.get("task") or episode.get("task") or {}
    stop = _end(trace, source)
    env = episode.get("env") or {}
    return make_row(
        messages,
        source="verifiers",
        extra=extra,
        origin=origin,
        task=task.get("key") or task.get("hash"),
        task_content=task.get("data"),
        trajectory_id=name,
        episode_id=str(episode.get("id") or name),
        group_id=(episode.get("group") or {}).get("id"),
        agent=agent.get("name"),
        policy=(agent.get("config") or {}).get("model"),
        env=env.get("name") or env.get("id"),
        tools=tools,
        reward=sum(part["value"] * part["weight"] for part in parts) if parts else None,
        termination=stop,
        tags=untrained() if agent.get("trainable") is False else None,
        reward_components=parts + components(trace.get("metrics") or {}, source.notes, "traces.metrics.", 0.0),
        **tokens,
    )


def _end(trace: dict[str, Any], source: Source) -> Termination | None:
    """The end that the trace names; that of its last call if the agent completed with an answer that was cut off."""
    stop = termination(STOPS, trace.get("stop_condition"), source.notes)
    if stop not in (None, Termination.ANSWERED, Termination.UNKNOWN):
        return stop
    if trace.get("is_timeout"):
        return Termination.TIME_LIMIT
    if trace.get("errors") and not trace.get("ok"):
        return Termination.INFRA_ERROR
    calls = [call for call in trace.get("calls") or [] if isinstance(call, dict) and not call.get("error")]
    cut = bool(calls) and calls[-1].get("finish_reason") == "length"
    return Termination.MAX_TOKENS if cut else stop


def _component(name: str, reward: dict[str, Any]) -> dict[str, Any]:
    return component(name, float(reward["score"]), float(reward.get("weight", 1.0)))


def _content(nodes: list[dict[str, Any]], source: Source) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Fields of the messages of a path, and its token columns."""
    messages: list[dict[str, Any]] = []
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for node in nodes:
        source.notes.rest(node, _KNOWN_NODE, "traces.nodes.")
        [message] = from_chat([node["message"]], source.notes)
        tokens = node.get("token_ids") or []
        own = [bool(is_action) for is_action in node.get("mask") or [False] * len(tokens)]
        span = (node["span"] or [None, None]) if "span" in node else _span(node, len(ids), own)
        values = iter(node.get("logprobs") or [])
        logprobs += [_known(next(values, None)) if action else math.nan for action in own]
        ids += tokens
        mask += own
        messages.append(message | {"token_start": span[0], "token_end": span[1], "reward": node.get("reward")})
    return messages, {"input_ids": ids, "action_mask": mask, "logprobs": logprobs}


def _span(node: dict[str, Any], start: int, mask: list[bool]) -> list[int | None]:
    """Of what a model sampled the sampled tokens, otherwise the tokens that are content."""
    inside = node.get("is_content") or []
    content = [start + i for i, is_action in enumerate(inside) if is_action]
    if node.get("sampled") and any(mask):
        places = [start + i for i, is_action in enumerate(mask) if is_action]
        content = [min([*content, *places]), max([*content, *places])] if content else [places[0], places[-1]]
    return [content[0], content[-1] + 1] if content else [None, None]


def _known(value: float | None) -> float:
    return math.nan if value is None else value
