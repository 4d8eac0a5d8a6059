"""Small records of a store beside its artifacts: runs and tags. Fields that are not named here are kept as they are."""

from pydantic import BaseModel, ConfigDict


class StageRecord(BaseModel):
    """What a run did, or does, about one stage."""

    model_config = ConfigDict(extra="allow")

    status: str
    fingerprint: str


class RunRecord(BaseModel):
    """What every record ``runs/<run_id>.json`` holds."""

    model_config = ConfigDict(extra="allow")

    run_id: str
    state: str
    host: str
    pid: int
    stages: dict[str, StageRecord]


class TagRecord(BaseModel):
    """A user's name for an artifact, ``tags/<name>.json``."""

    stage: str
    fingerprint: str
