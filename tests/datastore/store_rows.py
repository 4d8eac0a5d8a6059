"""Trajectories to test the store with."""

from collections.abc import Callable

from agentrl.schemas.trajectory import Message, RewardComponent, Termination, ToolCall, Trajectory, trajectory_id

Make = Callable[..., Trajectory]


FP = "0123456789abcdef"


def build(number: int = 0, stage: str = "rollout", fingerprint: str = FP, **fields: object) -> Trajectory:
    """One consistent trajectory of two steps: a tool call with its observation, and an answer."""
    messages = [
        Message(role="user", content=f"boss of Ann {number}?", token_start=0, token_end=4),
        Message(
            role="assistant",
            reasoning="look it up",
            tool_calls=[ToolCall(id="c1", name="find", arguments='{"who": "Ann", "rel": "boss"}')],
            token_start=4,
            token_end=8,
        ),
        Message(role="tool", content=f"Bob {number}", tool_call_id="c1", name="find", token_start=8, token_end=10),
        Message(role="assistant", content=f"Bob {number}", token_start=10, token_end=12),
    ]
    mask = [False] * 4 + [True] * 4 + [False] * 2 + [True] * 2
    values: dict[str, object] = {
        "trajectory_id": trajectory_id(stage, fingerprint, number),
        "episode_id": f"e{number}",
        "task_id": f"t{number // 4}",
        "sample_index": number % 4,
        "source": "model",
        "env": "lookup",
        "split": "train",
        "level": number % 3,
        "prompt": f"boss of Ann {number}?",
        "reward": float(number % 2),
        "success": bool(number % 2),
        "termination": Termination.ANSWERED,
        "reward_components": [RewardComponent(name="exact", value=float(number % 2))],
        "tags": ["test"],
        "n_steps": 2,
        "n_tokens": 12,
        "n_action_tokens": 6,
        "n_tool_calls": 1,
        "messages": messages,
        "tools": '[{"type": "function", "function": {"name": "find"}}]',
        "tokenizer": "tok",
        "input_ids": [number % 100 + i for i in range(12)],
        "action_mask": mask,
        "logprobs": [-0.5 if action else float("nan") for action in mask],
    }
    return Trajectory.model_validate(values | fields)
