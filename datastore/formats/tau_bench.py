"""Results of tau-bench (the first version): a JSON array of ``{task_id, reward, info, traj, trial}``. Read only.

``traj`` is OpenAI chat, with the policy as its system message. ``reward`` is 1 or 0 and is the success;
``info.reward_info.info.r_actions`` and ``r_outputs`` are components. ``task_id`` is a number that each domain counts
from 0: the content of ``info.task`` tells tasks apart. A traceback in ``info.error`` makes the row an
``infra_error``, unscored; the simulated user's ``###STOP###`` is the end of an answered
episode, and any other end is unknown. Not carried: the task's text (its digest is in the task's id), the actions it
asks for, ``info.error``, ``info.source``, ``user_cost``.
"""

from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats.chat import is_chat
from agentrl.datastore.formats.messages import from_chat
from agentrl.datastore.formats.rows import components, make_row, score
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Termination

_KNOWN = frozenset({"task_id", "reward", "info", "traj", "trial"})
_KNOWN_INFO = frozenset({"reward_info"})
_KNOWN_REWARD = frozenset({"reward", "info"})
_PARTS = ("r_actions", "r_outputs")
_KNOWN_PARTS = frozenset(_PARTS)


def fits(head: Any) -> int:
    return (
        2
        if isinstance(head, dict) and "task_id" in head and (is_chat(head.get("traj")) or head.get("traj") == [])
        else 0
    )


def read(source: Source) -> Iterator[Row]:
    def convert(record: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(record, _KNOWN)
        info = record.get("info") or {}
        source.notes.rest(info, _KNOWN_INFO, "info.")
        failed = bool(info.get("error"))
        reward = None if failed else score(record, "reward", source.notes)
        stopped = bool(record["traj"]) and "###STOP###" in str(record["traj"][-1].get("content"))
        scored = info.get("reward_info") or {}
        known = _KNOWN_REWARD if scored.get("reward") == record.get("reward") else _KNOWN_REWARD - {"reward"}
        source.notes.rest(scored, known, "info.reward_info.")
        detail = scored.get("info") or {}
        source.notes.rest(detail, _KNOWN_PARTS, "info.reward_info.info.")
        yield make_row(
            from_chat(record["traj"], source.notes),
            source="tau-bench",
            task=record["task_id"],
            task_content=info.get("task"),
            sample_index=record.get("trial"),
            env="tau-bench",
            reward=reward,
            success=None if reward is None else reward >= 1.0,
            reward_components=components(
                {name: detail.get(name) for name in _PARTS}, source.notes, "info.reward_info.info."
            ),
            termination=Termination.INFRA_ERROR if failed else Termination.ANSWERED if stopped else Termination.UNKNOWN,
        )

    return each(source, source.records(), convert)
