"""Results of verifiers before its version 1, JSON Lines: ``results.jsonl`` of an evaluation.

Keys: ``prompt``, ``completion`` (chat or text; calls may be JSON text), ``reward``, ``metrics`` and the same
metrics again at the top level (older files have them there alone), ``tool_defs`` or ``info.oai_tools``,
``example_id`` or ``id``, ``answer``, ``task``, ``stop_condition``, ``is_truncated``, ``error``, and with ``-C
trajectory`` each turn's ``tokens``. Turns whose prompt continues the turn before are one row; if the context was
rewritten, a new segment of the same episode begins. A reward is a number and no success: give ``--success "reward
>= 1"`` or the like. A row with ``error`` is an ``infra_error`` and unscored; an ``error_chain`` is counted as
ignored.

Carries token ids, mask and log-probs exactly, also without spans. What has no place goes under ``info.agentrl``.
Cannot carry: spans of other than assistant messages. Not read, and counted: ``answer``, ``timing``,
``response``, ``advantage``, the text of ``error``.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import from_chat, split_prompt, to_chat, tools_text
from agentrl.datastore.formats.origin import Calls, spoken_id
from agentrl.datastore.formats.rows import carried, components, finite, make_row, number, score, termination
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import bare
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Role, Termination, Trajectory

STOPS = {
    "max_turns_reached": Termination.MAX_STEPS,
    "max_turns": Termination.MAX_STEPS,
    "prompt_too_long": Termination.MAX_CONTEXT,
    "context_length": Termination.MAX_CONTEXT,
    "max_total_tokens_reached": Termination.MAX_TOKENS,
    "max_input_tokens": Termination.MAX_TOKENS,
    "max_output_tokens": Termination.MAX_TOKENS,
    "max_total_tokens": Termination.MAX_TOKENS,
    "timeout_reached": Termination.TIME_LIMIT,
    "timeout": Termination.TIME_LIMIT,
    "has_error": Termination.INFRA_ERROR,
    "error": Termination.INFRA_ERROR,
    "no_tools_called": Termination.ANSWERED,
    "agent_completed": Termination.ANSWERED,
    "user_closed": Termination.ANSWERED,
    "has_final_env_response": Termination.ANSWERED,
    "max_turns_exceeded": Termination.MAX_STEPS,
    "empty_action": Termination.FORMAT_ERROR,
    "compaction_failed": Termination.MAX_CONTEXT,
    "task_error": Termination.ENV_ERROR,
    "env_error": Termination.ENV_ERROR,
    "toolset_error": Termination.ENV_ERROR,
    **dict.fromkeys(
        [f"{part}_error" for part in ("provider", "harness", "sandbox", "interception", "tunnel", "rollout")],
        Termination.INFRA_ERROR,
    ),
    **dict.fromkeys(
        [f"{stage}_timeout" for stage in ("boot", "setup", "agent", "harness", "rollout", "finalize", "scoring")],
        Termination.TIME_LIMIT,
    ),
}
"""Ends by the names that verifiers gives them (0.1 to 0.4)."""
_KNOWN = frozenset(
    {"prompt", "completion", "reward", "metrics", "tool_defs", "oai_tools", "example_id", "id", "task", "info", "model"}
    | {"stop_condition", "is_truncated", "is_completed", "trajectory", "token_usage"}
)
_STANDARD = _KNOWN | {"answer", "error", "timing", "error_chain", "long_error_chain", "state"}
_KNOWN_INFO = frozenset({"agentrl", "oai_tools"})
_KNOWN_TURN = frozenset({"prompt", "completion", "tokens", "reward", "extras"})
_KNOWN_EXTRAS = frozenset({"trailing_ids"})
_KNOWN_TOKENS = frozenset({"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs"})


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not {"prompt", "completion", "reward"} <= head.keys():
        return 0
    return 3 if {"example_id", "metrics", "is_completed", "answer", "task", "info", "id"} & head.keys() else 2


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, (_line(index, row) for index, row in enumerate(rows)))


def _line(index: int, row: Trajectory) -> dict[str, Any]:
    prompt, completion = split_prompt(row.messages)
    turns, placed = _turns(row)
    ours = carried(row) | {"tools": row.tools}
    if row.input_ids and not placed:  # no spans say which turn a token belongs to
        mask = [int(is_action) for is_action in row.action_mask]
        ours["tokens"] = {"input_ids": row.input_ids, "action_mask": mask, "logprobs": finite(row.logprobs)}
    return {
        "example_id": index,
        "prompt": to_chat(prompt),
        "completion": to_chat(completion),
        "reward": row.reward,
        "answer": "",
        "info": {"agentrl": ours},
        "metrics": {part.name: part.value for part in row.reward_components},
        "is_completed": row.termination is Termination.ANSWERED,
        "is_truncated": row.termination is Termination.MAX_TOKENS,
        "stop_condition": row.termination.value,
        "tool_defs": bare(row.tools),
        "trajectory": turns,
    }


def _turns(row: Trajectory) -> tuple[list[dict[str, Any]], bool]:
    """Turns, and whether all that the policy sampled is in them."""
    turns: list[dict[str, Any]] = []
    sampled = 0
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
            sampled += sum(row.action_mask[start:end])
            turn["tokens"] = {
                "prompt_ids": row.input_ids[:start],
                "prompt_mask": [0] * start,
                "completion_ids": row.input_ids[start:end],
                "completion_mask": [int(is_action) for is_action in row.action_mask[start:end]],
                "completion_logprobs": finite(row.logprobs[start:end]),
            }
        turns.append(turn)
    with_tokens = [turn for turn in turns if "tokens" in turn]
    if with_tokens:
        last = with_tokens[-1]["tokens"]
        end = len(last["prompt_ids"]) + len(last["completion_ids"])
        with_tokens[-1]["extras"] = {"trailing_ids": row.input_ids[end:]}
    return turns, bool(with_tokens) and sampled == row.n_action_tokens


def read(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        return _rows(line, source)

    return each(source, source.records(), convert)


def _rows(line: dict[str, Any], source: Source) -> Iterator[Row]:
    notes = source.notes
    info = line.get("info") or {}
    info = loads(info) if isinstance(info, str) else info
    extra = dict(info.get("agentrl") or {})
    own = extra.pop("tokens", None)
    metrics = {name: value for name, value in line.items() if name not in _STANDARD and number(value) is not None}
    notes.rest(line, _KNOWN | metrics.keys())
    notes.rest(info, _KNOWN_INFO, "info.")
    metrics |= line.get("metrics") or {}
    tools = extra.pop("tools", None) or tools_text(
        line.get("tool_defs") or line.get("oai_tools") or info.get("oai_tools")
    )
    messages = from_chat(_chat(line.get("prompt"), "user") + _chat(line.get("completion"), "assistant"), notes)
    example = line.get("example_id", line.get("id"))
    failed = bool(line.get("error"))
    stop = termination(STOPS, line.get("stop_condition"), notes)
    if stop is None and line.get("is_truncated"):
        stop = Termination.MAX_TOKENS
    name = extra.get("trajectory_id") or f"example-{example}-{source.number}"
    turns = line.get("trajectory") or []
    calls = Calls(notes)
    calls.usage(line.get("token_usage"), "token_usage.")
    for turn in turns:
        notes.rest(turn, _KNOWN_TURN, "trajectory.")
        notes.rest(turn.get("extras") or {}, _KNOWN_EXTRAS, "trajectory.extras.")
        notes.rest(turn.get("tokens") or {}, _KNOWN_TOKENS, "trajectory.tokens.")
    segments = [(_with_rewards(messages, turns), own)] if own else _segments(turns, messages, source)
    for segment, (part, tokens) in enumerate(segments):
        many = {"trajectory_id": f"{name}-{segment}", "segment": segment} if len(segments) > 1 else {}
        yield make_row(
            part,
            source="verifiers",
            extra=extra | many,
            origin={"source_id": spoken_id(example)} | ({} if segment else calls.fields()),
            task=f"{line.get('task') or 'example'}/{example}" if example is not None else None,
            task_content=[_chat(line.get("prompt"), "user"), line.get("answer")],
            trajectory_id=name,
            episode_id=name,
            env=line.get("task") if isinstance(line.get("task"), str) else None,
            policy=line.get("model"),
            tools=tools,
            reward=None if failed else score(line, "reward", notes),
            termination=Termination.INFRA_ERROR if failed and not extra else stop,
            reward_components=components(metrics, notes, "metrics."),
            **tokens,
        )


def _chat(value: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value or [])


def _with_rewards(messages: list[dict[str, Any]], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the turns' rewards if there is a turn for each of the assistant's."""
    spoken = [message for message in messages if message["role"] == "assistant"]
    if len(spoken) == len(turns):
        for message, turn in zip(spoken, turns, strict=True):
            message["reward"] = turn.get("reward")
    return messages


def _segments(
    turns: list[dict[str, Any]], messages: list[dict[str, Any]], source: Source
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Contiguous stretches of turns, with their messages and token columns."""
    tokens_of_turns = [turn.get("tokens") or {} for turn in turns]
    if not any(tokens_of_turns):
        return [(_with_rewards(messages, turns), {})]
    if any(tokens.get("completion_ids") and not tokens.get("prompt_ids") for tokens in tokens_of_turns):
        source.notes.remark("completion ids without prompt ids: the row comes without tokens")
        return [(messages, {})]
    segments: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    columns: dict[str, list[Any]] = {}
    part: list[dict[str, Any]] = []
    for turn, tokens in zip(turns, tokens_of_turns, strict=True):
        prompt, completion = tokens.get("prompt_ids") or [], tokens.get("completion_ids") or []
        before = from_chat(_chat(turn.get("prompt"), "user"), source.notes)
        if not columns or prompt[: len(columns["input_ids"])] != columns["input_ids"]:
            columns = {"input_ids": [], "action_mask": [], "logprobs": []}
            part = list(before)
            segments.append((part, columns))
        else:
            part += before[len(part) :]
        _extend(columns, prompt, completion, tokens)
        answers = from_chat(_chat(turn.get("completion"), "assistant"), source.notes)
        if answers:
            start = len(prompt)
            answers[0] |= {"token_start": start, "token_end": start + len(completion), "reward": turn.get("reward")}
        part += answers
        trailing = (turn.get("extras") or {}).get("trailing_ids") or []
        _extend(columns, columns["input_ids"] + trailing, [], {})
    if len(segments) == 1:  # tool messages after the last turn stand in the completion alone
        part += messages[len(part) :]
    return segments


def _extend(columns: dict[str, list[Any]], prompt: list[int], completion: list[int], tokens: dict[str, Any]) -> None:
    """Append what a prompt adds, and a completion."""
    new = prompt[len(columns["input_ids"]) :]
    columns["input_ids"] += new + completion
    mask = tokens.get("completion_mask") or [1] * len(completion)
    columns["action_mask"] += [False] * len(new) + [bool(is_action) for is_action in mask]
    values = list(tokens.get("completion_logprobs") or [None] * len(completion))
    known = [value if keep else None for value, keep in zip(values, mask, strict=True)]
    columns["logprobs"] += [None] * len(new) + known
