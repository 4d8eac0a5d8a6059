"""A task: what an agent is asked to do, and how its answer is checked."""

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import Int32, Json, arrow_schema

TASK_VERSION = 1


class Task(BaseModel):
    """One task of one environment. ``ground_truth`` is read by the verifier and never shown to the policy."""

    model_config = ConfigDict(extra="forbid")

    task_id: str
    env: str
    split: str
    level: Int32 = 0
    prompt: str
    tools: Json = "[]"
    verifier: str = "exact_match"
    ground_truth: Json = "null"
    metadata: Json = "{}"


TASK_SCHEMA = arrow_schema(Task, TASK_VERSION)
