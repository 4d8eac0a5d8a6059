"""Drawing tasks: each once, in splits that share none, in the shares of the levels, with ids that no other draw has."""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

from agentrl.schemas.task import Task

SAME_IN_A_ROW = 10_000
"""If so many candidates in a row were all drawn before, there are no others."""


@dataclass(frozen=True)
class Draft:
    """What a task asks, before it has an id and a split. Two drafts of equal ``key`` are the same task; without one,
    the prompt is the key. ``truth`` and ``metadata`` are JSON-serialisable."""

    prompt: str
    truth: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    key: Hashable = None

    def task(self, task_id: str, env: str, split: str, level: int, tools: str, verifier: str) -> Task:
        return Task(
            task_id=task_id, env=env, split=split, level=level, prompt=self.prompt, tools=tools, verifier=verifier,
            ground_truth=json.dumps(self.truth, ensure_ascii=False),
            metadata=json.dumps(self.metadata, ensure_ascii=False),
        )  # fmt: skip


def digest(*parts: Any) -> str:
    """Eight hexadecimal digits that are a function of the parts, which are JSON-serialisable."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=4).hexdigest()


def spread(shares: Mapping[int, float], size: int) -> list[int]:
    """``size`` levels in the given shares, spread evenly: any part of the list has about the same shares."""
    whole = sum(shares.values())
    counts = {level: int(size * share / whole) for level, share in shares.items()}
    rest = sorted(shares, key=lambda level: counts[level] - size * shares[level] / whole)
    for level in rest[: size - sum(counts.values())]:
        counts[level] += 1
    places = [((index + 0.5) / count, level) for level, count in counts.items() for index in range(count)]
    return [level for _, level in sorted(places)]


def draw(
    name: str,
    sizes: Mapping[str, int],
    seed: int,
    shares: Mapping[int, float],
    drafts: Callable[[int, Random], Iterator[Draft]],
    finish: Callable[[Draft, str, str, int], Task],
) -> dict[str, list[Task]]:
    """Tasks for each split. ``name`` says of what, settings included. ``drafts`` gives candidates of a level without
    end, or until there are no more; ``finish`` makes a task of one, with its id, split and level. The ids contain a
    digest of the name, the seed and the sizes.

    Raises ValueError if ``sizes`` ask for more tasks than exist.
    """
    drawn = digest(name, seed, dict(sizes))
    candidates = {level: drafts(level, Random(f"{name}-{seed}-{level}")) for level in shares}
    levels = iter(spread(shares, sum(sizes.values())))
    family = name.partition("{")[0]
    seen: set[Hashable] = set()
    splits: dict[str, list[Task]] = {}
    for split, size in sizes.items():
        splits[split] = []
        for number in range(size):
            level = next(levels)
            draft = _unseen(candidates[level], seen)
            if draft is None:
                raise ValueError(
                    f"{split}: {sum(sizes.values())} tasks of {name} ask for more of level {level} than exist; use "
                    f"fewer tasks, or more levels"
                )
            splits[split].append(finish(draft, f"{family}-{drawn}-{split}-{number:05d}", split, level))
    return splits


def _unseen(candidates: Iterator[Draft], seen: set[Hashable]) -> Draft | None:
    for _ in range(SAME_IN_A_ROW):
        draft = next(candidates, None)
        if draft is None:
            return None
        key = draft.prompt if draft.key is None else draft.key
        if key not in seen:
            seen.add(key)
            return draft
    return None
