"""What the experiments of ``methods.py`` are run in: environments, how a policy is warmed there, and what is best for
the baselines after that."""

from dataclasses import dataclass, field, replace
from typing import Any

from arms import SMALL


@dataclass(frozen=True)
class Course:
    """How a policy is warmed in an environment, and what is best for the baselines after that: the learning rates of
    GRPO and of rejection sampling, and which successes of a task that keeps."""

    environment: Any
    train: int
    context: int
    lr: float
    warm_steps: int = 500
    sft_lr: float = 1e-3
    offline_lr: float = 1e-4
    """Of GRPO on stored rows."""
    dpo_lr: float = 2e-5
    keeps: dict[str, Any] = field(default_factory=lambda: {"agree": 2})
    shown: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 512
    size: dict[str, int] = field(default_factory=dict)
    """What else the model's size is."""
    batch: int | None = None
    """Rows of a step of the warm start, if they are others than elsewhere."""
    judged: int = 512
    """Dev tasks, and held-out tasks, at most."""


ROOMS = {"type": "rooms", "spoken": True}
# Of the 2,256 pairs of rooms all that are not judged: from half of them no policy learns ways between new ones.
PAIRS = 1232
COURSES = {
    "rooms": Course(ROOMS, PAIRS, 256, 3e-4),
    "rooms, silent": Course({"type": "rooms"}, PAIRS, 256, 3e-4),
    "rooms, little warmed": Course(ROOMS, PAIRS, 256, 3e-4, warm_steps=360),
    "rooms 1-6": Course({**ROOMS, "levels": [1, 2, 3, 4, 5, 6]}, 1024, 256, 3e-4),
    "rooms, 30 steps": Course(ROOMS, PAIRS, 704, 3e-4, shown={"noise": 0.4}),  # walks that are long
    "words": Course(
        {"type": "words", "names": 64},
        512,
        192,
        2e-3,
        warm_steps=200,
        sft_lr=2e-3,
        offline_lr=1e-3,
        dpo_lr=2e-4,
        keeps={"keep": 1},
        vocabulary=640,
    ),
    "lookup": Course("lookup", 768, 192, 1e-3, warm_steps=160, offline_lr=1e-3, shown={"noise": 0.2, "coverage": 0.5}),
    "code": Course(
        {"type": "code", "levels": [1]},
        256,
        512,
        1e-3,
        warm_steps=85,
        sft_lr=2e-3,
        keeps={"keep": 1},
        vocabulary=768,
        size={"turn": 64},
        batch=16,
    ),
    "program_io": Course(
        {"type": "program_io", "levels": [1], "kinds": ["deduction"]}, 1024, 128, 1e-3, warm_steps=600
    ),
    "search_qa": Course(
        {"type": "search_qa", "levels": [1, 2], "size": 60},
        768,
        768,
        5e-4,
        warm_steps=150,
        sft_lr=2e-3,
        shown={"noise": 0.0},
        vocabulary=1200,
        size={"layers": 3},
        judged=256,
    ),
}
COURSES["search_qa, worlds"] = replace(
    COURSES["search_qa"],
    environment={"type": "search_qa", "levels": [1, 2], "size": 60, "worlds": 20},
    train=6000,
    lr=1e-3,
    warm_steps=400,
    vocabulary=1024,
    batch=16,
    judged=512,
)
COURSES["search_qa, terms"] = replace(
    COURSES["search_qa, worlds"],
    environment={"type": "search_qa", "levels": [1], "size": 60, "worlds": 20, "unknown": 5},
    context=320,
    warm_steps=700,
)  # as in pipelines/specs/search_qa.yaml
COURSES["code, doubtful"] = replace(COURSES["code"], train=512, warm_steps=100)
if SMALL:
    COURSES = {name: replace(course, train=24, warm_steps=8) for name, course in COURSES.items()}
