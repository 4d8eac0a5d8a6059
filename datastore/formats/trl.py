"""TRL datasets as JSON Lines (load them with ``datasets.load_dataset("json", ...)``); arguments of calls are dicts.

- ``trl-sft``: ``messages``, ``tools``, and where the row has tokens ``input_ids`` and ``assistant_masks``
- ``trl-prompt-completion``: ``prompt`` (messages before the first assistant message), ``completion``, ``tools``
- ``trl-preference``: ``prompt``, ``chosen``, ``rejected``, ``tools``: per task the best success against the worst
  failure
- ``trl-kto``: ``prompt``, ``completion``, ``label`` (success), ``tools``

Carry: text, reasoning, calls, tool schemas (as JSON text, since they differ from row to row); SFT the token ids and
mask; KTO the label; preference which side won. Cannot carry: log-probs, rewards, lineage. A task without both a
success and a failure gives no preference.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datastore.formats.common import from_chat, json_text, make_row, read_lines, split_prompt, to_chat, write_lines
from schemas.trajectory import Message, Role, Trajectory


def _chat(messages: list[Message]) -> list[dict[str, Any]]:
    return to_chat(messages, arguments="dict")


def write_sft(rows: Iterable[Trajectory], path: Path) -> int:
    def line(row: Trajectory) -> dict[str, Any]:
        tokens = {"input_ids": row.input_ids, "assistant_masks": [int(one) for one in row.action_mask]}
        return {"messages": _chat(row.messages), "tools": row.tools} | (tokens if row.input_ids else {})

    return write_lines(path, map(line, rows))


def read_sft(path: Path) -> Iterator[Trajectory]:
    for number, line in enumerate(read_lines(path)):
        ids = line.get("input_ids") or []
        yield make_row(
            number,
            from_chat(line["messages"]),
            tools=json_text(line.get("tools") or []),
            input_ids=ids,
            action_mask=[bool(one) for one in line.get("assistant_masks") or [0] * len(ids)],
            logprobs=[None] * len(ids),
        )


def write_prompt_completion(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_prompt_completion, rows))


def _prompt_completion(row: Trajectory) -> dict[str, Any]:
    prompt, completion = split_prompt(row.messages)
    return {"prompt": _chat(prompt), "completion": _chat(completion), "tools": row.tools}


def read_prompt_completion(path: Path) -> Iterator[Trajectory]:
    for number, line in enumerate(read_lines(path)):
        yield make_row(number, _joined(line, "completion"), tools=json_text(line.get("tools") or []))


def _joined(line: dict[str, Any], rest: str) -> list[Message]:
    """Prompt and completion in one list; each may be plain text."""
    parts = []
    for key, role in (("prompt", Role.USER), (rest, Role.ASSISTANT)):
        value = line.get(key) or []
        parts += [Message(role=role, content=value)] if isinstance(value, str) else from_chat(value)
    return parts


def write_kto(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, (_prompt_completion(row) | {"label": row.success} for row in rows))


def read_kto(path: Path) -> Iterator[Trajectory]:
    for number, line in enumerate(read_lines(path)):
        label = bool(line["label"])
        tools = json_text(line.get("tools") or [])
        yield make_row(number, _joined(line, "completion"), tools=tools, success=label, reward=float(label))


def write_preference(rows: Iterable[Trajectory], path: Path) -> int:
    tasks: dict[str, list[Trajectory]] = {}
    for row in rows:
        tasks.setdefault(row.task_id, []).append(row)

    def lines() -> Iterator[dict[str, Any]]:
        for group in tasks.values():
            ranked = sorted(group, key=lambda row: (-(row.reward or 0.0), row.n_steps, row.trajectory_id))
            best, worst = ranked[0], ranked[-1]
            if best.success and not worst.success:
                prompt, chosen = split_prompt(best.messages)
                _, rejected = split_prompt(worst.messages)
                sides = {"chosen": _chat(chosen), "rejected": _chat(rejected)}
                yield {"prompt": _chat(prompt), **sides, "tools": best.tools}

    return write_lines(path, lines())


def read_preference(path: Path) -> Iterator[Trajectory]:
    """Two rows per line, of one task: the chosen one a success with reward 1, the rejected one a failure with 0."""
    for number, line in enumerate(read_lines(path)):
        for side, (key, success) in enumerate((("chosen", True), ("rejected", False))):
            yield make_row(
                2 * number + side,
                _joined(line, key),
                tools=json_text(line.get("tools") or []),
                task_id=f"task-{number:06d}",
                group_id=f"task-{number:06d}",
                sample_index=side,
                success=success,
                reward=float(success),
            )
