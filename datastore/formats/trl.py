"""TRL datasets as JSON Lines (load them with ``datasets.load_dataset("json", ...)``); arguments of calls are dicts.

- ``trl-sft``: ``messages``, ``tools``, and if the row has tokens ``input_ids`` and ``assistant_masks``
- ``trl-prompt-completion``: ``prompt`` (messages before the first assistant message), ``completion``, ``tools``
- ``trl-preference``: ``prompt``, ``chosen``, ``rejected``, ``tools``: per task the best success against the worst
  failure. Read: two rows of one task, the chosen one a success with reward 1, the rejected one a failure with 0
- ``trl-kto``: ``prompt``, ``completion``, ``label`` (success), ``tools``

``prompt`` and the others may be plain text. Carry: text, reasoning, calls, tool schemas (as JSON text, since they
differ from row to row); SFT the token ids and mask; KTO the label; preference which side won. Cannot carry:
log-probs, rewards, identity, lineage. A task without both a success and a failure gives no preference, and a row
that is unscored no ``label``: both are counted as rows that are not written.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats import anthropic, regular
from agentrl.datastore.formats.annotated import in_record, of_sides
from agentrl.datastore.formats.chat import Chat, is_chat, is_log, row_of
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import from_chat, split_prompt, to_chat, tools_text
from agentrl.datastore.formats.origin import BESIDE, beside, unspent
from agentrl.datastore.formats.rows import answered, canonical, make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import functions_text
from agentrl.schemas.trajectory import Message, Trajectory

_TOKENS = frozenset({"input_ids", "assistant_masks", "completion_mask", "labels", "attention_mask"})
_KNOWN_SFT = frozenset({"messages", "tools"}) | _TOKENS | BESIDE
_KNOWN = frozenset({"prompt", "completion", "chosen", "rejected", "label", "tools"}) | BESIDE


def _chat(messages: list[Message]) -> list[dict[str, Any]]:
    return to_chat(messages, arguments="dict")


def fits_sft(head: Any) -> int:
    if not (isinstance(head, dict) and is_chat(head.get("messages"))) or anthropic.fits(head) == 2 or is_log(head):
        return 0
    calls = [call for message in head["messages"] for call in message.get("tool_calls") or []]
    dicts = any(
        isinstance((call.get("function") or {}).get("arguments"), dict) for call in calls if isinstance(call, dict)
    )
    return 2 if "input_ids" in head or dicts else 1


def write_sft(rows: Iterable[Trajectory], path: Path) -> int:
    def line(row: Trajectory) -> dict[str, Any]:
        tokens = {"input_ids": row.input_ids, "assistant_masks": [int(is_action) for is_action in row.action_mask]}
        record = {"messages": _chat(row.messages), "tools": functions_text(row.tools)}
        return record | (tokens if row.input_ids else {}) | in_record(row, text=True)

    return write_lines(path, map(line, rows))


def read_sft(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN_SFT)
        ids = line.get("input_ids") or []
        messages = from_chat(line["messages"], source.notes)
        row = make_row(
            messages,
            source="trl",
            origin=beside(line, source.notes),
            tools=tools_text(line.get("tools")),
            input_ids=ids,
            action_mask=_mask(line, len(ids)),
            logprobs=[None] * len(ids),
        )
        yield answered(row, source.notes)

    return each(source, source.records(), convert)


def _mask(line: dict[str, Any], length: int) -> list[bool]:
    """From a mask, or from ``labels``, in which -100 marks what is not trained on."""
    for key in ("assistant_masks", "completion_mask"):
        if line.get(key):
            return [bool(is_action) for is_action in line[key]]
    if line.get("labels"):
        return [label != -100 for label in line["labels"]]
    return [False] * length


def fits_prompt_completion(head: Any) -> int:
    return 2 if isinstance(head, dict) and {"prompt", "completion"} <= head.keys() and "label" not in head else 0


def write_prompt_completion(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_prompt_completion, rows))


def _prompt_completion(row: Trajectory) -> dict[str, Any]:
    prompt, completion = split_prompt(row.messages)
    return {
        "prompt": _chat(prompt),
        "completion": _chat(completion),
        "tools": functions_text(row.tools),
        **in_record(row, text=True),
    }


def read_prompt_completion(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        messages = _joined(source, line, "completion")
        origin = beside(line, source.notes)
        yield make_row(messages, source="trl", origin=origin, tools=tools_text(line.get("tools")))

    return each(source, source.records(), convert)


def _joined(source: Source, line: dict[str, Any], rest: str) -> list[dict[str, Any]]:
    """Prompt and completion in one list; each may be plain text. ``prompt`` may be missing, ``rest`` may not."""
    chat: list[Any] = []
    for value, role in ((line.get("prompt") or [], "user"), (line[rest], "assistant")):
        chat += [{"role": role, "content": value}] if isinstance(value, str) else value
    return from_chat(chat, source.notes)


def fits_kto(head: Any) -> int:
    return 2 if isinstance(head, dict) and {"prompt", "completion", "label"} <= head.keys() else 0


def write_kto(rows: Iterable[Trajectory], path: Path) -> int:
    scored = (row for row in rows if row.success is not None)
    return write_lines(path, (_prompt_completion(row) | {"label": row.success} for row in scored))


def read_kto(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        label = line["label"]
        if label not in (True, False):  # 1 and 0 are
            raise ValueError(f"label is true or false, not {label!r}")
        label = bool(label)
        messages = _joined(source, line, "completion")
        tools = tools_text(line.get("tools"))
        origin = beside(line, source.notes)
        yield make_row(messages, source="trl", origin=origin, tools=tools, success=label, reward=float(label))

    return each(source, source.records(), convert)


def fits_preference(head: Any) -> int:
    if not isinstance(head, dict) or not {"chosen", "rejected"} <= head.keys():
        return 0
    return 2 if all(isinstance(head[side], str) or is_chat(head[side]) for side in ("chosen", "rejected")) else 0


def write_preference(rows: Iterable[Trajectory], path: Path) -> int:
    """Memory holds the best and the worst row of each task."""
    best: dict[str, Trajectory] = {}
    worst: dict[str, Trajectory] = {}

    def rank(row: Trajectory) -> tuple[float, int, str]:
        return (-row.scored_reward(), row.n_steps, row.trajectory_id)

    for row in rows:
        if row.success is None or row.reward is None:
            continue
        task = row.task_id
        if row.success and (task not in best or rank(row) < rank(best[task])):
            best[task] = row
        if not row.success and (task not in worst or rank(row) > rank(worst[task])):
            worst[task] = row

    def lines() -> Iterator[dict[str, Any]]:
        for task, winner in best.items():
            if task in worst:
                prompt, chosen = split_prompt(winner.messages)
                _, rejected = split_prompt(worst[task].messages)
                sides = {"chosen": _chat(chosen), "rejected": _chat(rejected)}
                yield {
                    "prompt": _chat(prompt),
                    **sides,
                    "tools": functions_text(winner.tools),
                    **of_sides(winner, worst[task]),
                }

    return write_lines(path, lines())


def read_preference(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        sides = [_joined(source, line, side) for side in ("chosen", "rejected")]
        yield from preference_rows(line, sides, "trl", beside(line, source.notes))

    return each(source, source.records(), convert)


def preference_rows(
    line: dict[str, Any], sides: list[list[dict[str, Any]]], source: str, origin: dict[str, Any]
) -> Iterator[Row]:
    """Rows of one task from the messages of the chosen and of the rejected side. Without a prompt, the messages that
    both begin with are the prompt."""
    content = canonical([[message["role"], message["content"]] for message in _shared(*sides)])
    tools = tools_text(line.get("tools"))
    for index, (messages, success) in enumerate(zip(sides, (True, False), strict=True)):
        yield make_row(
            messages,
            source=source,
            origin=unspent(origin) if index else origin,
            task_content=content,
            tools=tools,
            sample_index=index,
            success=success,
            reward=float(success),
        )


def _shared(first: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for index, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return first[:index]
    return first[: min(len(first), len(other))]


class _Record(regular.Typed):
    completion: str | list[regular.TypedMessage]
    prompt: str | list[regular.TypedMessage] | None = None
    tools: regular.Raw = regular.NULL


class _Labelled(_Record, kw_only=True):
    label: bool


def _messages(
    prompt: str | list[regular.TypedMessage] | None, answer: str | list[regular.TypedMessage]
) -> list[regular.TypedMessage]:
    asked = [regular.TypedMessage("user", prompt)] if isinstance(prompt, str) and prompt else prompt or []
    return [*asked, *([regular.TypedMessage("assistant", answer)] if isinstance(answer, str) else answer)]


def _row(record: _Record) -> regular.RegularRow:
    return regular.RegularRow(_messages(record.prompt, record.completion), {"tools": regular.tools_of(record.tools)})


def _labelled_row(record: _Labelled) -> regular.RegularRow:
    row = _row(record)
    return regular.RegularRow(row.messages, {**row.fields, "success": record.label, "reward": float(record.label)})


REGULAR_SFT = regular.Regular("trl", Chat, row_of, chat=True)
REGULAR_PROMPT_COMPLETION = regular.Regular("trl", _Record, _row, chat=True)
REGULAR_KTO = regular.Regular("trl", _Labelled, _labelled_row, chat=True)
