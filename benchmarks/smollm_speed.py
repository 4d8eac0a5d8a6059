"""SmolLM2-135M: sampling against ``generate()`` of transformers, and a GRPO update against TRL's, in CPU seconds of one
thread, in turn. The tasks are sums: one turn after a short question, so little is shared and nothing is long. Sampling
is measured in groups of 8, and one sample of each task behind a system prompt, which the embedded engine computes once;
that in bfloat16 too. ``rollouts.py`` and ``training.py`` print these lines if ``make smollm`` was run.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "build" / "smollm"
ABSENT = f"SmolLM2: not measured, there is no {FOLDER.parent.name}/{FOLDER.name}; make smollm"
GROUPS, GROUP, TURN, ROUNDS = 4, 8, 8, 3
TARGET = 2.0
SYSTEM = "You answer sums. Write the number and nothing else, without words, units or a full stop. " * 10
"""Some 200 tokens, as a system prompt with the descriptions of two tools has."""


def load() -> Any:
    from agentrl.models.policy import Policy

    return Policy.load(FOLDER, "smollm")


def openings(policy: Any, salt: int, number: int = GROUPS, system: str = "") -> list[list[int]]:
    """Token ids of the questions of ``number`` sums."""
    from agentrl.schemas.trajectory import Message, Role

    random = Random(salt)
    asked = [f"{random.randint(10, 99)} + {random.randint(10, 99)} =" for _ in range(number)]
    before = [Message(role=Role.SYSTEM, content=system)] if system else []
    return [policy.codec.opening([*before, Message(role=Role.USER, content=text)]) for text in asked]


def _seconds(sides: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """CPU seconds of each side, summed over the rounds after the first, which warms up."""
    spent = dict.fromkeys(sides, 0.0)
    for number in range(ROUNDS):
        for side, run in sides.items():
            start = time.process_time()
            run(number)
            spent[side] += (time.process_time() - start) * bool(number)
    return spent


def sampled(policy: Any, precision: str, prompts: list[list[int]], each: int, number: int) -> int:
    """Sample ``each`` turns after each of the prompts by the embedded engine; returns the number of tokens."""
    from agentrl.engines.base import Sampling
    from agentrl.engines.transformers import TransformersEngine

    engine = TransformersEngine(policy.model, autocast=policy.prepare(precision).autocast)
    how = Sampling(max_turn_tokens=TURN, max_tokens=512)

    async def turn(group: int, sample: int, ids: list[int]) -> int:
        session = engine.open((group, sample), f"{number}-{group}")
        session.observe(ids)
        made = await engine.turn(session, how, stop=(-1,), seed=1000 * number + 8 * group + sample)
        session.end()
        return len(made.ids)

    async def turns() -> int:
        made = await asyncio.gather(*(turn(g, n, ids) for g, ids in enumerate(prompts) for n in range(each)))
        await engine.close()
        return sum(made)

    return asyncio.run(turns())


def generated(policy: Any, precision: str, prompts: list[list[int]], each: int) -> int:
    """The same by ``generate()``."""
    import torch
    from transformers import GenerationConfig

    rows = [ids for ids in prompts for _ in range(each)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=TURN, min_new_tokens=TURN, eos_token_id=2)
    with torch.no_grad(), policy.prepare(precision).autocast():
        made = policy.model.generate(ids, attention_mask=mask, generation_config=config)
    return int(made[:, width:].numel())


def _against_generate(policy: Any, precision: str, groups: int, each: int, system: str = "") -> dict[str, float]:
    """CPU seconds for the same number of samples; all samples have ``TURN`` tokens on both sides."""

    def prompts(number: int) -> list[list[int]]:
        return openings(policy, number, groups, system)

    made: dict[str, set[int]] = {"ours": set(), "generate": set()}
    sides: dict[str, Callable[[int], object]] = {
        "ours": lambda number: made["ours"].add(sampled(policy, precision, prompts(number), each, number)),
        "generate": lambda number: made["generate"].add(generated(policy, precision, prompts(number), each)),
    }
    spent = _seconds(sides)
    assert made["ours"] == made["generate"] == {groups * each * TURN}, made
    return spent


SAMPLING: Mapping[str, Callable[[Any], dict[str, float]]] = {
    "sampling": partial(_against_generate, precision="float32", groups=GROUPS, each=GROUP),
    "sampling behind a system prompt": partial(
        _against_generate, precision="float32", groups=GROUPS * GROUP, each=1, system=SYSTEM
    ),
    "sampling behind a system prompt in bfloat16": partial(
        _against_generate, precision="bfloat16", groups=GROUPS * GROUP, each=1, system=SYSTEM
    ),
}


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
