"""A pipeline file: what is written in YAML, before names are resolved. ``agentrl schema pipeline`` exports it."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=80)]
"""Letters, digits, ``_`` and ``-``: names become folders and parts of trajectory ids."""

Edges = str | list[str]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


OF_ARRAYS = re.compile(
    r"(--(array|job-name|output|error|parsable|wait|wrap|test-only|clusters|cluster)(=|$)|-[aJoeWM])"
)
"""Options of sbatch by which the shards of a stage are submitted and found again."""


class ShardEngine(_Strict):
    """What runs the shards of a stage that reads or makes many rows. The rows that it gives are the same with each."""

    type: Literal["here", "processes", "ray", "slurm", "prefect"] | None = Field(
        None,
        description="this process, others of this machine, a Ray cluster, Slurm, or a work pool of Prefect; None: "
        "processes for much work",
    )
    pool: str | None = Field(None, min_length=1, description="The work pool, of type prefect")
    workers: int | None = Field(None, ge=1, description="How many shards run at once; None: as many as CPUs")
    shards: int | None = Field(None, ge=1, description="Into how many the work is divided; None: by its size")
    memory_gib: float | None = Field(None, gt=0, description="Memory of each shard, which ray and slurm reserve")
    gpus: int | None = Field(
        None,
        ge=1,
        description="GPUs of each shard: ray and slurm reserve them; a process has them for itself",
    )
    folder: str | None = Field(
        None, description="A folder that all workers see; None: the store's own, which a store on S3 has not"
    )
    options: list[str] = Field([], description="More options of sbatch, such as --partition=cpu")

    @field_validator("options")
    @classmethod
    def _not_ours(cls, options: list[str]) -> list[str]:
        for option in options:
            if OF_ARRAYS.match(option):
                raise ValueError(f"{option}: jobs are named, numbered, watched and logged by the stage; leave it out")
        return options

    @model_validator(mode="after")
    def _of_a_pool(self) -> "ShardEngine":
        if (self.type == "prefect") != (self.pool is not None):
            raise ValueError("type: prefect and pool: NAME belong together; set both or none")
        if self.pool and (self.memory_gib or self.gpus or self.options):
            raise ValueError(
                f"what a job of a Prefect pool reserves is said by the pool; set it there (prefect work-pool update "
                f"{self.pool}), and leave out memory_gib, gpus and options"
            )
        return self


class SlurmLauncher(_Strict):
    """The machines of the Slurm allocation that the stage runs in."""

    type: Literal["slurm"] = Field("slurm", description="one srun for each process")
    options: list[str] = Field([], description="More options of srun, such as --gpus-per-node=8")


LauncherName = Literal["local", "hostfile", "ray", "slurm", "external"]


def _launcher(value: Any) -> str:
    return "settings" if isinstance(value, dict | SlurmLauncher) else "name"


Launcher = Annotated[
    Annotated[LauncherName, Tag("name")] | Annotated[SlurmLauncher, Tag("settings")], Discriminator(_launcher)
]


class TimeLimits(_Strict):
    """How long the processes of a stage wait for each other, in seconds."""

    heartbeat_s: float = Field(
        60.0, ge=5, description="Without a sign of life of the stage, and for a file of a shared folder to be seen"
    )
    connect_s: float = Field(60.0, gt=0, description="Until a machine of a hostfile answers")
    reserve_s: float = Field(600.0, gt=0, description="Until Ray has the machines free")
    rendezvous_s: float = Field(
        600.0, gt=0, description="Until all ranks have reported to the first; what one of them imports and loads counts"
    )
    server_start_s: float | None = Field(
        None, gt=0, description="Until a server answers or has read weights; None: 600, and one for each 50 MB of them"
    )
    transfer_s: float | None = Field(
        None, gt=0, description="Of one transfer of weights (engine.sync); None: 300, and one for each 50 MB of them"
    )


class Execution(_Strict):
    """Where and how a stage runs. Nothing here enters the fingerprint."""

    pool: str | None = Field(None, description="Prefect work pool; None runs the stage on the machine of the run")
    gpus: int = Field(
        0, ge=0, description="GPUs reserved for the stage on each machine; above 0 it gets a process of its own"
    )
    gpu_gib: float | None = Field(None, gt=0, description="Memory of a GPU, for plan --placement; None asks the driver")
    launcher: Launcher = Field(
        "local", description="What starts the stage's ranks and servers; external: nothing, they run already"
    )
    nodes: int | None = Field(
        None, ge=1, description="Machines to start them on; None: all of the hostfile or allocation, otherwise one"
    )
    hostfile: str | None = Field(None, description="Machines of launcher hostfile, one 'name slots=N' a line")
    limits: TimeLimits = Field(TimeLimits(), description="How long the stage's ranks and servers wait for each other")
    engine: ShardEngine = Field(ShardEngine(), description="What runs the shards of stages that are divided")
    concurrency: list[Name] = Field([], description="Global concurrency slots that are held while the stage runs")
    retries: int = Field(0, ge=0, le=100, description="How often a failed stage is tried again")
    retry_delay_s: float = Field(10.0, ge=0, description="Seconds before the first retry; doubled for each further one")
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which one try is ended; None is no limit")
    env: dict[str, str] = Field({}, description="Environment variables of the stage's process, e.g. OMP_NUM_THREADS")

    @property
    def launches(self) -> str:
        """The name of the launcher."""
        return self.launcher if isinstance(self.launcher, str) else self.launcher.type

    @property
    def spreads(self) -> bool:
        """Whether ranks and servers are started on other machines."""
        return self.launches in ("hostfile", "ray", "slurm")


class StageSpec(_Strict):
    """One stage of a pipeline."""

    uses: str = Field(description="A stage of the library (train.sft) or of yours (my_project.stages:score)")
    inputs: dict[str, Edges] = Field(
        {},
        description="Edges: input -> stage, stage.output or STAGE/FINGERPRINT of an artifact of the store (of a cut "
        "NAME/newest too); a list or a pattern (star-*) if the input takes several",
    )
    with_: dict[str, Any] = Field({}, alias="with", description="Config of the stage, checked by its own model")
    seed: int | None = Field(None, description="Seed of this stage; None takes the pipeline's")
    matrix: dict[str, list[Any]] = Field(
        {}, description="One copy of the stage per combination. Keys: a config key, inputs.NAME, or seed"
    )
    execution: Execution = Execution()


class Carry(_Strict):
    """An edge that differs between the first round and the later ones."""

    first: Edges = Field(description="Edge of round 1: an output from outside the group")
    then: Edges = Field(description="Edge of later rounds: an output of the round before")


class GroupSpec(_Strict):
    """Stages that are repeated, each round reading outputs of the round before through ``carry``."""

    repeat: int = Field(ge=1, le=1000, description="Number of rounds; stage x of round 2 is called x-2")
    carry: dict[Name, Carry] = Field({}, description="Names that stages of the group read as carry.NAME")
    stages: dict[Name, StageSpec] = Field(min_length=1)


def _entry(value: Any) -> str:
    keys = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return "group" if "repeat" in keys or "stages" in keys else "stage"


Entry = Annotated[Annotated[StageSpec, Tag("stage")] | Annotated[GroupSpec, Tag("group")], Discriminator(_entry)]


class Profile(_Strict):
    """An overlay on the pipeline, chosen by ``--profile``."""

    description: str = Field("", description="what the profile is for")
    seed: int | None = Field(None, description="in place of the pipeline's")
    execution: dict[str, Any] = Field({}, description="Default execution of all stages")
    stages: dict[str, Any] = Field({}, description="Merged over the pipeline's stages, key by key; null removes")


class PipelineSpec(_Strict):
    """A pipeline: stages and how they are wired."""

    name: Name = Field(description="of the pipeline, in runs and listings")
    description: str = Field("", description="what the pipeline does, in a sentence")
    extends: str | None = Field(None, description="A file, relative to this one, or a pipeline of the library")
    seed: int = Field(0, description="of all stages that have none of their own")
    execution: Execution = Field(Execution(), description="Default execution of all stages")
    profiles: dict[Name, Profile] = {}
    stages: dict[Name, Entry] = Field(min_length=1)
