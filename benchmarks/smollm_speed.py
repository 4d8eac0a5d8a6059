"""SmolLM2-135M: sampling against ``generate()`` of transformers, and a GRPO update against TRL's, in CPU seconds of one
thread, in turn. The tasks are sums: one turn after a short question, so little is shared and nothing is long; where
prompts are longer, more is shared. ``rollouts.py`` and ``training.py`` print these lines if ``make smollm`` was run.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "build" / "smollm"
ABSENT = f"SmolLM2: not measured, there is no {FOLDER.parent.name}/{FOLDER.name}; make smollm"
GROUPS, GROUP, TURN, ROUNDS = 4, 8, 8, 3
TARGET = 2.0


def load() -> Any:
    from agentrl.models.policy import Policy

    return Policy.load(FOLDER, "smollm")


def openings(policy: Any, salt: int) -> list[list[int]]:
    """Token ids of the questions of ``GROUPS`` sums."""
    from agentrl.schemas.trajectory import Message, Role

    random = Random(salt)
    asked = [f"{random.randint(10, 99)} + {random.randint(10, 99)} =" for _ in range(GROUPS)]
    return [policy.codec.opening([Message(role=Role.USER, content=text)]) for text in asked]


def _seconds(sides: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """CPU seconds of each side, summed over the rounds after the first, which warms up."""
    spent = dict.fromkeys(sides, 0.0)
    for number in range(ROUNDS):
        for side, run in sides.items():
            start = time.process_time()
            run(number)
            spent[side] += (time.process_time() - start) * bool(number)
    return spent


def sampling(policy: Any) -> dict[str, float]:
    """CPU seconds for the same number of samples; all samples have ``TURN`` tokens on both sides."""
    import torch
    from transformers import GenerationConfig

    from agentrl.engines.base import Sampling
    from agentrl.engines.transformers import TransformersEngine

    engine = TransformersEngine(policy.model)
    how = Sampling(max_turn_tokens=TURN, max_tokens=512)

    async def turns(number: int) -> int:
        async def turn(group: int, sample: int, ids: list[int]) -> int:
            session = engine.open((group, sample), f"{number}-{group}")
            session.observe(ids)
            made = await engine.turn(session, how, stop=(-1,), seed=1000 * number + 8 * group + sample)
            session.end()
            return len(made.ids)

        every = [turn(group, n, ids) for group, ids in enumerate(openings(policy, number)) for n in range(GROUP)]
        return sum(await asyncio.gather(*every))

    def generated(number: int) -> int:
        rows = [ids for ids in openings(policy, number) for _ in range(GROUP)]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=TURN, min_new_tokens=TURN, eos_token_id=2)
        with torch.no_grad():
            made = policy.model.generate(ids, attention_mask=mask, generation_config=config)
        return int(made[:, width:].numel())

    made: dict[str, set[int]] = {"ours": set(), "generate": set()}
    runs = {"ours": lambda number: asyncio.run(turns(number)), "generate": generated}
    spent = _seconds({name: lambda n, name=name: made[name].add(runs[name](n)) for name in runs})  # type: ignore[misc]
    assert made["ours"] == made["generate"] == {GROUPS * GROUP * TURN}, made
    asyncio.run(engine.close())
    return spent


def update(policy: Any) -> dict[str, float]:
    """CPU seconds of a GRPO update of full weights on the same rows, half of each group right."""
    import copy

    from training_sides import ours, trl_grpo

    from agentrl.algorithms.grpo import GRPO
    from agentrl.models.policy import Policy
    from agentrl.schemas.training import TrainingRow

    random = Random(0)
    rows = []
    for group, ids in enumerate(openings(policy, 7)):
        for sample in range(GROUP):
            answer = [*policy.tokenizer.encode(str(random.randint(20, 198)), add_special_tokens=False), 2]
            whole = [*ids, *answer]
            rows.append(TrainingRow(
                row_id=f"{group}-{sample}", unit=len(rows), input_ids=whole, logprobs=[-3.0] * len(whole),
                mask=[False] * len(ids) + [True] * len(answer), weights=[1.0 if sample % 2 else -1.0] * len(whole),
            ))  # fmt: skip

    def copied() -> Any:
        return Policy(copy.deepcopy(policy.model), policy.tokenizer, "copy")

    with tempfile.TemporaryDirectory() as folder:
        sides = {"ours": ours(copied(), GRPO(), [rows]), "TRL": trl_grpo(copied(), [rows], folder)}
        return _seconds({name: lambda _, run=run: run() for name, run in sides.items()})  # type: ignore[misc]


def ratio(what: str, measure: Callable[[Any], dict[str, float]]) -> float | None:
    """Prints the CPU seconds of each side, and returns theirs over ours; None if there is no SmolLM2 here."""
    if not FOLDER.is_dir():
        print(ABSENT, flush=True)
        return None
    spent = measure(load())
    for side, seconds in spent.items():
        print(f"SmolLM2, {what}: {side}, {seconds / (ROUNDS - 1):.2f} CPU seconds", flush=True)
    [theirs] = [seconds for side, seconds in spent.items() if side != "ours"]
    return theirs / spent["ours"]
