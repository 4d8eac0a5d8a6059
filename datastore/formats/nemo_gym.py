"""NeMo Gym rollouts, JSON Lines: ``responses_create_params`` (what was asked), ``response`` (a Responses object) and
``reward``; ``verifier_metadata``, ``agent_ref`` and the environment's own keys beside them. Read only.

The items are those of ``openai-responses``. ``reward`` is a number and no success. Top-level numbers beside it are
components (booleans as 0 and 1). Output items with ``prompt_token_ids``, ``generation_token_ids`` and
``generation_log_probs`` (a training rollout) give exact tokens. ``agent_ref.name`` is the agent, ``response.model``
the policy, ``_ng_rollout_index`` the sample. The environment's other keys are counted.
A response whose output is a list of transitions (Aviary) gives its last one, which holds the whole conversation.
"""

from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats import regular
from agentrl.datastore.formats.origin import beside, spoken_id
from agentrl.datastore.formats.responses import KNOWN, Items, messages_of, response_row
from agentrl.datastore.formats.rows import components, number, score
from agentrl.datastore.formats.source import Row, Source, each

_KNOWN = frozenset(
    {"responses_create_params", "response", "reward", "agent_ref", "id", "_ng_task_index", "_ng_rollout_index"}
)
_KNOWN_AGENT = frozenset({"name", "type"})
_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def fits(head: Any) -> int:
    return 3 if isinstance(head, dict) and {"responses_create_params", "response"} <= head.keys() else 0


def read(source: Source) -> Iterator[Row]:
    def convert(record: dict[str, Any]) -> Iterator[Row]:
        metrics = {
            key: value
            for key, value in record.items()
            if key not in _KNOWN and key[0] != "_" and number(value) is not None
        }
        source.notes.rest(record, _KNOWN | metrics.keys())
        source.notes.inside(record, {"responses_create_params": KNOWN, "response": KNOWN})
        agent = record.get("agent_ref") if isinstance(record.get("agent_ref"), dict) else {}
        source.notes.rest(agent or {}, _KNOWN_AGENT, "agent_ref.")
        task = record.get("id", record.get("_ng_task_index"))
        asked, output = record["responses_create_params"], (record.get("response") or {}).get("output") or []
        if output and isinstance(output[-1], list):
            source.notes.remark("rollouts of transitions: the last one holds the conversation")
            asked, output = {**asked, "input": []}, output[-1]
        row = response_row(
            asked,
            {**(record.get("response") or {}), "output": [_plain(item) for item in output]},
            source.notes,
            source="nemo-gym",
            origin=beside(record.get("response") or {}, source.notes, "response.") | {"source_id": spoken_id(task)},
            task=task,
            env=(agent or {}).get("name"),
            agent=(agent or {}).get("name"),
            sample_index=record.get("_ng_rollout_index"),
            reward=score(record, "reward", source.notes),
            reward_components=components(metrics, source.notes, ""),
        )
        yield _with_tokens(row, output, source)

    return each(source, source.records(), convert)


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in _TOKENS}


def _with_tokens(row: Row, output: list[dict[str, Any]], source: Source) -> Row:
    """The row with the tokens of its output items, if each prompt continues what came before."""
    items = [item for item in output if item.get("generation_token_ids")]
    if not items:
        return row
    columns: dict[str, list[Any]] = {"input_ids": [], "action_mask": [], "logprobs": []}
    for item in items:
        prompt, sampled = item.get("prompt_token_ids"), item["generation_token_ids"]
        known = columns["input_ids"]
        if not prompt or prompt[: len(known)] != known:
            source.notes.remark("token ids of the items are not one sequence: the row comes without tokens")
            return row
        new = prompt[len(known) :]
        values = item.get("generation_log_probs") or [float("nan")] * len(sampled)
        columns["input_ids"] = prompt + sampled
        columns["action_mask"] += [False] * len(new) + [True] * len(sampled)
        columns["logprobs"] += [float("nan")] * len(new) + list(values)
    return row | columns


class _Asked(regular.Typed):
    input: str | Items | None = None
    tools: regular.Raw = regular.NULL
    instructions: str | None = None


class _Response(regular.Typed):
    output: Items
    model: str | None = None


class _Record(regular.Typed):
    responses_create_params: _Asked
    response: _Response
    reward: float | None = None


def _row(record: _Record) -> regular.RegularRow:
    asked, response = record.responses_create_params, record.response
    fields = {"tools": regular.tools_of(asked.tools), **regular.acting(response.model)}
    if record.reward is not None:
        fields["reward"] = record.reward
    return regular.RegularRow(messages_of(asked.instructions, asked.input, response.output), fields)


REGULAR = regular.Regular("nemo-gym", _Record, _row)
