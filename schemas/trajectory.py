"""A trajectory: one contiguous token sequence of an episode, with everything needed to train on it again.

Scalars that people filter by come first, and Parquet statistics speed these filters up. Heavy columns come last and are
read only if a query names them.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.schemas.annotations import ADDED
from agentrl.schemas.arrow import Float32, Int32, Json, arrow_schema
from agentrl.schemas.json_text import loads

TRAJECTORY_VERSION: Annotated[int, ADDED, 4] = 6
"""Version of the columns. For the fingerprints of stages it counts as 4: what came later are columns that may be null,
from which no stage computes anything unless its code names them."""


class Termination(StrEnum):
    """Why an episode ended. Only ``answered`` says that the agent ended it by itself."""

    ANSWERED = "answered"
    MAX_STEPS = "max_steps"
    MAX_TOKENS = "max_tokens"
    MAX_CONTEXT = "max_context"
    """The conversation no longer fitted the model's context."""
    TIME_LIMIT = "time_limit"
    FORMAT_ERROR = "format_error"
    ENV_ERROR = "env_error"
    INFRA_ERROR = "infra_error"
    """A server, a sandbox or the network failed; it says nothing about the agent."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The source does not say. Never written by our own rollouts."""


INFRASTRUCTURE = (Termination.ENV_ERROR, Termination.INFRA_ERROR)
"""Ends that are no doing of the policy: the environment, a tool, the sandbox, a server or the network failed. Such a
row has neither reward nor success, so it is in no success rate, no group and no training set; whoever counts says how
many there were."""


class InfrastructureError(RuntimeError):
    """Something failed that is no doing of the policy, such as the server of a tool. An environment or a tool that
    raises it ends its own episode, as ``infra_error``."""


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(BaseModel):
    """A call as the policy made it. ``arguments`` is JSON text: argument schemas differ from tool to tool."""

    model_config = ConfigDict(extra="forbid")

    id: str
    name: str
    arguments: Json

    def parsed(self) -> dict[str, Any]:
        return loads(self.arguments)


class Message(BaseModel):
    """One message. ``token_start`` and ``token_end`` (exclusive) are its span in ``input_ids``; None without tokens.

    The span of an assistant message covers what the policy sampled, end-of-turn token included; template
    tokens around messages (role headers, line breaks) belong to no span or to the other roles' spans.

    ``error`` says of a tool's message whether the tool answered with an error; None if that is not known. No template
    and no engine shows it.
    """

    model_config = ConfigDict(extra="forbid")

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    error: Annotated[bool | None, ADDED] = None
    reward: float | None = None
    token_start: Int32 | None = None
    token_end: Int32 | None = None


class RewardComponent(BaseModel):
    """A part of a reward: the reward is the sum of ``weight * value`` over its components."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: float
    weight: float = 1.0


class Span(BaseModel):
    """The weights of ``version`` sampled the action tokens of ``input_ids[start:end]``, which may hold observations
    too."""

    model_config = ConfigDict(extra="forbid")

    version: Int32
    start: Int32
    end: Int32


class Trajectory(BaseModel):
    """One row of the buffer. Token columns are aligned: ``logprobs[t]`` is the behaviour policy's log-probability of
    ``input_ids[t]`` if ``action_mask[t]`` is true, else NaN. They are written as sampled, never rebuilt from text;
    rows imported without tokens have them empty.

    ``fork_at`` counts the leading tokens that a row shares with ``parent_id`` and did not sample itself; 0 is a whole
    row. ``pipeline`` is None if no pipeline made the row. ``spans`` are in order and together hold every action token;
    they are empty if it is not known which weights sampled the row.

    The columns of the origin are what the source of an imported row says of it: the id of its record, the file that it
    came from, when it happened, the model that acted as the source spells it, the tokens of all calls of that model
    together, and what they cost in US dollars. They are None in rows of our own stages.

    ``message_seconds`` has a value for each message, or is None if none is known: of an assistant message the wall time
    from the request of that turn until its answer was there, waiting for other turns of a batch and repeated samples
    included; of a tool's message the wall time of the call. What nobody measured, or somebody only wrote, is None. No
    digest and no fingerprint counts it, so that a row that is made again is equal."""

    model_config = ConfigDict(extra="forbid")

    # identity
    trajectory_id: str
    episode_id: str
    segment: Int32 = 0
    agent: str = "main"
    task_id: str
    group_id: str | None = None
    sample_index: Int32 = 0
    parent_id: str | None = None
    fork_at: Int32 = 0
    source: str
    # task
    env: str
    env_version: str = "1"
    split: str
    level: Int32 = 0
    prompt: str
    # lineage
    pipeline: str | None = None
    stage: str = ""
    fingerprint: str = ""
    run_id: str = ""
    policy: str = ""
    policy_version: Int32 = 0
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    sampling: Json = "{}"
    # outcome; None is unscored, which is neither 0 nor failed
    reward: float | None
    success: bool | None
    termination: Termination
    reward_components: list[RewardComponent] = []
    tags: list[str] = []
    # counts
    n_steps: Int32 = 0
    n_tokens: Int32 = 0
    n_action_tokens: Int32 = 0
    n_tool_calls: Int32 = 0
    n_tool_errors: Int32 = 0
    # origin of an imported row; None if the source does not say it
    source_id: Annotated[str | None, ADDED] = None
    source_file: Annotated[str | None, ADDED] = None
    source_time: Annotated[datetime | None, ADDED] = None
    model: Annotated[str | None, ADDED] = None
    prompt_tokens: Annotated[int | None, ADDED] = None
    completion_tokens: Annotated[int | None, ADDED] = None
    cost_usd: Annotated[float | None, ADDED] = None
    # content
    messages: list[Message]
    message_seconds: Annotated[list[Float32 | None] | None, ADDED] = None
    tools: Json = "[]"
    final_state: Json = "null"
    # tokens
    tokenizer: str = ""
    input_ids: list[Int32] = []
    action_mask: list[bool] = []
    logprobs: list[Float32] = []
    spans: list[Span] = []

    def scored_reward(self) -> float:
        """``reward``. Raises UnscoredError, with the row's id, if it is None."""
        if self.reward is None:
            raise UnscoredError("reward", [self.trajectory_id])
        return self.reward

    def scored_success(self) -> bool:
        """``success``. Raises UnscoredError, with the row's id, if it is None."""
        if self.success is None:
            raise UnscoredError("success", [self.trajectory_id])
        return self.success


def seconds_of_messages(known: Mapping[int, float], count: int) -> list[float | None] | None:
    """The column ``message_seconds`` of a row of ``count`` messages, from the seconds of those whose number is in
    ``known``."""
    return [known.get(number) for number in range(count)] if known else None


class UnscoredError(ValueError):
    """An outcome is needed of rows that have none."""

    def __init__(self, field: str, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        named = ", ".join(self.ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
        verb = "has" if len(ids) == 1 else "have"
        super().__init__(
            f"{named} {verb} no {field}: unscored is not failed; score these rows first, or leave them out with "
            f"the filter `{field} is not null`"
        )


TRAJECTORY_SCHEMA = arrow_schema(Trajectory, TRAJECTORY_VERSION)

HEAVY_COLUMNS = ("messages", "message_seconds", "tools", "final_state", "input_ids", "action_mask", "logprobs", "spans")
"""Columns that a scan over many rows should ask for only when it needs them."""


NOT_TRAINED = "not-trained"
"""Tag of a row that no stage trains on, such as a judge's or a simulated user's."""

CONTROL = "control"
"""Tag of a row of an evaluation at neither of its two usual temperatures: of those tried on dev tasks, which have the
tag ``dev`` too, or the best of them on the tasks that are measured."""

RETRIED = "retried"
"""Tag of an attempt that failed by no doing of the policy, and was made again. No stage selects it."""

REPLACED = "replaced"
"""Tag of a continuation whose first turn is that of a default policy, or says nothing: an alternative that others of
its group are compared with, which is not trained on that turn."""


def row_fingerprint(fingerprint: str, made_again: int) -> str:
    """The ``fingerprint`` column of a stage run's rows: the stage's fingerprint, followed by a point and ``made_again``
    if ``--force`` made them again."""
    return f"{fingerprint}.{made_again}" if made_again else fingerprint


def trajectory_id(stage: str, fingerprint: str, number: int, made_again: int = 0) -> str:
    """``<stage>-<fingerprint8>-<number>``: readable, sequential within one stage run, the same on every re-run. If the
    stage was made again, a point and ``made_again`` come before the number."""
    return f"{stage}-{row_fingerprint(fingerprint[:8], made_again)}-{number:06d}"


def attempt_id(trajectory_id: str, number: int) -> str:
    """The id of the attempt ``number``, from 1, that failed by no doing of the policy before the row of this id was
    made. It begins with that id, a tilde and the number."""
    return f"{trajectory_id}~{number}"


FINGERPRINT_IN_ID = r"-[0-9a-f]{8}(?:\.[0-9]+)?-([0-9]{6,})"
"""The part of an id that differs if the same rows are made again, by ``--force`` or after an edit."""
