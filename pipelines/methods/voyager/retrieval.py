"""Which skills fit a task: those that solved the tasks most like it.

A skill is a form of calls, so what it does is told in words that a task which it fits does not hold. The tasks that it
was verified on hold them. So a library keeps these as its tests, and the nearest of them vote.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from agentrl.datastore.search.embedding import pretrained
from agentrl.datastore.search.exact import nearest
from agentrl.environments.bm25 import Index
from agentrl.environments.skilled import Skill
from agentrl.schemas.note import Note

NEAREST = 16
"""Tests that vote."""

TESTS = pa.schema(
    [
        pa.field("env", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("skills", pa.list_(pa.string()), nullable=False),
        pa.field("embedder", pa.string()),
        pa.field("identity", pa.string()),
        pa.field("vector", pa.list_(pa.float32())),
    ]
)
"""The tests of a library: train tasks, and the names of the ``skills`` that each was solved with. ``vector`` is the
prompt's, by the ``embedder`` of that name and content (``identity``); null if the library has none."""


@dataclass
class SkillTests:
    """Tests by environment and task."""

    prompts: dict[tuple[str, str], str] = field(default_factory=dict)
    skills: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, env: str, task_id: str, prompt: str, names: Iterable[str]) -> None:
        """A task that was solved with skills of these names."""
        self.prompts[env, task_id] = prompt
        self.skills.setdefault((env, task_id), set()).update(names)

    def table(self, embedder: str | None) -> pa.Table:
        """The tests, with :data:`TESTS`, embedded anew. Raises StoreError if the embedder is not there."""
        model = pretrained(embedder) if embedder and self.prompts else None
        vectors = list(model.encode(list(self.prompts.values()))) if model else [None] * len(self.prompts)
        rows = [
            {
                "env": env,
                "task_id": task_id,
                "prompt": prompt,
                "skills": sorted(self.skills[env, task_id]),
                "embedder": embedder if model else None,
                "identity": model.identity if model else None,
                "vector": vector,
            }
            for ((env, task_id), prompt), vector in zip(self.prompts.items(), vectors, strict=True)
        ]
        return pa.Table.from_pylist(rows, TESTS)


def skill_of(note: Note) -> Skill:
    return Skill.model_validate_json(note.code)


def fitting(
    notes: Sequence[Note], tests: Sequence[dict[str, Any]], prompts: Sequence[str], k: int | None
) -> list[list[Skill]]:
    """For each prompt the ``k`` skills of one environment that solved most of the tests nearest to it, and among equals
    those that were called most; all skills if ``k`` is None. Skills stand in the order of the library, so that prompts
    share their beginning. Raises ValueError if the embedder is not the one of the tests."""
    skills = [skill_of(note) for note in notes]
    if k is None or not skills:
        return [skills for _ in prompts]
    usual = [skill_of(note).name for note in sorted(notes, key=lambda note: -note.trials)]
    chosen = []
    for near in _nearest(tests, prompts):
        votes = Counter[str](name for number in near for name in tests[number]["skills"])
        best = sorted(usual, key=lambda name: -votes[name])[:k]
        chosen.append([skill for skill in skills if skill.name in best])
    return chosen


def _nearest(tests: Sequence[dict[str, Any]], prompts: Sequence[str]) -> list[list[int]]:
    """For each prompt the numbers of the tests nearest to it: by their vectors, or else by their words (BM25)."""
    if not tests:
        return [[] for _ in prompts]
    if tests[0]["embedder"] is None:
        index = Index({f"{number:09}": test["prompt"] for number, test in enumerate(tests)})
        return [[int(name) for name in index.search(prompt)[:NEAREST]] for prompt in prompts]
    model = pretrained(tests[0]["embedder"])
    if model.identity != tests[0]["identity"]:
        raise ValueError(
            f"inputs.tests: the library was embedded by {tests[0]['embedder']!r} as {tests[0]['identity']}, which is "
            f"{model.identity} now; run the stage notes.skills again"
        )
    vectors = np.array([test["vector"] for test in tests], np.float32)
    return [nearest(vectors, query, NEAREST)[0].tolist() for query in model.encode(list(prompts))]
