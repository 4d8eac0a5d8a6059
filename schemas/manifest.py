"""The manifest of an artifact: what a stage run made, from what, with which code. Written last; without it the
artifact does not exist."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.trajectory import row_fingerprint

MANIFEST_VERSION = 2


class Kind(StrEnum):
    """What an output is, and what an input accepts. Edges are checked by it when a pipeline file is read."""

    TASKS = "tasks"  # Parquet of agentrl.schemas.task.Task
    TRAJECTORIES = "trajectories"  # Parquet (trajectory_id, weight): a selection of rows of the buffer, in order
    PAIRS = "pairs"  # Parquet of agentrl.schemas.pair.Pair
    MODEL = "model"  # folder: config.json, safetensors, tokenizer files
    REWARD_MODEL = "reward_model"  # folder: that of a model, reward_head.safetensors, reward_model.json
    SCORES = "scores"  # Parquet of agentrl.schemas.score.TrajectoryScore
    STEPS = "steps"  # Parquet of agentrl.schemas.step_value.StepValue
    NOTES = "notes"  # Parquet of agentrl.schemas.note.Note
    TABLE = "table"  # Parquet of any schema (metrics, evaluations)
    REPORT = "report"  # folder: report.md, report.html
    FOLDER = "folder"  # anything else


class OutputRecord(BaseModel):
    """One named output. ``path`` is relative to the artifact's folder; ``digest`` is over its content."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    path: str
    rows: int | None = None
    digest: str


class InputRecord(BaseModel):
    """One output that a stage reads. ``digest`` is over its content; it is empty until that is made."""

    model_config = ConfigDict(extra="forbid")

    stage: str
    output: str
    fingerprint: str
    digest: str = ""


class Ingredients(BaseModel):
    """All that enters the fingerprint, in separate fields, so that a plan can say which of them changed. ``pipeline``
    and the fingerprints of the inputs only record the origin; they do not enter."""

    model_config = ConfigDict(extra="forbid")

    scheme: int
    pipeline: str = ""
    stage: str
    uses: str
    uses_version: str
    config: dict[str, Any]
    seed: int
    inputs: dict[str, list[InputRecord]]
    externals: dict[str, str] = {}
    choices: dict[str, str] = {}
    code: dict[str, str]
    packages: dict[str, str] = {}


THREADS = "threads"
"""Of ``environment``: how many threads torch had, on which the last bits of a number depend."""


class Manifest(BaseModel):
    """One artifact. ``buffer_version`` is the Delta version up to which its buffer rows are visible.

    ``attempt`` names the folder, beside the manifest, that holds the outputs: each try at a stage writes to a folder of
    its own, and the manifest says which try counts. It is empty in manifests of version 1, whose outputs lie beside
    them. ``made_again`` counts how often ``--force`` made the artifact again, each time with new rows in the buffer.
    """

    model_config = ConfigDict(extra="forbid")

    manifest_version: int = MANIFEST_VERSION
    fingerprint: str
    attempt: str = ""
    ingredients: Ingredients
    outputs: dict[str, OutputRecord]
    run_id: str
    made_again: int = 0
    warnings: list[str] = []
    """Warnings of the stage, and of our code that it uses."""
    created_at: datetime
    duration_s: float
    buffer_version: int | None = None
    metrics: dict[str, float | int | str | None] = {}
    environment: dict[str, str] = {}
    """Where it ran: versions, paths outside of the store, and the :data:`THREADS` of torch."""

    @property
    def row_fingerprint(self) -> str:
        """The ``fingerprint`` column of the artifact's rows in the buffer."""
        return row_fingerprint(self.fingerprint, self.made_again)
